"""Muon in numpy, float64: the reference for every engine's optimiser step.

Keller Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/, in the order of operations of `torch.optim.Muon`
(https://docs.pytorch.org/docs/stable/generated/torch.optim.Muon.html), for a matrix w and its gradient g:

    m <- momentum * m + (1 - momentum) * g
    u <- momentum * m + (1 - momentum) * g                  Nesterov's look-ahead
    o <- NewtonSchulz(u)                                    near U V^T of u = U S V^T: singular values 0.7 to 1.2
    w <- w * (1 - lr * weight_decay)                        decoupled
    w <- w - lr * scale * o

scale: "match_adam": 0.2 * sqrt(max(rows, columns)), Liu et al. 2025, arXiv:2502.16982: the update's root mean square is
then AdamW's; "original": sqrt(max(1, rows / columns)).

torch runs Newton-Schulz in bfloat16, whose 8 bits remain in the update: from this one it differs by 0.5 to 4% of its
length after 5 Newton-Schulz steps, and by more after more, because the polynomial never settles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from backend.trainer.base import Array, MuonParams

# The quintic of the steepest slope at 0, and what a norm counts at least; torch.optim.Muon's defaults.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonState:
    """One matrix and its momentum, float64, of one shape."""

    weights: Array
    momentum_buffer: Array


def muon(
    state: MuonState,
    gradient: Array,
    params: MuonParams,
    scaling: Literal["match_adam", "original"],
) -> MuonState:
    """The state after one step; arguments stay as they are. `params.adam` says nothing here."""
    momentum = params.momentum
    buffer = momentum * state.momentum_buffer + (1 - momentum) * gradient
    ahead = momentum * buffer + (1 - momentum) * gradient
    direction = newton_schulz(ahead, params.newton_schulz_steps)
    decayed = state.weights * (1 - params.learning_rate * params.weight_decay)
    rate = params.learning_rate * update_scale(gradient.shape, scaling)
    return MuonState(weights=decayed - rate * direction, momentum_buffer=buffer)


def newton_schulz(matrix: Array, num_steps: int) -> Array:
    """The matrix with its singular values brought near 1; one of zeros stays one of zeros."""
    rows, columns = matrix.shape
    x = matrix.T if rows > columns else matrix
    x = x / max(float(np.linalg.norm(x)), _EPS)
    for _ in range(num_steps):
        gram = x @ x.T
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.T if rows > columns else x


def update_scale(shape: tuple[int, ...], scaling: Literal["match_adam", "original"]) -> float:
    """What a matrix of this shape moves by, for each unit of the learning rate and of the orthogonal matrix."""
    rows, columns = shape
    if scaling == "match_adam":
        return 0.2 * max(rows, columns) ** 0.5
    return max(1.0, rows / columns) ** 0.5
