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
from backend.trainer.muon import update_scale
from backend.trainer.norms import largest, sum_of_squares

_ADJUST_LR = {"match_adam": "match_rms_adamw", "original": "original"}
# torch raises where a learning rate, times its factor for a shape or the decay, is no float32, which ends at 3.4e38.
_LARGEST_RATE = 1e30
# A step that leaves weights below it has overflown nowhere.
_SAFE = 1e29


class FlatMuon:
    """Muon for matrices, AdamW for everything else.

    A tensor of three dimensions is a stack of matrices, such as the experts of a mixture: each is made orthogonal by
    itself. torch's Newton-Schulz runs in bfloat16, whose rounding is in every move; momentum is float32. It takes the
    matrices one by one: those of an adapter of rank 16 about 0.4 ms each on a CPU, nine times what AdamW does. As one
    batched product a shape it would be five times faster, and for small matrices not torch's numbers.

    Args:
        weights: the flat buffer, stepped in place.
        layout: what lies in it.
        matrices: which of its tensors Muon steps, one at least, all of two or three dimensions.
    """

    def __init__(
        self,
        weights: Tensor,
        layout: FlatLayout,
        matrices: Collection[str],
        scaling: Literal["match_adam", "original"],
    ) -> None:
        self._weights, self._layout = weights.detach(), layout
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
        self._largest_scale = max(update_scale(tuple(p.shape), scaling) for p in self._parameters)
        self._adam = FlatAdamW(weights, layout, others) if others else None
        of_adam = {} if self._adam is None else self._adam.moments
        self.moments: Mapping[str, FlatMoment] = {"momentum_buffer": momentum, **of_adam}

    def may_overflow(self, gradient: Tensor, params: MuonParams, num_steps: int) -> bool:
        """Whether a step might leave float32's range; most can be seen not to.

        Newton-Schulz gives values below 2, and momentum is a mean of gradients.
        """
        weight = max(1.0, largest(self._weights))
        move = params.learning_rate * (2 * self._largest_scale + params.weight_decay * weight)
        if not weight + move < _SAFE:
            return True
        return self._adam is not None and self._adam.may_overflow(gradient, params.adam, num_steps)

    def update(self, gradient: Tensor, params: MuonParams, num_steps: int) -> float:
        """One step after `num_steps` others; the square of the length of the move.

        The gradient is flat, as the weights are.
        """
        self._optimizer.param_groups[0].update(
            lr=_rate(params),
            momentum=params.momentum,
            ns_steps=params.newton_schulz_steps,
            weight_decay=params.weight_decay,
        )
        before = self._weights.clone()
        # What Newton-Schulz will want: where there is not as much, the step fails before it has changed anything.
        torch.empty(4 * max(p.numel() for p in self._parameters), device=before.device)
        gradients = self._matrices(self._layout.views(gradient))
        for parameter, part in zip(self._parameters, gradients, strict=True):
            parameter.grad = part
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        if self._adam is not None:
            self._adam.update(gradient, params.adam, num_steps)
        return sum_of_squares(before.sub_(self._weights))

    def _matrices(self, views: Mapping[str, Tensor]) -> Iterator[Tensor]:
        for name in self._names:
            yield from views[name].unbind() if views[name].ndim == 3 else (views[name],)


def _rate(params: MuonParams) -> float:
    """Beyond all reason it is infinite, so that the step is not finite and undone."""
    highest = params.learning_rate * max(1.0, params.weight_decay)
    return params.learning_rate if highest < _LARGEST_RATE else math.inf
