"""Optimiser steps in numpy, of every family: float64 arithmetic on values that are kept in float32."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from backend.trainer.adam import AdamState, adamw, global_norm
from backend.trainer.base import (
    AdamParams,
    Array,
    DimuonParams,
    MuonParams,
    OptimizerConfig,
    OptimizerState,
    OptimParams,
)
from backend.trainer.checks import check_optimizer_state
from backend.trainer.dimuon import as_muon
from backend.trainer.moments import moment_shapes
from backend.trainer.muon import MuonState, muon
from backend.trainer.stepping import gradient_factor, overflow, step_metrics

Tensors = Mapping[str, Array]


class ReferenceOptimizer:
    """Owns the moments of named tensors, which it is given and gives back: weights are values here.

    Args:
        tensors: of the names and shapes that will be stepped.
        matrices: those that Muon steps; AdamW steps the others.
    """

    def __init__(
        self, config: OptimizerConfig, tensors: Tensors, matrices: Collection[str]
    ) -> None:
        self.config = config
        self._matrices = matrices
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._moment_shapes = moment_shapes(config, shapes, matrices)
        self.load(None)

    @property
    def state(self) -> OptimizerState:
        """A value: steps and loads replace it."""
        return self._state

    def check(self, state: OptimizerState) -> None:
        """Raises INCOMPATIBLE_CHECKPOINT unless `load` can take it."""
        check_optimizer_state(state, self.config, self._moment_shapes)

    def load(self, state: OptimizerState | None) -> None:
        """Continues from a checked state; None: from none."""
        self._state = state or OptimizerState(
            family=self.config.family,
            num_steps=0,
            moments={
                moment: {name: np.zeros(shape, np.float32) for name, shape in by_name.items()}
                for moment, by_name in self._moment_shapes.items()
            },
        )

    def step(
        self, tensors: Tensors, gradient: Tensors, params: OptimParams
    ) -> tuple[Tensors, dict[str, float]]:
        """The tensors after one step, float32, and its metrics.

        Raises:
            PostTrainingError: NON_FINITE_LOSS when gradient, weights or moments are not finite; nothing has changed.
        """
        norm = global_norm(gradient.values())
        factor = gradient_factor(norm, params)
        with np.errstate(over="ignore", invalid="ignore"):  # looked at below
            after = {
                name: self._stepped(name, tensor, factor * gradient[name], params)
                for name, tensor in tensors.items()
            }
            weights = {name: new.astype(np.float32) for name, (new, _) in after.items()}
            moments = {
                moment: {name: after[name][1][moment].astype(np.float32) for name in by_name}
                for moment, by_name in self._moment_shapes.items()
            }
        for arrays in (weights, *moments.values()):
            if not all(np.isfinite(array).all() for array in arrays.values()):
                raise overflow(params)
        num_steps = self._state.num_steps + 1
        self._state = OptimizerState(
            family=self.config.family, num_steps=num_steps, moments=moments
        )
        update_norm = global_norm(weights[n].astype(np.float64) - tensors[n] for n in weights)
        return weights, step_metrics(
            params, grad_norm=norm, update_norm=update_norm, num_steps=num_steps
        )

    def _stepped(
        self, name: str, tensor: Array, gradient: Array, params: OptimParams
    ) -> tuple[Array, Tensors]:
        """The tensor and its moments after the step, float64."""
        weights = tensor.astype(np.float64)
        moments = {
            moment: by_name[name].astype(np.float64)
            for moment, by_name in self._state.moments.items()
            if name in by_name
        }
        if isinstance(params, DimuonParams):
            params = as_muon(params)
        if isinstance(params, MuonParams):
            if name in self._matrices:
                before = MuonState(weights=weights, **moments)
                after = muon(before, gradient, params, self.config.muon_scaling)
                return after.weights, {"momentum_buffer": after.momentum_buffer}
            params = params.adam
        return _adam_stepped(
            AdamState(weights=weights, **moments), gradient, self._state.num_steps, params
        )


def _adam_stepped(
    before: AdamState, gradient: Array, num_steps: int, params: AdamParams
) -> tuple[Array, Tensors]:
    after = adamw(before, gradient, num_steps + 1, params)
    return after.weights, {"exp_avg": after.exp_avg, "exp_avg_sq": after.exp_avg_sq}
