"""REINFORCE that stays stable off-policy: our reading of Tinker's loss of that name."""

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
from together_post_training.losses.positions import log_ratio_of, positions, weights_of

# Importance weights are truncated here, as is common where a sampler's numerics differ from a trainer's.
_LARGEST_RATIO = 2.0


def stable_reinforce(lp: Array, inputs: Inputs, params: Params) -> LossValue:
    """-sum w * stopgrad(min(r, 2)) * A * lp  +  kl_coeff * sum w * (lp - log q)^2 / 2, over sampled tokens.

    Tinker's own formula is not public. This is an interpretation of its name and inputs: REINFORCE on the tokens that
    the service sampled, with truncated importance weights (Ionides 2008; as rho-bar in IMPALA, arXiv:1802.01561)
    and the estimator k2 of KL(p || q) as penalty (Schulman, "Approximating KL divergence", 2020), whose slope
    lp - log q cannot overflow. The penalty stays where A is 0.

    `logprobs` and `sampled` (not 0 where the target was sampled) come from the server's record of the sequences that
    the sample's provenance spans name.
    """
    sampled = inputs["sampled"] != 0
    weights = np.where(sampled, weights_of(lp, inputs), 0.0)
    included = weights != 0
    at = positions(lp, {**inputs, "weights": weights})
    drift = np.where(included, log_ratio_of(lp, inputs), 0.0)
    kl_coeff = number(params, "kl_coeff")
    is_high = at.ratio > _LARGEST_RATIO
    reinforce = -np.where(is_high, _LARGEST_RATIO, at.ratio) * at.scale
    terms = reinforce * np.where(at.counts, lp, 0.0) + 0.5 * kl_coeff * weights * drift**2
    return LossValue(
        loss=float(terms.sum()),
        gradient=reinforce + kl_coeff * weights * drift,
        num_trained=int(np.count_nonzero(included)),
        metrics=ratio_metrics(at, at.ratio) | clip_metrics(is_high, np.zeros_like(is_high)),
    )


CONTRACT = LossContract(
    fn=stable_reinforce,
    inputs=("target_tokens", "advantages"),
    optional=("weights",),
    provided=("logprobs", "sampled"),
    params={"kl_coeff": Number(default=0.01, low=0.0)},
    notice=(
        "Loss 'stable_reinforce': the hosted service's formula is not public. This server minimises its own reading of "
        "it: REINFORCE on sampled tokens with importance weights truncated at 2, plus kl_coeff times half the squared "
        "log-ratio of current to sampling policy. Compare results with that in mind."
    ),
)
