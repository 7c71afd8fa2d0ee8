"""Linear layers with many adapters: each range of tokens through the adapter of its own session.

    y = x W^T + b + scale * (x A^T) B^T        W frozen, A (R, in), B (out, R)

Source: Hu et al. 2021, "LoRA", arXiv:2106.09685, equation 3.

Backward adds the adapter's gradients straight into buffers that its owner provides. With G = dL/dy:

    dx = G W + scale * (G B) A      dA = scale * (G B)^T x      dB = scale * G^T (x A^T)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraWeights:
    """One adapter's part in one layer, and where its gradients are summed: a and grad_a (R, in), b and grad_b
    (out, R)."""

    a: Tensor
    b: Tensor
    grad_a: Tensor
    grad_b: Tensor
    scale: float

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """Adds the adapter's output to y in place and returns x A^T, which `add_gradients` wants back."""
        down_TR = x_TI @ self.a.T
        y_TO.addmm_(down_TR, self.b.T, alpha=self.scale)
        return down_TR

    def add_gradients(
        self, grad_y_TO: Tensor, x_TI: Tensor, down_TR: Tensor, grad_x_TI: Tensor | None
    ) -> None:
        """Adds to grad_a and grad_b and, unless it is None, to grad_x."""
        self.grad_b.addmm_(grad_y_TO.T, down_TR, alpha=self.scale)
        grad_down_TR = grad_y_TO @ self.b
        self.grad_a.addmm_(grad_down_TR.T, x_TI, alpha=self.scale)
        if grad_x_TI is not None:
            grad_x_TI.addmm_(grad_down_TR, self.a, alpha=self.scale)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """The tokens start..stop of a packed row belong to one session.

    weights: its adapter, by module path; a layer that is not in it is the base's own.
    anchor: any tensor that requires a gradient; None where the adapter is not trained. It never gets a gradient: it
        tells autograd that the layer's output depends on something trainable.
    """

    start: int
    stop: int
    weights: Mapping[str, LoraWeights]
    anchor: Tensor | None = None


class Routing:
    """Which segments the forward in progress has. One for all layers of a model."""

    def __init__(self) -> None:
        self.segments: tuple[Segment, ...] = ()

    @contextmanager
    def over(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Names them for one forward, and holds on to nobody's weights after it."""
        self.segments = tuple(segments)
        try:
            yield
        finally:
            self.segments = ()


class LoraLinear(nn.Module):
    """A frozen linear layer, shared, under whatever adapters the routing names."""

    def __init__(self, linear: nn.Linear, path: str, routing: Routing) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self._path = path
        self._routing = routing

    def forward(self, x: Tensor) -> Tensor:
        """x: (1, T, in), gives (1, T, out)."""
        here = [s for s in self._routing.segments if self._path in s.weights]
        if not here:
            return F.linear(x, self.weight, self.bias)
        pieces = [(s.start, s.stop, s.weights[self._path]) for s in here]
        return _Lora.apply(x, self.weight, self.bias, pieces, *(s.anchor for s in here))


class _Lora(torch.autograd.Function):
    """One node for the layer and all its adapters: no sum of their gradients by x is ever made apart, and rows are
    written in place, which autograd's own bookkeeping of slices makes slow."""

    @staticmethod
    def forward(ctx, x, weight, bias, pieces, *anchors):
        y = F.linear(x, weight, bias)
        x_TI, y_TO = x.flatten(0, -2), y.flatten(0, -2)
        downs = [w.add_to(y_TO[start:stop], x_TI[start:stop]) for start, stop, w in pieces]
        ctx.save_for_backward(x, weight, *downs)
        ctx.pieces = pieces
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        x, weight, *downs = ctx.saved_tensors
        grad_x = grad_y @ weight if ctx.needs_input_grad[0] else None
        x_TI, grad_y_TO = x.flatten(0, -2), grad_y.flatten(0, -2)
        grad_x_TI = None if grad_x is None else grad_x.flatten(0, -2)
        for (start, stop, w), down_TR in zip(ctx.pieces, downs, strict=True):
            rows = slice(start, stop)
            w.add_gradients(
                grad_y_TO[rows], x_TI[rows], down_TR, None if grad_x_TI is None else grad_x_TI[rows]
            )
        return grad_x, None, None, None, *(None for _ in ctx.pieces)
