"""CISPO: the importance weight is clipped, not the update."""

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
from together_post_training.losses.clipping import BOUND_INPUTS, bounds
from together_post_training.losses.metrics import clip_metrics, ratio_metrics
from together_post_training.losses.positions import POLICY_INPUTS, positions


def cispo(lp: Array, inputs: Inputs, params: Params) -> LossValue:
    """-sum w * stopgrad(clip(r, low, high)) * lp * A: every token keeps a gradient.

    Source: MiniMax-M1, arXiv:2506.13585, equation 4, with Tinker's bounds.
    """
    at = positions(lp, inputs)
    low, high = bounds(inputs, params)
    is_high, is_low = (at.ratio > high) & at.counts, (at.ratio < low) & at.counts
    clipped = np.where(is_high, high, np.where(is_low, low, at.ratio))
    gradient = -clipped * at.scale
    return LossValue(
        loss=float((gradient * np.where(at.counts, lp, 0.0)).sum()),
        gradient=gradient,
        num_trained=at.num_counted,
        metrics=ratio_metrics(at, at.ratio) | clip_metrics(is_high, is_low),
    )


CONTRACT = LossContract(
    fn=cispo,
    inputs=POLICY_INPUTS,
    optional=("weights", *BOUND_INPUTS),
    params={
        "clip_low_threshold": Number(default=0.0),
        "clip_high_threshold": Number(default=4.0),
    },
)
