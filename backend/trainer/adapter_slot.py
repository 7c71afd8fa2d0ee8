"""One session's adapter in memory: weights, gradients and moments, each one flat buffer.

A snapshot is then one copy, an optimiser step one kernel, and what a pass adds one sum. The gradient of a pass is
kept apart from the window's until the whole pass has succeeded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from backend.trainer import targets
from backend.trainer.base import (
    ADAMW,
    Adapter,
    LoraConfig,
    OptimizerConfig,
    OptimizerState,
    OptimParams,
    Weights,
)
from backend.trainer.checks import check_adapter, require_adapter
from backend.trainer.dropout import Dropout, SampleRows
from backend.trainer.flat_layout import FlatLayout
from backend.trainer.flat_optimizer import FlatOptimizer
from backend.trainer.lora import LoraWeights, Segment
from backend.trainer.targets import Layer


@dataclass(frozen=True, slots=True, eq=False)
class _Gradient:
    """A flat buffer, and the weights of every layer with its part of the buffer."""

    buffer: Tensor
    by_path: Mapping[str, LoraWeights]


class AdapterSlot:
    """See `backend.trainer.slot.Slot`. Owned by the trainer's thread."""

    own_model = None

    def __init__(
        self,
        lora: LoraConfig,
        layers: Sequence[Layer],
        optimizer: OptimizerConfig = ADAMW,
        *,
        device: torch.device | None = None,
    ) -> None:
        self.lora = lora
        self._targets = targets.peft_targets(layers)
        self._layout = FlatLayout(targets.tensor_shapes(layers, lora.rank))
        self.weights = nn.Parameter(torch.zeros(self._layout.size, device=device))
        # Every tensor of an adapter is a matrix.
        self._optimizer = FlatOptimizer(optimizer, self.weights, self._layout)
        self._of_pass, self._of_window = self._gradient(layers), self._gradient(layers)
        self._has_gradients = False
        # Of the window's passes so far.
        self._num_samples = 0
        _draw(self.by_path, lora.seed)

    @property
    def by_path(self) -> Mapping[str, LoraWeights]:
        """Its part in each layer, with where a pass that runs now adds its gradient."""
        return self._of_pass.by_path

    @property
    def optimizer_config(self) -> OptimizerConfig:
        return self._optimizer.config

    @property
    def has_gradients(self) -> bool:
        return self._has_gradients

    def segment(self, start: int, samples: Sequence[SampleRows], *, for_backward: bool) -> Segment:
        """See `backend.trainer.slot.Slot.segment`."""
        return Segment(
            start=start,
            stop=start + sum(sample.num_tokens for sample in samples),
            weights=self.by_path,
            dropout=self._dropout(samples) if for_backward and self.lora.dropout else None,
            anchor=self.weights,
        )

    def begin_pass(self) -> None:
        """What layers add from here on is this pass's gradient."""
        self._of_pass.buffer.zero_()

    def commit_pass(self, num_samples: int) -> None:
        """See `backend.trainer.slot.Slot.commit_pass`."""
        # A sum of finite numbers may overflow: only then is each looked at.
        if not math.isfinite(self._of_pass.buffer.sum()):
            self._layout.require_finite(self._of_pass.buffer)
        if self._has_gradients:
            self._of_window.buffer.add_(self._of_pass.buffer)
        else:
            self._of_window, self._of_pass = self._of_pass, self._of_window
        self._has_gradients = True
        self._num_samples += num_samples

    def clear_gradients(self) -> None:
        self._has_gradients = False
        self._num_samples = 0

    def optim_step(self, params: OptimParams) -> dict[str, float]:
        """See `backend.trainer.base.Trainer.optim_step`."""
        assert self._has_gradients, "optim_step is called only with gradients"
        self.clear_gradients()
        return self._optimizer.step(self._of_window.buffer, params)

    def copy_weights(self) -> Adapter:
        return Adapter(
            lora=self.lora, tensors=self._layout.copies(self.weights), targets=self._targets
        )

    def optimizer_state(self) -> OptimizerState:
        return self._optimizer.state()

    def load(self, weights: Weights, optimizer: OptimizerState | None) -> None:
        """See `backend.trainer.base.Trainer.load`."""
        adapter = require_adapter(weights)
        check_adapter(adapter, self.lora, self._layout.shapes)
        if optimizer is not None:
            self._optimizer.check(optimizer)
        self._layout.fill(self.weights, adapter.tensors)
        self._optimizer.load(optimizer)
        self.clear_gradients()

    def _dropout(self, samples: Sequence[SampleRows]) -> Dropout:
        """Numbered within the window, so that a batch draws the same whole or in halves."""
        return Dropout(
            seed=self.lora.seed,
            step=self._optimizer.num_steps,
            probability=self.lora.dropout,
            samples=[replace(s, number=self._num_samples + s.number) for s in samples],
        )

    def _gradient(self, layers: Sequence[Layer]) -> _Gradient:
        buffer = torch.zeros_like(self.weights, requires_grad=False)
        weights = self._layout.views(self.weights.detach())
        gradients = self._layout.views(buffer)
        by_path = {}
        for layer in layers:
            a, b = layer.tensors
            by_path[layer.path] = LoraWeights(
                a=weights[a],
                b=weights[b],
                grad_a=gradients[a],
                grad_b=gradients[b],
                scale=self.lora.scale,
            )
        return _Gradient(buffer, by_path)


def _draw(by_path: Mapping[str, LoraWeights], seed: int) -> None:
    """A uniform in +-1/sqrt(in), which is PEFT's kaiming_uniform(a=sqrt(5)); B stays 0.

    Each layer has a stream of its own, so that what it gets depends on the seed and its path alone.
    """
    for path, weights in by_path.items():
        digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
        stream = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        bound = weights.a.shape[1] ** -0.5
        # On the CPU, whose random numbers are the same everywhere.
        drawn = torch.empty(weights.a.shape, device="cpu").uniform_(-bound, bound, generator=stream)
        weights.a.copy_(drawn)
