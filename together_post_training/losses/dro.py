"""Direct reward optimisation: a policy gradient with a quadratic pull towards the sampling policy."""

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
from together_post_training.losses.metrics import ratio_metrics
from together_post_training.losses.positions import (
    POLICY_INPUTS,
    log_ratio_of,
    positions,
    weights_of,
)


def dro(lp: Array, inputs: Inputs, params: Params) -> LossValue:
    """-sum w * (lp * A - beta / 2 * (lp - log q)^2); the penalty stays where A is 0.

    Source: Direct Reward Optimisation, arXiv:2405.19107, as in Tinker's loss reference.
    """
    weights = weights_of(lp, inputs)
    included = weights != 0
    at = positions(lp, inputs)
    beta = number(params, "beta")
    drift = np.where(included, log_ratio_of(lp, inputs), 0.0)
    used = np.where(included, lp, 0.0)
    terms = weights * (0.5 * beta * drift**2 - used * at.advantages)
    return LossValue(
        loss=float(terms.sum()),
        gradient=weights * (beta * drift - at.advantages),
        num_trained=int(np.count_nonzero(included)),
        metrics=ratio_metrics(at, at.ratio),
    )


CONTRACT = LossContract(
    fn=dro,
    inputs=POLICY_INPUTS,
    optional=("weights",),
    params={"beta": Number(default=0.05)},
)
