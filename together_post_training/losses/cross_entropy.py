"""Cross-entropy: supervised learning, and distillation on a teacher's top tokens."""

from __future__ import annotations

import numpy as np

from together_post_training.losses.base import Array, Inputs, LossContract, LossValue, Params
from together_post_training.losses.positions import weights_of


def cross_entropy(lp: Array, inputs: Inputs, params: Params) -> LossValue:
    """-sum w * lp; w may be fractional or negative. lp and w have shape (N,) or (N, K).

    Source: Tinker's loss reference ("cross_entropy"), also for (N, K).
    """
    weights = weights_of(lp, inputs)
    counts = weights != 0
    # Left out, not multiplied by 0: a masked target may have no probability at all.
    loss = -float((weights * np.where(counts, lp, 0.0)).sum())
    trained = counts.any(axis=-1) if counts.ndim > 1 else counts
    return LossValue(loss=loss, gradient=-weights, num_trained=int(np.count_nonzero(trained)))


CONTRACT = LossContract(
    fn=cross_entropy,
    inputs=("target_tokens",),
    optional=("weights",),
    takes_2d=True,
    linear=True,
)
