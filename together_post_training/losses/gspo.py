"""GSPO: the tokens of a sequence share one ratio."""

from __future__ import annotations

import numpy as np

from together_post_training.losses.base import (
    Array,
    Inputs,
    LossContract,
    LossValue,
    Number,
    Params,
)
from together_post_training.losses.clipping import BOUND_INPUTS, bounds, clipped_surrogate
from together_post_training.losses.metrics import clip_metrics, ratio_metrics
from together_post_training.losses.positions import (
    POLICY_INPUTS,
    log_ratio_of,
    positions,
    sequence_ratio,
)


def gspo(lp: Array, inputs: Inputs, params: Params) -> LossValue:
    """-sum w * min(r * A, clip(r, low, high) * A) with the ratio of the whole sequence.

    s = exp(mean of stopgrad(lp) - log q over the positions where sequence_ratio_mask is not 0),
    r = s * exp(lp - stopgrad(lp)): the value of r is s at every token, its derivative by the token's own lp is s.

    Without a mask every position of the sample is part of the sequence, its prompt too.

    Source: Group Sequence Policy Optimization, arXiv:2507.18071, section 4.3 (GSPO-token), as in Tinker's loss
    reference ("gspo"). Tinker does not publish its default bounds; 0.8 and 1.2 here are those of ppo. The paper
    works with bounds far closer to 1 (0.9997 and 1.0004), as ratios of sequences vary less than those of tokens.
    """
    at = positions(lp, inputs)
    mask = inputs.get("sequence_ratio_mask")
    s = sequence_ratio(log_ratio_of(lp, inputs), None if mask is None else mask != 0)
    ratio = np.where(at.counts, s, 1.0)
    cut = clipped_surrogate(at, ratio, *bounds(inputs, params))
    return LossValue(
        loss=float(cut.terms.sum()),
        gradient=cut.gradient,
        num_trained=at.num_counted,
        metrics=ratio_metrics(at, ratio) | clip_metrics(cut.is_high, cut.is_low),
    )


CONTRACT = LossContract(
    fn=gspo,
    inputs=POLICY_INPUTS,
    optional=("sequence_ratio_mask", "weights", *BOUND_INPUTS),
    params={
        "clip_low_threshold": Number(default=0.8),
        "clip_high_threshold": Number(default=1.2),
    },
)
