"""Muon over one flat buffer against torch's own, tensor by tensor."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backend.trainer.base import (
    AdamParams,
    DimuonParams,
    MuonParams,
    OptimizerConfig,
    OptimizerState,
)
from backend.trainer.dimuon import as_muon
from backend.trainer.flat_layout import FlatLayout
from backend.trainer.flat_optimizer import FlatOptimizer
from together_post_training.errors import PostTrainingError, Reason

MUON = OptimizerConfig(family="muon")
# An adapter's two shapes, a stack of experts, and what AdamW steps, between them.
LAYOUT = FlatLayout(
    {
        "lora_A": (4, 24),
        "embedding": (10, 3),
        "lora_B": (12, 4),
        "norm": (7,),
        "experts": (3, 8, 5),
        "square": (6, 6),
    }
)
MATRICES = ("lora_A", "lora_B", "experts", "square")
TOLERANCE = 1e-6


def start() -> Tensor:
    return torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(0))


def gradient(step: int) -> Tensor:
    """Of different sizes, and one tensor without any."""
    g = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(100 + step))
    views = LAYOUT.views(g)
    for i, view in enumerate(views.values()):
        view.mul_(10.0 ** ((step + i) % 5 - 3))
    views["square"].zero_()
    return g


def params_of(step: int) -> MuonParams:
    return MuonParams(
        learning_rate=0.02 / (step + 1),
        momentum=0.95 - 0.01 * step,
        newton_schulz_steps=1 + step % 6,
        weight_decay=0.1 * (step % 3),
        grad_clip_norm=5.0 * (step % 2),
        adam=AdamParams(learning_rate=0.01, beta1=0.9 - 0.01 * step, eps=1e-8, weight_decay=0.2),
    )


class Separate:
    """torch's Muon and AdamW on tensors of their own."""

    def __init__(self, matrices: tuple[str, ...], adjust_lr_fn: str) -> None:
        self.tensors = {
            name: [nn.Parameter(part.clone()) for part in _parts(view)]
            for name, view in LAYOUT.views(start()).items()
        }
        of_muon = [t for name in matrices for t in self.tensors[name]]
        others = [t for n, ts in self.tensors.items() if n not in matrices for t in ts]
        self._muon = torch.optim.Muon(of_muon, adjust_lr_fn=adjust_lr_fn)
        self._adam = torch.optim.AdamW(others) if others else None

    def step(self, flat: Tensor, params: MuonParams) -> None:
        # Not clip_grad_norm_, whose norm is float32: a gradient that differs by 1e-7 may be another bfloat16 to Muon.
        norm = float(flat.double().norm())
        if 0 < params.grad_clip_norm < norm:
            flat = flat * (params.grad_clip_norm / norm)
        for name, view in LAYOUT.views(flat).items():
            for tensor, part in zip(self.tensors[name], _parts(view), strict=True):
                tensor.grad = part.clone()
        self._muon.param_groups[0].update(
            lr=params.learning_rate,
            momentum=params.momentum,
            ns_steps=params.newton_schulz_steps,
            weight_decay=params.weight_decay,
        )
        self._muon.step()
        if self._adam is not None:
            self._adam.param_groups[0].update(
                lr=params.adam.learning_rate,
                betas=(params.adam.beta1, params.adam.beta2),
                eps=params.adam.eps,
                weight_decay=params.adam.weight_decay,
            )
            self._adam.step()

    def flat(self) -> Tensor:
        return torch.cat([t.detach().reshape(-1) for ts in self.tensors.values() for t in ts])


def _parts(view: Tensor) -> list[Tensor]:
    """The experts one by one; everything else whole."""
    return list(view) if view.ndim == 3 else [view]


def muon(weights: Tensor, config: OptimizerConfig = MUON) -> FlatOptimizer:
    return FlatOptimizer(config, weights, LAYOUT, MATRICES)


def assert_same_state(got: OptimizerState, wanted: OptimizerState) -> None:
    assert (got.family, got.num_steps) == (wanted.family, wanted.num_steps)
    assert got.moments.keys() == wanted.moments.keys()
    for moment, by_name in wanted.moments.items():
        assert got.moments[moment].keys() == by_name.keys()
        for name, tensor in by_name.items():
            assert got.moments[moment][name].dtype == np.float32
            np.testing.assert_array_equal(got.moments[moment][name], tensor)


@pytest.mark.parametrize("scaling", ["match_adam", "original"])
def test_fifty_steps_with_changing_parameters_equal_torch(
    scaling: Literal["match_adam", "original"],
):
    """The same arithmetic on the same values, AdamW's tensors among Muon's."""
    weights = start()
    ours = muon(weights, OptimizerConfig(family="muon", muon_scaling=scaling))
    adjust = {"match_adam": "match_rms_adamw", "original": "original"}[scaling]
    reference = Separate(MATRICES, adjust)
    for step in range(50):
        params, g = params_of(step), gradient(step)
        metrics = ours.step(g.clone(), params)
        reference.step(g, params)
        norm = float(g.double().norm())
        assert metrics["unclipped_grad_l2:mean"] == pytest.approx(norm, rel=1e-6)
        assert metrics["grad_clipped:mean"] == float(0 < params.grad_clip_norm < norm)
        assert metrics["learning_rate:mean"] == params.learning_rate
        assert metrics["step:max"] == step + 1
    torch.testing.assert_close(weights, reference.flat(), rtol=0, atol=TOLERANCE)


def test_every_matrix_is_muons_where_nothing_else_is_said():
    layout = FlatLayout({"a": (4, 6), "b": (5, 4)})
    weights = torch.ones(layout.size)
    ours = FlatOptimizer(MUON, weights, layout)
    ours.step(torch.randn(layout.size), MuonParams())
    assert ours.state().moments.keys() == {"momentum_buffer"}
    assert ours.state().moments["momentum_buffer"].keys() == {"a", "b"}


