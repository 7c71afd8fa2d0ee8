"""AdamW over one flat buffer against torch's own, tensor by tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backend.trainer.base import ADAMW, AdamParams
from backend.trainer.flat_layout import FlatLayout
from backend.trainer.flat_optimizer import FlatOptimizer
from together_post_training.errors import PostTrainingError, Reason

SIZE = 1000
LAYOUT = FlatLayout({"first": (30, 10), "second": (1,), "third": (699,)})


def start() -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(0))


def gradient(step: int) -> torch.Tensor:
    """Of very different sizes, some elements always 0."""
    generator = torch.Generator().manual_seed(100 + step)
    g = torch.randn(SIZE, generator=generator) * torch.logspace(-8, 3, SIZE)
    g[::10] = 0
    return g


def adamw(weights: torch.Tensor) -> FlatOptimizer:
    return FlatOptimizer(ADAMW, weights, LAYOUT)


def params_of(step: int) -> AdamParams:
    return AdamParams(
        learning_rate=0.02 / (step + 1),
        beta1=0.9 - 0.01 * step,
        beta2=0.95,
        eps=1e-12 if step % 2 else 1e-8,
        weight_decay=0.1 * (step % 3),
        grad_clip_norm=50.0 * (step % 2),
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        # The same arithmetic, one tensor after the other instead of all at once.
        (torch.float32, 1e-6),
        # Weights of about 1 that move by up to 0.5 in all: float32 rounds each of 50 steps by 1e-7 at most.
        (torch.float64, 1e-5),
    ],
)
def test_fifty_steps_with_changing_parameters_equal_torch(dtype: torch.dtype, tolerance: float):
    weights = start()
    ours = adamw(weights)
    parts = [nn.Parameter(part) for part in start().to(dtype).split([300, 1, 699])]
    reference = torch.optim.AdamW(parts)
    for step in range(50):
        params, g = params_of(step), gradient(step)
        metrics = ours.step(g.clone(), params)
        for part, part_gradient in zip(parts, g.to(dtype).split([300, 1, 699]), strict=True):
            part.grad = part_gradient.clone()
        if params.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(parts, params.grad_clip_norm)
        reference.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        reference.step()
        norm = float(g.double().norm())
        assert metrics["unclipped_grad_l2:mean"] == pytest.approx(norm, rel=1e-6)
        assert metrics["grad_clipped:mean"] == float(0 < params.grad_clip_norm < norm)
        assert metrics["learning_rate:mean"] == params.learning_rate
        assert metrics["step:max"] == step + 1
    torch.testing.assert_close(
        weights.double(), torch.cat([p.detach() for p in parts]).double(), rtol=0, atol=tolerance
    )


def test_update_norm_is_the_length_of_the_move():
    metrics = adamw(start()).step(gradient(0), AdamParams(learning_rate=0.1))
    # Each of the 900 elements with a gradient moves by lr.
    assert metrics["update_l2:mean"] == pytest.approx(0.1 * 900**0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("scale", "params"),
    [
        (float("nan"), AdamParams()),
        (float("inf"), AdamParams()),
        (1e25, AdamParams()),  # its square overflows
        (1.0, AdamParams(learning_rate=1e39)),  # the move overflows
    ],
)
def test_step_that_is_not_finite_is_undone(scale, params):
    """OP-08: what follows is as if it had never been tried."""
    weights, control = start(), start()
    ours, other = adamw(weights), adamw(control)
    for one in (ours, other):
        one.step(gradient(0), AdamParams(learning_rate=0.1))
    with pytest.raises(PostTrainingError) as error:
        ours.step(gradient(1) * scale, params)
    assert error.value.reason is Reason.NON_FINITE_LOSS
    assert torch.equal(weights, control)
    assert ours.num_steps == other.num_steps == 1
    for one in (ours, other):
        one.step(gradient(2), AdamParams(learning_rate=0.1))
    assert torch.equal(weights, control)
    for moment, by_name in ours.state().moments.items():
        for name, tensor in by_name.items():
            assert (tensor == other.state().moments[moment][name]).all()


def test_clipping_saves_a_gradient_whose_square_would_overflow():
    metrics = adamw(start()).step(
        torch.full((SIZE,), 1e25), AdamParams(learning_rate=0.1, grad_clip_norm=1.0)
    )
    assert metrics["update_l2:mean"] == pytest.approx(0.1 * SIZE**0.5, rel=1e-4)
    assert metrics["grad_clipped:mean"] == 1.0
