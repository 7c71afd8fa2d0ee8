"""torch.optim.AdamW over tensors that lie in one flat buffer, with parameters that change from step to step."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from backend.trainer.base import AdamParams
from backend.trainer.flat_layout import FlatLayout
from backend.trainer.flat_moment import FlatMoment
from backend.trainer.norms import largest, sum_of_squares

# Values that are stepped at a time. What they were is kept meanwhile, to tell how far they moved.
_BLOCK_VALUES = 2**20
# Below it nothing overflows; float32 ends at 3.4e38.
_SAFE = 1e38


class FlatAdamW:
    """Owns the moments of what it steps; `FlatOptimizer` clips, checks and undoes.

    Args:
        weights: the flat buffer, stepped in place.
        layout: what lies in it.
        names: which of its tensors are stepped; None: all.
    """

    def __init__(
        self, weights: Tensor, layout: FlatLayout, names: Collection[str] | None = None
    ) -> None:
        self._layout = layout
        self._names = names
        part = layout if names is None else FlatLayout({n: layout.shapes[n] for n in names})
        exp_avg, exp_avg_sq = FlatMoment.zeros(part, weights), FlatMoment.zeros(part, weights)
        self.moments: Mapping[str, FlatMoment] = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        self._blocks = self._cut(weights)
        # The kernel looks at single values, so a block may be a part of a tensor, or of several.
        self._optimizer = torch.optim.AdamW(self._blocks, fused=True)
        self._steps = [torch.zeros((), device=weights.device) for _ in self._blocks]
        sizes = [len(block) for block in self._blocks]
        for block, step, mean, square in zip(
            self._blocks,
            self._steps,
            exp_avg.buffer.split(sizes),
            exp_avg_sq.buffer.split(sizes),
            strict=True,
        ):
            self._optimizer.state[block] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}

    def may_overflow(self, gradient: Tensor, params: AdamParams, num_steps: int) -> bool:
        """Whether a step might leave float32's range; most can be seen not to.

        A mean is at most the largest of what it is of, and the root that it is divided by not below 0.
        """
        weight = max(map(largest, self._blocks))
        parts = (self.moments["exp_avg"].buffer, *self._cut(gradient))
        mean = max(map(largest, parts)) / (1 - params.beta1 ** (num_steps + 1))
        move = params.learning_rate * (params.weight_decay * weight + mean / params.eps)
        return not weight + move < _SAFE

    def update(self, gradient: Tensor, params: AdamParams, num_steps: int) -> float:
        """One step after `num_steps` others; the square of the length of the move.

        The gradient is flat, as the weights are.
        """
        self._optimizer.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        moved = 0.0
        before = torch.empty_like(max(self._blocks, key=len))
        for block, step, part in zip(self._blocks, self._steps, self._cut(gradient), strict=True):
            old = before[: len(block)].copy_(block)
            step.fill_(num_steps)
            # Those without a gradient are left alone.
            block.grad = part
            self._optimizer.step()
            block.grad = None
            moved += sum_of_squares(old.sub_(block))
        return moved

    def _cut(self, buffer: Tensor) -> list[Tensor]:
        """What is stepped of a buffer of the whole layout, in blocks."""
        flat = buffer.detach()
        if self._names is None:
            return list(flat.split(_BLOCK_VALUES))
        views = self._layout.views(flat)
        return [b for name in self._names for b in views[name].view(-1).split(_BLOCK_VALUES)]