def test_moments_are_kept_of_what_each_rule_steps_alone():
    moments = muon(start()).state().moments
    assert moments["momentum_buffer"].keys() == set(MATRICES)
    others = {"embedding", "norm"}
    assert moments["exp_avg"].keys() == moments["exp_avg_sq"].keys() == others


def test_a_gradient_of_zeros_moves_nothing():
    """As that of every A while B is 0: no 0 / 0."""
    weights = start()
    metrics = muon(weights).step(torch.zeros(LAYOUT.size), MuonParams())
    assert torch.equal(weights, start())
    assert metrics["update_l2:mean"] == 0.0


def test_update_norm_is_the_length_of_the_move():
    weights = start()
    metrics = muon(weights).step(gradient(0), params_of(0))
    moved = (weights.double() - start().double()).norm()
    assert metrics["update_l2:mean"] == pytest.approx(float(moved), rel=1e-6)


def test_dimuon_is_muon_of_momentum_beta1_that_matches_adam():
    layout = FlatLayout({"a": (4, 6), "b": (5, 4)})
    config = OptimizerConfig(family="dimuon")
    ours, reference = (torch.ones(layout.size) for _ in range(2))
    dimuon = FlatOptimizer(config, ours, layout)
    separate = [nn.Parameter(view) for view in layout.views(reference).values()]
    optimizer = torch.optim.Muon(
        separate,
        lr=0.1,
        weight_decay=0,
        momentum=0.8,
        ns_steps=5,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(5):
        g = torch.randn(layout.size, generator=torch.Generator().manual_seed(step))
        for tensor, part in zip(separate, layout.views(g.clone()).values(), strict=True):
            tensor.grad = part
        optimizer.step()
        dimuon.step(g, DimuonParams(learning_rate=0.1, beta1=0.8))
    torch.testing.assert_close(ours, reference, rtol=0, atol=TOLERANCE)
    assert dimuon.state().family == "dimuon"


def test_dimuon_of_full_weights_steps_the_rest_with_adamw_of_its_learning_rate_and_beta1():
    adam = as_muon(DimuonParams(learning_rate=0.1, beta1=0.8, grad_clip_norm=2.0)).adam
    assert adam == AdamParams(learning_rate=0.1, beta1=0.8, eps=1e-8)


@pytest.mark.parametrize(
    ("scale", "params"),
    [
        (float("nan"), MuonParams()),
        (float("inf"), MuonParams()),
        # Newton-Schulz would divide by an infinite length and move nothing, in silence.
        (1e25, MuonParams(grad_clip_norm=0.0)),
        (1.0, MuonParams(learning_rate=1e37)),  # the move overflows
        (1.0, MuonParams(learning_rate=1e300)),  # no float32 at all
        (1.0, MuonParams(weight_decay=1e300)),
        (1.0, MuonParams(adam=AdamParams(learning_rate=1e300))),
    ],
)
def test_step_that_is_not_finite_is_undone(scale: float, params: MuonParams):
    """OP-08: what follows is as if it had never been tried."""
    weights, control = start(), start()
    ours, other = muon(weights), muon(control)
    for one in (ours, other):
        one.step(gradient(0), params_of(0))
    with pytest.raises(PostTrainingError) as error:
        ours.step(gradient(1) * scale, params)
    assert error.value.reason is Reason.NON_FINITE_LOSS
    assert torch.equal(weights, control)
    assert_same_state(ours.state(), other.state())
    for one in (ours, other):
        one.step(gradient(2), params_of(2))
    assert torch.equal(weights, control)
    assert_same_state(ours.state(), other.state())


def test_clipping_saves_a_gradient_whose_square_would_overflow():
    weights, control = start(), start()
    g = gradient(0)
    big = torch.full((LAYOUT.size,), 1e25)
    muon(weights).step(big, MuonParams(grad_clip_norm=1.0))
    muon(control).step(torch.full_like(g, 1.0), MuonParams(grad_clip_norm=1.0))
    torch.testing.assert_close(weights, control, rtol=0, atol=1e-3)
    assert not torch.equal(weights, start())


def test_a_loaded_state_goes_on_where_it_was_taken():
    """Law 13: bit for bit; and a state that was handed out does not follow."""
    weights = start()
    ours = muon(weights)
    for step in range(3):
        ours.step(gradient(step), params_of(step))
    taken, halfway = ours.state(), weights.clone()
    resumed_weights = halfway.clone()
    resumed = muon(resumed_weights)
    for one in (ours, resumed):
        if one is resumed:
            one.check(taken)
            one.load(taken)
        for step in range(3, 6):
            one.step(gradient(step), params_of(step))
    assert torch.equal(weights, resumed_weights)
    assert_same_state(ours.state(), resumed.state())
    assert taken.num_steps == 3
    ours.load(None)
    assert ours.num_steps == 0
    assert not any(t.any() for by_name in ours.state().moments.values() for t in by_name.values())


@pytest.mark.parametrize(
    ("state", "named"),
    [
        (FlatOptimizer(OptimizerConfig(), start(), LAYOUT).state(), "adamw.*muon"),
        (OptimizerState(family="muon", num_steps=1, moments={}), "momentum_buffer"),
        (
            FlatOptimizer(MUON, torch.zeros(24), FlatLayout({"lora_A": (4, 6)})).state(),
            "momentum_buffer.*exp_avg",
        ),
    ],
)
def test_states_that_do_not_fit_are_refused(state: OptimizerState, named: str):
    with pytest.raises(PostTrainingError, match=named) as error:
        muon(start()).check(state)
    assert error.value.reason is Reason.INCOMPATIBLE_CHECKPOINT
