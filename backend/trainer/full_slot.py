"""One session's own copy of the whole model in memory: weights, gradients and moments, each one flat buffer.

It takes 16 bytes a parameter with AdamW: 4 for the weights, 4 for the window's gradient, 8 for the moments. The first
pass of a window adds straight to the window's gradient, which counts only once the pass has succeeded; a second one
has a buffer of its own, 4 bytes more until the optimiser steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from backend.trainer.base import (
    ADAMW,
    FullWeights,
    OptimizerConfig,
    OptimizerState,
    OptimParams,
    Weights,
)
from backend.trainer.base_model import BaseModel
from backend.trainer.checks import check_full_weights
from backend.trainer.dropout import SampleRows
from backend.trainer.flat_optimizer import FlatOptimizer
from backend.trainer.free_memory import available_bytes, gib
from backend.trainer.full_model import FullModel
from backend.trainer.lora import Segment
from backend.trainer.model_layout import ModelLayout
from backend.trainer.packed_model import Forward, PackedRow
from backend.trainer.row_cost import Cost
from together_post_training.errors import Reason, fail

# With AdamW, before a window's second pass.
BYTES_PER_PARAMETER = 16


class FullSlot:
    """See `backend.trainer.slot.Slot`. Owned by the trainer's thread."""

    def __init__(
        self,
        base: BaseModel,
        optimizer: OptimizerConfig = ADAMW,
        available: Callable[[torch.device], int] = available_bytes,
    ) -> None:
        """Raises OUT_OF_MEMORY where `available` memory of the base's device, in bytes, is too little."""
        _check_room(base, available(base.device))
        layout = ModelLayout(base.module)
        self._layout = layout.tensors
        self._model = FullModel(base, layout)
        self._optimizer = FlatOptimizer(
            optimizer, self._model.weights, layout.tensors, layout.matrices
        )
        self._window_gradient: Tensor | None = None
        self._second_gradient: Tensor | None = None
        self._pass_gradient: Tensor | None = None
        self._has_gradients = False

    @property
    def optimizer_config(self) -> OptimizerConfig:
        return self._optimizer.config

    @property
    def has_gradients(self) -> bool:
        return self._has_gradients

    @property
    def own_model(self) -> FullSlot:
        return self

    @property
    def cost(self) -> Cost:
        return self._model.cost

    def segment(self, start: int, samples: Sequence[SampleRows], *, for_backward: bool) -> Segment:
        stop = start + sum(sample.num_tokens for sample in samples)
        return Segment(start=start, stop=stop, weights={})

    def forward(
        self,
        row: PackedRow,
        segments: Sequence[Segment],
        *,
        for_backward: bool = False,
        recompute: bool = False,
    ) -> Forward:
        """See `backend.trainer.slot.RowModel`."""
        if for_backward and self._pass_gradient is None:
            self._pass_gradient = self._new_gradient()
            self._model.accumulate_into(self._pass_gradient)
        return self._model.forward(row, segments, for_backward=for_backward, recompute=recompute)

    def begin_pass(self) -> None:
        """A pass without backward needs no buffer, so none is made before one asks."""
        self._pass_gradient = None

    def commit_pass(self, num_samples: int) -> None:
        """See `backend.trainer.slot.Slot.commit_pass`."""
        gradient = self._pass_gradient
        assert gradient is not None, "a pass has samples"
        if not math.isfinite(gradient.sum()):
            # A sum of finite numbers may overflow: only then is each looked at.
            self._layout.require_finite(gradient)
        if gradient is not self._window_gradient:
            assert self._window_gradient is not None
            self._window_gradient.add_(gradient)
        self._has_gradients = True

    def clear_gradients(self) -> None:
        self._has_gradients = False
        self._second_gradient = self._pass_gradient = None
        self._model.accumulate_into(None)

    def optim_step(self, params: OptimParams) -> dict[str, float]:
        """See `backend.trainer.base.Trainer.optim_step`."""
        gradient = self._window_gradient
        assert gradient is not None, "optim_step is called only with gradients"
        self.clear_gradients()
        return self._optimizer.step(gradient, params)

    def copy_weights(self) -> FullWeights:
        return FullWeights(tensors=self._layout.copies(self._model.weights))

    def optimizer_state(self) -> OptimizerState:
        return self._optimizer.state()

    def load(self, weights: Weights, optimizer: OptimizerState | None) -> None:
        """See `backend.trainer.base.Trainer.load`."""
        whole = check_full_weights(weights, self._layout.shapes)
        if optimizer is not None:
            self._optimizer.check(optimizer)
        self._layout.fill(self._model.weights, whole.tensors)
        self._optimizer.load(optimizer)
        self.clear_gradients()

    def _new_gradient(self) -> Tensor:
        if not self._has_gradients:
            self._window_gradient = _zeros(self._window_gradient, self._model.weights)
            return self._window_gradient
        self._second_gradient = _zeros(self._second_gradient, self._model.weights)
        return self._second_gradient


def _check_room(base: BaseModel, free: int) -> None:
    """Systems promise more memory than there is, and end the process that takes it at its word."""
    num_parameters = base.module.num_parameters()
    needed = BYTES_PER_PARAMETER * num_parameters
    if needed > free:
        raise fail(
            Reason.OUT_OF_MEMORY,
            f"Training the full weights of {base.info.name!r} takes {gib(needed)} beside the model "
            f"({BYTES_PER_PARAMETER} bytes for each of {num_parameters} parameters), and {gib(free)} are free on "
            f"{base.device}. Train with LoRA, or stop other sessions or programs.",
            needed_bytes=needed,
            available_bytes=free,
        )


def _zeros(buffer: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if buffer is None else buffer.zero_()
