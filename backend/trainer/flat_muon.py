"""torch.optim.Muon over tensors that lie in one flat buffer, with parameters that change from step to step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from backend.trainer.base import MuonParams
from backend.trainer.flat_adamw import FlatAdamW
from backend.trainer.flat_layout import FlatLayout
from backend.trainer.flat_moment import FlatMoment

_ADJUST_LR = {"match_adam": "match_rms_adamw", "original": "original"}
# torch raises where a learning rate, times its factor for a shape or the decay, is no float32.
_LARGEST_RATE = 1e30


class FlatMuon:
    """Muon for matrices, AdamW for everything else.

    A tensor of three dimensions is a stack of matrices, such as the experts of a mixture: each is made orthogonal by
    itself. torch's Newton-Schulz runs in bfloat16, whose rounding is in the weights' last moves; momentum is float32.

    Args:
        weights: the flat buffer, stepped in place.
        layout: what lies in it.
        matrices: which of its tensors Muon steps, all of two or three dimensions.
    """

    def __init__(
        self,
        weights: Tensor,
        layout: FlatLayout,
        matrices: Collection[str],
        scaling: Literal["match_adam", "original"],
    ) -> None:
        self._layout = layout
        self._names = [name for name in layout.shapes if name in matrices]
        others = [name for name in layout.shapes if name not in matrices]
        momentum = FlatMoment.zeros(
            FlatLayout({name: layout.shapes[name] for name in self._names}), weights
        )
        self._parameters = list(self._matrices(layout.views(weights.detach())))
        # The learning rate is set at each step; 0 here, because torch wants one.
        self._optimizer = torch.optim.Muon(
            self._parameters, lr=0.0, weight_decay=0.0, adjust_lr_fn=_ADJUST_LR[scaling]
        )
        for parameter, buffer in zip(
            self._parameters, self._matrices(momentum.views()), strict=True
        ):
            self._optimizer.state[parameter]["momentum_buffer"] = buffer
        self._adam = FlatAdamW(weights, layout, others) if others else None
        of_adam = {} if self._adam is None else self._adam.moments
        self.moments: Mapping[str, FlatMoment] = {"momentum_buffer": momentum, **of_adam}

    def update(self, gradient: Tensor, params: MuonParams, num_steps: int) -> None:
        """One step after `num_steps` others. The gradient is flat, as the weights are."""
        self._optimizer.param_groups[0].update(
            lr=_rate(params),
            momentum=params.momentum,
            ns_steps=params.newton_schulz_steps,
            weight_decay=params.weight_decay,
        )
        gradients = self._matrices(self._layout.views(gradient))
        for parameter, part in zip(self._parameters, gradients, strict=True):
            parameter.grad = part
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        if self._adam is not None:
            self._adam.update(gradient, params.adam, num_steps)

    def _matrices(self, views: Mapping[str, Tensor]) -> Iterator[Tensor]:
        for name in self._names:
            yield from views[name].unbind() if views[name].ndim == 3 else (views[name],)


def _rate(params: MuonParams) -> float:
    """Beyond all reason it is infinite, so that the step is not finite and undone."""
    largest = params.learning_rate * max(1.0, params.weight_decay)
    return params.learning_rate if largest < _LARGEST_RATE else math.inf
