"""Policy gradient with importance weights."""

from __future__ import annotations

from together_post_training.losses.base import Array, Inputs, LossContract, LossValue, Params
from together_post_training.losses.metrics import ratio_metrics
from together_post_training.losses.positions import POLICY_INPUTS, positions


def importance_sampling(lp: Array, inputs: Inputs, params: Params) -> LossValue:
    """-sum w * r * A, differentiated through r: the derivative is -w * r * A.

    Source: Tinker's loss reference ("importance_sampling").
    """
    at = positions(lp, inputs)
    terms = -at.ratio * at.scale
    return LossValue(
        loss=float(terms.sum()),
        gradient=terms,
        num_trained=at.num_counted,
        metrics=ratio_metrics(at, at.ratio),
    )


CONTRACT = LossContract(fn=importance_sampling, inputs=POLICY_INPUTS, optional=("weights",))
