"""GRPO: ppo's objective, aggregated over a batch, with a penalty for leaving a reference policy."""

from __future__ import annotations

import numpy as np

from together_post_training.losses.aggregation import AGG_TYPE, divisor
from together_post_training.losses.base import (
    Array,
    Choice,
    Inputs,
    LossContract,
    LossValue,
    Number,
    Params,
    number,
)
from together_post_training.losses.clipping import BOUND_INPUTS, bounds, clipped_surrogate
from together_post_training.losses.kl import k3
from together_post_training.losses.metrics import clip_metrics, ratio_metrics, reference_metrics
from together_post_training.losses.positions import (
    POLICY_INPUTS,
    Positions,
    log_ratio_of,
    positions,
    sequence_ratio,
    weights_of,
)


def grpo(lp: Array, inputs: Inputs, params: Params) -> LossValue:
    """Aggregated w * (-min(r * A, clip(r, low, high) * A) + beta * k3), k3 of KL(p || reference).

    Included are the positions whose weight is not 0: all without weights, prompts too. The penalty stays where A is 0.

    ratio_type TOKEN: r = p / q of each token. SEQUENCE: r is exp(mean of lp - log q over the included positions), as
    in gspo; each token keeps a derivative r of its own.

    agg_type FIXED_HORIZON: sum / (num_samples * horizon), horizon being the trainer's max_seq_length unless given.
    TOKEN_MEAN: sum / number of included positions of the whole call. SEQUENCE_MEAN: mean over samples of the mean
    over their included positions. Samples without included positions do not count in the means; they count in
    FIXED_HORIZON, whose denominator does not depend on what is masked.

    Sources: DeepSeekMath, arXiv:2402.03300, equations 3 and 4 (SEQUENCE_MEAN, k3); DAPO, arXiv:2503.14476 (TOKEN_MEAN,
    two bounds); Dr. GRPO, arXiv:2503.20783 (FIXED_HORIZON); GSPO, arXiv:2507.18071 (SEQUENCE).
    """
    weights = weights_of(lp, inputs)
    included = weights != 0
    at = positions(lp, inputs)
    ratio = _ratio(at, lp, inputs, params, included)
    cut = clipped_surrogate(at, ratio, *bounds(inputs, params))
    terms, gradient = cut.terms, cut.gradient
    metrics = ratio_metrics(at, ratio) | clip_metrics(cut.is_high, cut.is_low)
    beta = number(params, "beta")
    if "reference_logprobs" in inputs:
        current, reference = (
            np.where(included, x, 0.0) for x in (lp, inputs["reference_logprobs"])
        )
        kl, slope = k3(current, reference)
        metrics |= reference_metrics(kl[included])
        if beta:
            terms = terms + weights * (beta * kl)
            gradient = gradient + weights * (beta * slope)
    num_included = int(np.count_nonzero(included))
    divided_by = divisor(params, num_included)
    return LossValue(
        loss=float(terms.sum()) / divided_by,
        gradient=gradient / divided_by,
        num_trained=num_included if beta else at.num_counted,
        metrics=metrics,
    )


def _ratio(at: Positions, lp: Array, inputs: Inputs, params: Params, included: Array) -> Array:
    if params["ratio_type"] == "TOKEN":
        return at.ratio
    return np.where(at.counts, sequence_ratio(log_ratio_of(lp, inputs), included), 1.0)


CONTRACT = LossContract(
    fn=grpo,
    inputs=POLICY_INPUTS,
    optional=("reference_logprobs", "weights", *BOUND_INPUTS),
    params={
        "clip_low_threshold": Number(default=0.8, high=1.0),
        "clip_high_threshold": Number(default=1.2, low=1.0),
        "beta": Number(default=0.0, low=0.0),
        "agg_type": AGG_TYPE,
        "ratio_type": Choice(
            default="TOKEN", accepted=("TOKEN", "SEQUENCE"), prefix="GRPO_LOSS_RATIO_TYPE_"
        ),
        "horizon": Number(default=0.0, low=0.0),
        "denominator": Number(default=0.0, low=0.0),
    },
)
