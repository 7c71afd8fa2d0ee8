"""torch.optim.AdamW over tensors that lie in one flat buffer, with parameters that change from step to step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from backend.trainer.base import AdamParams
from backend.trainer.flat_layout import FlatLayout
from backend.trainer.flat_moment import FlatMoment


class FlatAdamW:
    """Owns the moments of what it steps; `FlatOptimizer` clips, checks and undoes.

    Args:
        weights: the flat buffer, stepped in place.
        layout: what lies in it.
        names: which of its tensors are stepped; None: all, as one tensor and by one fused kernel.
    """

    def __init__(
        self, weights: Tensor, layout: FlatLayout, names: Collection[str] | None = None
    ) -> None:
        self._layout = layout
        self._names = names
        part = layout if names is None else FlatLayout({n: layout.shapes[n] for n in names})
        exp_avg, exp_avg_sq = FlatMoment.zeros(part, weights), FlatMoment.zeros(part, weights)
        self.moments: Mapping[str, FlatMoment] = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        self._parameters = self._stepped(weights)
        self._optimizer = torch.optim.AdamW(self._parameters, fused=True)
        self._steps = [torch.zeros((), device=weights.device) for _ in self._parameters]
        means = [exp_avg.buffer] if names is None else list(exp_avg.views().values())
        squares = [exp_avg_sq.buffer] if names is None else list(exp_avg_sq.views().values())
        for parameter, step, mean, square in zip(
            self._parameters, self._steps, means, squares, strict=True
        ):
            self._optimizer.state[parameter] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}

    def update(self, gradient: Tensor, params: AdamParams, num_steps: int) -> None:
        """One step after `num_steps` others. The gradient is flat, as the weights are."""
        for step in self._steps:
            step.fill_(num_steps)
        self._optimizer.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        for parameter, part in zip(self._parameters, self._stepped(gradient), strict=True):
            parameter.grad = part
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def _stepped(self, buffer: Tensor) -> Sequence[Tensor]:
        """What is stepped of a buffer of the whole layout."""
        if self._names is None:
            return [buffer.detach()]
        views = self._layout.views(buffer.detach())
        return [views[name] for name in self._names]
