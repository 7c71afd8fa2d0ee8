"""AdamW in numpy: the reference for every engine's optimiser step.

Decoupled weight decay as in Loshchilov & Hutter, arXiv:1711.05101, in the order of operations of
`torch.optim.AdamW`:

    w <- w * (1 - lr * weight_decay)
    m <- beta1 * m + (1 - beta1) * g
    v <- beta2 * v + (1 - beta2) * g^2
    w <- w - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from backend.trainer.base import AdamParams, Array


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamState:
    """One tensor and its moments, float64, all of one shape."""

    weights: Array
    exp_avg: Array
    exp_avg_sq: Array


def adamw(state: AdamState, gradient: Array, step: int, params: AdamParams) -> AdamState:
    """The state after the step-th step (1, 2, ...); arguments stay as they are."""
    beta1, beta2 = params.beta1, params.beta2
    exp_avg = beta1 * state.exp_avg + (1 - beta1) * gradient
    exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * np.square(gradient)
    direction = exp_avg / (1 - beta1**step)
    size = np.sqrt(exp_avg_sq / (1 - beta2**step)) + params.eps
    decayed = state.weights * (1 - params.learning_rate * params.weight_decay)
    return AdamState(
        weights=decayed - params.learning_rate * direction / size,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
    )


def global_norm(gradients: Iterable[Array]) -> float:
    """The L2 norm over all tensors together; inf where it overflows, NaN where a value is."""
    norms = [float(np.linalg.norm(g.ravel())) for g in gradients]
    return math.hypot(*norms)


def clip_factor(norm: float, max_norm: float) -> float:
    """What to multiply gradients of this norm by so that it is at most `max_norm`; 0 clips nothing."""
    if max_norm > 0 and norm > max_norm:
        return max_norm / norm
    return 1.0
