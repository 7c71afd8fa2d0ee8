"""How far the policy has moved, estimated from single tokens."""

from __future__ import annotations

import numpy as np

from together_post_training.losses.base import Array


def k3(lp: Array, reference: Array) -> tuple[Array, Array]:
    """(k3, its derivative by lp) of KL(p || ref), for tokens drawn from p: float64, infinite where it overflows.

    exp(d) - d - 1 with d = log ref - lp, never negative; the derivative is 1 - exp(d).

    Source: Schulman, "Approximating KL divergence", 2020.
    """
    d = np.subtract(reference, lp, dtype=np.float64)
    growth = np.expm1(d)
    return growth - d, -growth
