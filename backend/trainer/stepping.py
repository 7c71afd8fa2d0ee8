"""What an optimiser step of any engine and family checks, and what it reports."""

from __future__ import annotations

import math

from backend.trainer.adam import clip_factor
from backend.trainer.base import OptimParams
from together_post_training.errors import PostTrainingError, Reason, fail

# Squares of gradients, single and summed, are float32 in AdamW's second moment and in Muon's scaling: up to 3.4e38.
_LARGEST_NORM = 1.8e19


def gradient_factor(norm: float, params: OptimParams) -> float:
    """What to multiply a gradient of this global norm by: 1, or what clips it.

    Raises:
        PostTrainingError: NON_FINITE_LOSS when no step can be taken from it.
    """
    if not math.isfinite(norm):
        raise no_step(f"the gradient's norm is {norm}")
    factor = clip_factor(norm, params.grad_clip_norm)
    if norm * factor > _LARGEST_NORM:
        raise no_step(f"the gradient's norm is {norm:g}: its square overflows float32")
    return factor


def step_metrics(
    params: OptimParams, *, grad_norm: float, update_norm: float, num_steps: int
) -> dict[str, float]:
    """Tinker's "name:reduction".

    Args:
        grad_norm: the global L2 norm before clipping.
        update_norm: that of what the step added to the weights.
        num_steps: how many steps the optimiser has taken, this one included.
    """
    return {
        "unclipped_grad_l2:mean": grad_norm,
        "grad_clipped:mean": float(clip_factor(grad_norm, params.grad_clip_norm) != 1.0),
        "update_l2:mean": update_norm,
        "learning_rate:mean": params.learning_rate,
        "step:max": float(num_steps),
    }


def overflow(params: OptimParams) -> PostTrainingError:
    rate = f"learning rate {params.learning_rate:g}"
    return no_step(f"with {rate} it moves a weight out of float32's range")


def no_step(what: str) -> PostTrainingError:
    return fail(
        Reason.NON_FINITE_LOSS,
        f"The optimiser step cannot be taken: {what}. Weights and moments are unchanged, the gradient is cleared.",
    )
