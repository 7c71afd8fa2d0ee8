"""DPPO: updates stop where a token's probability, not its ratio, has moved far."""

from __future__ import annotations

import numpy as np

from together_post_training.losses.base import (
    Array,
    Inputs,
    LossContract,
    LossValue,
    Number,
    Params,
    number,
)
from together_post_training.losses.metrics import clip_metrics, ratio_metrics
from together_post_training.losses.positions import POLICY_INPUTS, positions


def dppo(lp: Array, inputs: Inputs, params: Params) -> LossValue:
    """-sum w * M * r * A, with M = 0 if (A > 0 and p - q > delta_high) or (A < 0 and q - p > delta_low), else 1.

    p = exp(lp) and q = exp(log q): limits act on the change of the probability, so that rare tokens may move by any
    factor. A masked position adds neither loss nor gradient.

    Source: Divergence PPO, arXiv:2602.04879, with the binary total variation.
    """
    at = positions(lp, inputs)
    p, q = (np.exp(x, dtype=np.float64) for x in (lp, inputs["logprobs"]))
    rise = np.where(at.counts, p - q, 0.0)
    is_high = (at.advantages > 0) & (rise > number(params, "delta_high"))
    is_low = (at.advantages < 0) & (-rise > number(params, "delta_low"))
    terms = np.where(is_high | is_low, 0.0, -at.ratio * at.scale)
    return LossValue(
        loss=float(terms.sum()),
        gradient=terms,
        num_trained=at.num_counted,
        metrics=ratio_metrics(at, at.ratio) | clip_metrics(is_high, is_low),
    )


CONTRACT = LossContract(
    fn=dppo,
    inputs=POLICY_INPUTS,
    optional=("weights",),
    params={
        "delta_low": Number(default=0.15, low=0.0, high=1.0),
        "delta_high": Number(default=0.15, low=0.0, high=1.0),
    },
)
