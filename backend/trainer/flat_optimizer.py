"""A session's optimiser over one flat buffer of weights, whatever its family.

What families share is here: the gradient is clipped by its norm over all tensors together, a step that would leave
anything but finite numbers is undone, and the state is handed out and taken back whole.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from torch import Tensor

from backend.trainer.base import (
    AdamParams,
    DimuonParams,
    MuonParams,
    OptimizerConfig,
    OptimizerState,
    OptimParams,
)
from backend.trainer.checks import check_optimizer_state
from backend.trainer.dimuon import as_muon
from backend.trainer.flat_adamw import FlatAdamW
from backend.trainer.flat_layout import FlatLayout
from backend.trainer.flat_muon import FlatMuon
from backend.trainer.moments import moment_shapes
from backend.trainer.norms import sum_of_squares
from backend.trainer.stepping import gradient_factor, overflow, step_metrics


class FlatOptimizer:
    """Steps `weights` in place and owns their moments.

    Args:
        weights: the flat float32 buffer.
        layout: what lies in it.
        matrices: the tensors that Muon steps, of two dimensions, or three for a stack of matrices; AdamW steps the
            others. None: all. Says nothing where the family is AdamW.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        weights: Tensor,
        layout: FlatLayout,
        matrices: Collection[str] | None = None,
    ) -> None:
        self._config = config
        self._weights = weights.detach()
        of_muon = layout.shapes.keys() if matrices is None else matrices
        self._moment_shapes = moment_shapes(config, layout.shapes, of_muon)
        self._rule = _rule(config, self._weights, layout, of_muon)
        self._num_steps = 0

    @property
    def config(self) -> OptimizerConfig:
        return self._config

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def step(self, gradient: Tensor, params: OptimParams) -> dict[str, float]:
        """One step, after clipping the gradient, in place, to its largest global norm. Metrics: "name:reduction".

        `params` are of this optimiser's family (`param_checks.check_optim`).

        Raises:
            PostTrainingError: NON_FINITE_LOSS; weights, moments and number of steps are what they were.
        """
        norm = math.sqrt(sum_of_squares(gradient))
        factor = gradient_factor(norm, params)
        if factor != 1.0:
            gradient.mul_(factor)
        before = self._copy() if self._may_overflow(gradient, params) else None
        update_norm = math.sqrt(self._update(gradient, params))
        if not math.isfinite(update_norm):
            assert before is not None, "a step that may overflow is told from others"
            self._restore(before)
            raise overflow(params)
        self._num_steps += 1
        return step_metrics(
            params, grad_norm=norm, update_norm=update_norm, num_steps=self._num_steps
        )

    def state(self) -> OptimizerState:
        """A copy."""
        return OptimizerState(
            family=self._config.family,
            num_steps=self._num_steps,
            moments={
                name: moment.layout.copies(moment.buffer)
                for name, moment in self._rule.moments.items()
            },
        )

    def check(self, state: OptimizerState) -> None:
        """Raises INCOMPATIBLE_CHECKPOINT unless `load` can take it."""
        check_optimizer_state(state, self._config, self._moment_shapes)

    def load(self, state: OptimizerState | None) -> None:
        """Continues from a checked state; None: from none."""
        self._num_steps = 0 if state is None else state.num_steps
        for name, moment in self._rule.moments.items():
            if state is None:
                moment.buffer.zero_()
            else:
                moment.layout.fill(moment.buffer, state.moments[name])

    def _may_overflow(self, gradient: Tensor, params: OptimParams) -> bool:
        """Hardly ever: so hardly a step needs a copy of what was before it."""
        match self._rule, params:
            case FlatAdamW() as rule, AdamParams():
                return rule.may_overflow(gradient, params, self._num_steps)
            case FlatMuon() as rule, MuonParams() | DimuonParams():
                return rule.may_overflow(gradient, _muon_params(params), self._num_steps)
        raise AssertionError(f"{params} for {self._config}")

    def _update(self, gradient: Tensor, params: OptimParams) -> float:
        """The square of the length of the move."""
        match self._rule, params:
            case FlatAdamW() as rule, AdamParams():
                return rule.update(gradient, params, self._num_steps)
            case FlatMuon() as rule, MuonParams() | DimuonParams():
                return rule.update(gradient, _muon_params(params), self._num_steps)
        raise AssertionError(f"{params} for {self._config}")

    def _copy(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self._buffers()]

    def _restore(self, before: list[Tensor]) -> None:
        for tensor, old in zip(self._buffers(), before, strict=True):
            tensor.copy_(old)

    def _buffers(self) -> list[Tensor]:
        return [self._weights, *(moment.buffer for moment in self._rule.moments.values())]


def _muon_params(params: MuonParams | DimuonParams) -> MuonParams:
    return as_muon(params) if isinstance(params, DimuonParams) else params


def _rule(
    config: OptimizerConfig, weights: Tensor, layout: FlatLayout, matrices: Collection[str]
) -> FlatAdamW | FlatMuon:
    if config.family == "adamw":
        return FlatAdamW(weights, layout)
    # `OptimizerConfig.muon_scaling` is match_adam unless a Muon session chose another.
    return FlatMuon(weights, layout, matrices, config.muon_scaling)
