"""Proximal policy optimisation: the ratio of each token is clipped."""

from __future__ import annotations

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
from together_post_training.losses.positions import POLICY_INPUTS, positions


def ppo(lp: Array, inputs: Inputs, params: Params) -> LossValue:
    """-sum w * min(r * A, clip(r, low, high) * A); low and high are bounds of r itself, not offsets from 1.

    Where the clipped term is the smaller one the derivative is 0. Source: Schulman et al. 2017,
    arXiv:1707.06347, equation 7, with Tinker's bounds.
    """
    at = positions(lp, inputs)
    cut = clipped_surrogate(at, at.ratio, *bounds(inputs, params))
    return LossValue(
        loss=float(cut.terms.sum()),
        gradient=cut.gradient,
        num_trained=at.num_counted,
        metrics=ratio_metrics(at, at.ratio) | clip_metrics(cut.is_high, cut.is_low),
    )


CONTRACT = LossContract(
    fn=ppo,
    inputs=POLICY_INPUTS,
    optional=("weights", *BOUND_INPUTS),
    params={
        "clip_low_threshold": Number(default=0.8),
        "clip_high_threshold": Number(default=1.2),
    },
)
