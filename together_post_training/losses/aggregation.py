"""What a loss over a whole batch is divided by.

A loss looks at one sample at a time, so what it needs to know of the others is worked out before: weights are inputs,
hence known in advance. The parameter `denominator` holds it: the number of included positions (TOKEN_MEAN), of
samples that have any (SEQUENCE_MEAN), or of all samples (FIXED_HORIZON) of the whole call. Included are positions
whose weight is not 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from together_post_training.losses.base import Choice, Inputs, Params, number

AGG_TYPE = Choice(
    default="FIXED_HORIZON",
    accepted=("FIXED_HORIZON", "TOKEN_MEAN", "SEQUENCE_MEAN"),
    prefix="GRPO_LOSS_AGGREGATION_TYPE_",
)


def denominator(agg_type: str, batch: Sequence[Inputs]) -> float:
    """Of samples with these inputs. Additive: that of a whole call is the sum of those of its parts."""
    if agg_type == "FIXED_HORIZON":
        return float(len(batch))
    included = [_num_included(inputs) for inputs in batch]
    if agg_type == "TOKEN_MEAN":
        return float(sum(included))
    return float(np.count_nonzero(included))


def divisor(params: Params, num_included: int) -> float:
    """What the sum over one sample's positions is divided by; `params` are prepared.

    A batch in which nothing is included has a loss of 0, whatever it is divided by.
    """
    over_batch = max(number(params, "denominator"), 1.0)
    match params["agg_type"]:
        case "TOKEN_MEAN":
            return over_batch
        case "SEQUENCE_MEAN":
            return over_batch * max(num_included, 1)
    return over_batch * number(params, "horizon")


def _num_included(inputs: Inputs) -> int:
    weights = inputs.get("weights")
    return len(inputs["target_tokens"]) if weights is None else int(np.count_nonzero(weights))
