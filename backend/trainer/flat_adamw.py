"""torch.optim.AdamW over one flat tensor, with parameters that change from step to step.

One fused kernel, however many tensors lie in it; a step that would leave anything but finite numbers is undone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from backend.trainer.base import AdamParams
from together_post_training.errors import Reason, fail

# The second moment is a square in float32.
_LARGEST_SQUARABLE = math.sqrt(torch.finfo(torch.float32).max)


class FlatAdamW:
    """Owns the moments of `weights`, a flat float32 parameter, and steps it in place."""

    def __init__(self, weights: nn.Parameter) -> None:
        self._weights = weights
        self._optimizer = torch.optim.AdamW([weights], fused=True)
        self.reset()

    @property
    def num_steps(self) -> int:
        return int(self._state["step"])

    @property
    def exp_avg(self) -> Tensor:
        return self._state["exp_avg"]

    @property
    def exp_avg_sq(self) -> Tensor:
        return self._state["exp_avg_sq"]

    def reset(self, num_steps: int = 0) -> None:
        """Zero moments; a caller that restores others writes to them."""
        self._state = {
            "step": torch.tensor(float(num_steps)),
            "exp_avg": torch.zeros_like(self._weights),
            "exp_avg_sq": torch.zeros_like(self._weights),
        }
        self._optimizer.state[self._weights] = self._state

    def step(self, gradient: Tensor, params: AdamParams) -> dict[str, float]:
        """One step, after clipping the gradient, in place, to its largest global norm. Metrics: "name:reduction".

        Raises:
            PostTrainingError: NON_FINITE_LOSS; weights, moments and number of steps are what they were.
        """
        norm = _norm(gradient)
        if not math.isfinite(norm):
            raise _non_finite(f"the gradient's norm is {norm}")
        if params.grad_clip_norm > 0 and norm > params.grad_clip_norm:
            gradient.mul_(params.grad_clip_norm / norm)
        if norm > _LARGEST_SQUARABLE and gradient.abs().max() > _LARGEST_SQUARABLE:
            raise _non_finite(f"the gradient's norm is {norm:g}: its square overflows float32")
        before = self._copy()
        self._step(gradient, params)
        update_norm = _norm(self._weights.detach() - before[0])
        if not math.isfinite(update_norm):
            self._restore(before)
            raise _non_finite(
                f"learning rate {params.learning_rate:g} moves a weight out of float32's range"
            )
        return {
            "unclipped_grad_l2:mean": norm,
            "update_l2:mean": update_norm,
            "learning_rate:mean": params.learning_rate,
            "step:max": float(self.num_steps),
        }

    def _step(self, gradient: Tensor, params: AdamParams) -> None:
        self._optimizer.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        self._weights.grad = gradient
        self._optimizer.step()
        self._weights.grad = None

    def _copy(self) -> tuple[Tensor, ...]:
        return tuple(t.detach().clone() for t in (self._weights, *self._state.values()))

    def _restore(self, before: tuple[Tensor, ...]) -> None:
        for tensor, old in zip((self._weights, *self._state.values()), before, strict=True):
            tensor.detach().copy_(old)


def _norm(tensor: Tensor) -> float:
    """In float64, where no float32 overflows."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _non_finite(what: str):
    return fail(
        Reason.NON_FINITE_LOSS,
        f"The optimiser step cannot be taken: {what}. Weights and moments are unchanged, the gradient is cleared.",
    )
