"""Named tensors as views into one flat buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from together_post_training.errors import Reason, fail

Shape = tuple[int, ...]


class FlatLayout:
    """Where each tensor lies in a float32 buffer of `size` values."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes = dict(shapes)
        self.size = sum(math.prod(shape) for shape in self.shapes.values())

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors, sharing the buffer's memory."""
        return {
            name: buffer[start:stop].view(self.shapes[name]) for name, start, stop in self.spans()
        }

    def copies(self, buffer: Tensor) -> dict[str, np.ndarray]:
        """The tensors as numpy views of one copy of the buffer."""
        copy = buffer.detach().to("cpu", copy=True).numpy()
        return {
            name: copy[start:stop].reshape(self.shapes[name]) for name, start, stop in self.spans()
        }

    def fill(self, buffer: Tensor, tensors: Mapping[str, np.ndarray]) -> None:
        """Overwrites the buffer; `tensors` are of the layout's names and shapes."""
        with torch.no_grad():
            for name, view in self.views(buffer).items():
                view.copy_(torch.from_numpy(np.ascontiguousarray(tensors[name], dtype=np.float32)))

    def require_finite(self, gradient: Tensor) -> None:
        """Raises NON_FINITE_LOSS, naming the first tensor whose part is not finite."""
        for name, part in self.views(gradient).items():
            if not part.isfinite().all():
                raise fail(
                    Reason.NON_FINITE_LOSS,
                    f"The gradient of {name} is not finite; weights, moments and earlier gradients are unchanged.",
                    tensor=name,
                )

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """(name, start, stop) in the buffer, one after the other."""
        start = 0
        for name, shape in self.shapes.items():
            stop = start + math.prod(shape)
            yield name, start, stop
            start = stop
