"""The fused flat optimiser against torch's own, tensor by tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backend.trainer.base import AdamParams
from backend.trainer.flat_adamw import FlatAdamW
from together_post_training.errors import PostTrainingError, Reason

SIZE = 1000


def start() -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(0))


def gradient(step: int) -> torch.Tensor:
    """Of very different sizes, some elements always 0."""
    generator = torch.Generator().manual_seed(100 + step)
    g = torch.randn(SIZE, generator=generator) * torch.logspace(-8, 3, SIZE)
    g[::10] = 0
    return g


def test_steps_with_changing_parameters_equal_torch_in_float64():
    """25 steps: within 1e-5 of torch.optim.AdamW on separate float64 tensors, moves of up to 0.5 in all."""
    weights = nn.Parameter(start())
    ours = FlatAdamW(weights)
    parts = [nn.Parameter(part) for part in start().double().split([300, 1, 699])]
    reference = torch.optim.AdamW(parts)
    for step in range(25):
        params = AdamParams(
            learning_rate=0.02 / (step + 1),
            beta1=0.9 - 0.01 * step,
            beta2=0.95,
            eps=1e-12 if step % 2 else 1e-8,
            weight_decay=0.1 * (step % 3),
            grad_clip_norm=50.0 * (step % 2),
        )
        g = gradient(step)
        metrics = ours.step(g.clone(), params)
        for part, part_gradient in zip(parts, g.double().split([300, 1, 699]), strict=True):
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
        assert metrics["unclipped_grad_l2:mean"] == pytest.approx(
            float(g.double().norm()), rel=1e-6
        )
        assert metrics["learning_rate:mean"] == params.learning_rate
        assert metrics["step:max"] == step + 1
    torch.testing.assert_close(
        weights.detach().double(), torch.cat([p.detach() for p in parts]), rtol=0, atol=1e-5
    )


def test_update_norm_is_the_length_of_the_move():
    weights = nn.Parameter(start())
    metrics = FlatAdamW(weights).step(gradient(0), AdamParams(learning_rate=0.1))
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
    weights, control = nn.Parameter(start()), nn.Parameter(start())
    ours, other = FlatAdamW(weights), FlatAdamW(control)
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
    assert torch.equal(ours.exp_avg, other.exp_avg)
    assert torch.equal(ours.exp_avg_sq, other.exp_avg_sq)


def test_clipping_saves_a_gradient_whose_square_would_overflow():
    weights = nn.Parameter(start())
    metrics = FlatAdamW(weights).step(
        torch.full((SIZE,), 1e25), AdamParams(learning_rate=0.1, grad_clip_norm=1.0)
    )
    assert metrics["update_l2:mean"] == pytest.approx(0.1 * SIZE**0.5, rel=1e-4)
