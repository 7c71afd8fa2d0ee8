"""The AdamW reference against torch.optim.AdamW in float64, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from backend.trainer.adam import AdamState, adamw, clip_factor, global_norm
from backend.trainer.base import AdamParams


def run(gradients: list[np.ndarray], weights: np.ndarray, params: AdamParams) -> list[np.ndarray]:
    """The weights after each step."""
    state = AdamState(
        weights=weights, exp_avg=np.zeros_like(weights), exp_avg_sq=np.zeros_like(weights)
    )
    seen = []
    for step, gradient in enumerate(gradients, start=1):
        factor = clip_factor(global_norm([gradient]), params.grad_clip_norm)
        state = adamw(state, factor * gradient, step, params)
        seen.append(state.weights)
    return seen


@pytest.mark.parametrize(
    "params",
    [
        AdamParams(learning_rate=0.1),
        AdamParams(learning_rate=0.01, weight_decay=0.1),
        AdamParams(learning_rate=0.02, beta1=0.0, beta2=0.999, eps=1e-8),
        AdamParams(learning_rate=0.02, beta1=0.5, beta2=0.0, eps=1e-3, weight_decay=1.0),
    ],
)
def test_adamw_equals_torch(params: AdamParams):
    """OP-02, OP-03; float64 on both sides: equal to rounding after 50 steps."""
    random = np.random.default_rng(0)
    weights = random.normal(size=(5, 3))
    gradients = [random.normal(size=(5, 3)) * 10.0 ** random.integers(-9, 3) for _ in range(50)]
    tensor = torch.nn.Parameter(torch.tensor(weights))
    optimizer = torch.optim.AdamW(
        [tensor],
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    for gradient, ours in zip(gradients, run(gradients, weights, params), strict=True):
        tensor.grad = torch.tensor(gradient)
        optimizer.step()
        np.testing.assert_allclose(ours, tensor.detach().numpy(), rtol=1e-12)


@pytest.mark.parametrize(
    ("gradients", "params", "expected"),
    [
        ([0.5, -0.25, 0.125], {}, [0.9, 0.873163, 0.838495]),
        ([0.5, -0.25], {"beta2": 0.999}, [0.9, 0.873366]),
        # eps is 1e-12 by default: with 1e-8 this move would be .0091.
        ([1e-9], {}, [1 - 0.0999]),
        ([0.5, -0.25, 0.125], {"weight_decay": 0.1}, [0.89, 0.854263, 0.811052]),
    ],
)
def test_adamw_of_a_scalar_by_hand(gradients, params, expected):
    """OP-03. Six digits, worked out by hand; start at 1, lr .1, other defaults."""
    arrays = [np.array([g]) for g in gradients]
    seen = run(arrays, np.ones(1), AdamParams(learning_rate=0.1, **params))
    np.testing.assert_allclose(np.concatenate(seen), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("clip", "expected"), [(0.0, (-0.179733, -0.033434)), (1.0, (-0.195799, -0.063663))]
)
def test_clipping_scales_the_step_it_applies_to(clip, expected):
    """OP-04. Gradients (.3, .4), of norm .5, and (3, -4), of norm 5; by hand, six digits."""
    gradients = [np.array([0.3, 0.4]), np.array([3.0, -4.0])]
    params = AdamParams(learning_rate=0.1, grad_clip_norm=clip)
    np.testing.assert_allclose(run(gradients, np.zeros(2), params)[-1], expected, atol=1e-6)


def test_adamw_leaves_its_arguments_alone():
    state = AdamState(weights=np.ones(2), exp_avg=np.ones(2), exp_avg_sq=np.ones(2))
    gradient = np.ones(2)
    adamw(state, gradient, 1, AdamParams(weight_decay=0.1))
    for array in (state.weights, state.exp_avg, state.exp_avg_sq, gradient):
        np.testing.assert_array_equal(array, np.ones(2))


def test_global_norm_is_over_all_tensors():
    assert global_norm([np.array([[3.0]]), np.array([0.0, 4.0])]) == 5.0
    assert global_norm([]) == 0.0
    assert math.isnan(global_norm([np.array([np.nan])]))


def test_clip_factor_brings_the_norm_down_to_the_limit():
    assert clip_factor(5.0, 1.0) == 0.2
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(5.0, 0.0) == 1.0
