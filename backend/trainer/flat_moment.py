"""One moment of an optimiser, as one flat buffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.trainer.flat_layout import FlatLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatMoment:
    """buffer: float32, of the tensors that `layout` names, whatever the model's dtype."""

    layout: FlatLayout
    buffer: Tensor

    @staticmethod
    def zeros(layout: FlatLayout, weights: Tensor) -> FlatMoment:
        """On the device of `weights`."""
        buffer = torch.zeros(layout.size, dtype=torch.float32, device=weights.device)
        return FlatMoment(layout=layout, buffer=buffer)

    def views(self) -> Mapping[str, Tensor]:
        return self.layout.views(self.buffer)
