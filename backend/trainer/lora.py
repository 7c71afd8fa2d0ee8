"""Linear layers with many adapters: each range of tokens through the adapter of its own session.

    y = x W^T + b + scale * (x A^T) B^T        W frozen, A (R, in), B (out, R)

Source: Hu et al. 2021, "LoRA", arXiv:2106.09685, equation 3.

Backward adds the adapter's gradients straight into buffers that its owner provides. With G = dL/dy:

    dx = G W + scale * (G B) A      dA = scale * (G B)^T x      dB = scale * G^T (x A^T)

Adapters are computed in their own dtype (float32), whatever x and W are kept in. See `dropout` for what is left out
of x in front of A while training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from backend.trainer import storage
from backend.trainer.dropout import Dropout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dropped:
    """Inputs of A that are left out.

    kept: uint8 (T, in), 1 or 0: torch multiplies by it three times as fast as by bool.
    factor: what an input that is kept counts.
    """

    kept: Tensor
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraWeights:
    """One adapter's part in one layer, and where its gradients are summed: a and grad_a (R, in), b and grad_b
    (out, R)."""

    a: Tensor
    b: Tensor
    grad_a: Tensor
    grad_b: Tensor
    scale: float

    def add_to(self, y_TO: Tensor, x_TI: Tensor, dropped: Dropped | None = None) -> Tensor:
        """Adds the adapter's output to y in place and returns x A^T, which `add_gradients` wants back."""
        down_TR = self._kept(x_TI, dropped) @ self.a.T
        _add_product(y_TO, down_TR, self.b.T, self._scale(dropped))
        return down_TR

    def add_gradients(
        self,
        grad_y_TO: Tensor,
        x_TI: Tensor,
        down_TR: Tensor,
        grad_x_TI: Tensor | None,
        dropped: Dropped | None = None,
    ) -> None:
        """Adds to grad_a and grad_b and, unless it is None, to grad_x."""
        scale, grad_y_TO = self._scale(dropped), grad_y_TO.to(self.b.dtype)
        self.grad_b.addmm_(grad_y_TO.T, down_TR, alpha=scale)
        grad_down_TR = grad_y_TO @ self.b
        self.grad_a.addmm_(grad_down_TR.T, self._kept(x_TI, dropped), alpha=scale)
        if grad_x_TI is None:
            return
        if dropped is None:
            _add_product(grad_x_TI, grad_down_TR, self.a, scale)
        else:
            grad_x_TI.add_((grad_down_TR @ self.a).mul_(dropped.kept), alpha=scale)

    def _kept(self, x_TI: Tensor, dropped: Dropped | None) -> Tensor:
        """What A reads; the factor of dropout is part of the scale."""
        x_TI = x_TI.to(self.a.dtype)
        return x_TI if dropped is None else x_TI * dropped.kept

    def _scale(self, dropped: Dropped | None) -> float:
        return self.scale if dropped is None else self.scale * dropped.factor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdaptedRows:
    """Rows start..stop of a layer's input go through this adapter. anchor: see Segment."""

    start: int
    stop: int
    weights: LoraWeights
    dropped: Dropped | None = None
    anchor: Tensor | None = None

    def of(self, matrix: Tensor) -> Tensor:
        return matrix[self.start : self.stop]

    def picked(self, rows: slice | Tensor, start: int) -> AdaptedRows:
        """Some of these rows, counted from `start` on."""
        dropped, num_rows = (
            self.dropped,
            rows.stop - rows.start if isinstance(rows, slice) else len(rows),
        )
        if dropped is not None:
            dropped = Dropped(kept=dropped.kept[rows], factor=dropped.factor)
        return replace(self, start=start, stop=start + num_rows, dropped=dropped)

    def masked(self, mask: Tensor | None) -> AdaptedRows:
        if self.dropped is None or mask is None:
            return self
        return replace(self, dropped=replace(self.dropped, kept=mask))


@dataclass(frozen=True, slots=True, eq=False)
class Adapters:
    """Which rows of one layer's input go through which adapters, in ascending order; the others through none.

    They are computed one by one: products of many adapters' matrices side by side, or stacked to a batch, took as long
    or longer on a CPU (8 adapters of rank 16, 16 or 64 rows each, layers 256 to 2048 wide).
    """

    pieces: tuple[AdaptedRows, ...] = ()

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> list[Tensor]:
        """Adds their outputs to y in place; returns what `add_gradients` wants back."""
        return [p.weights.add_to(p.of(y_TO), p.of(x_TI), p.dropped) for p in self.pieces]

    def add_gradients(
        self, grad_y_TO: Tensor, x_TI: Tensor, downs: Sequence[Tensor], grad_x_TI: Tensor | None
    ) -> None:
        """Adds to every adapter's gradients and, unless it is None, to grad_x."""
        for p, down_TR in zip(self.pieces, downs, strict=True):
            grad_x = None if grad_x_TI is None else p.of(grad_x_TI)
            p.weights.add_gradients(p.of(grad_y_TO), p.of(x_TI), down_TR, grad_x, p.dropped)

    def masks(self) -> list[Tensor | None]:
        """What each keeps of its input; None where nothing is dropped."""
        return [None if p.dropped is None else p.dropped.kept for p in self.pieces]

    def with_masks(self, masks: Sequence[Tensor | None]) -> Adapters:
        """The same with these in place of their own; None where nothing is dropped."""
        return Adapters(tuple(p.masked(m) for p, m in zip(self.pieces, masks, strict=True)))

    def between(self, start: int, stop: int) -> Adapters:
        """Of rows start..stop alone, counted from `start`."""
        cut = ((p, max(start, p.start), min(stop, p.stop)) for p in self.pieces)
        return Adapters(
            tuple(
                p.picked(slice(first - p.start, last - p.start), first - start)
                for p, first, last in cut
                if first < last
            )
        )

    def select(self, rows: Tensor) -> Adapters:
        """Of these rows alone, int64, ascending."""
        if not self.pieces:
            return self
        bounds = torch.tensor([(p.start, p.stop) for p in self.pieces], device=rows.device)
        spans = torch.searchsorted(rows, bounds.reshape(-1)).reshape(-1, 2).tolist()
        return Adapters(
            tuple(
                p.picked(rows[first:last] - p.start, first)
                for p, (first, last) in zip(self.pieces, spans, strict=True)
                if first < last
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """The tokens start..stop of a packed row belong to one session.

    weights: its adapter, by module path; a layer that is not in it is the base's own.
    dropout: what is dropped from the inputs of each layer's A, if anything.
    anchor: any tensor that requires a gradient; None where the adapter is not trained. It never gets a gradient: it
        tells autograd that the layer's output depends on something trainable.
    """

    start: int
    stop: int
    weights: Mapping[str, LoraWeights]
    dropout: Dropout | None = None
    anchor: Tensor | None = None


def adapters_at(path: str, segments: Sequence[Segment]) -> Adapters:
    """The part of the segments' adapters in one layer; each call draws dropout's masks anew, and the same."""
    return Adapters(tuple(_rows(path, s) for s in segments if path in s.weights))


def _rows(path: str, segment: Segment) -> AdaptedRows:
    weights, dropped = segment.weights[path], None
    if segment.dropout is not None:
        kept = segment.dropout.kept(path, weights.a.shape[1])
        on_device = torch.from_numpy(kept.view(np.uint8)).to(weights.a.device)
        dropped = Dropped(kept=on_device, factor=segment.dropout.factor)
    return AdaptedRows(
        start=segment.start,
        stop=segment.stop,
        weights=weights,
        dropped=dropped,
        anchor=segment.anchor,
    )


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
        adapters = adapters_at(self._path, self._routing.segments)
        return adapted_linear(x, self.weight, self.bias, adapters)


def adapted_linear(x: Tensor, weight: Tensor, bias: Tensor | None, adapters: Adapters) -> Tensor:
    """x: (..., T, in) with T rows in all, which `adapters` count; gives (..., T, out)."""
    if not adapters.pieces:
        return storage.linear(x, weight, bias)
    return _Lora.apply(x, weight, bias, adapters, *(piece.anchor for piece in adapters.pieces))


class _Lora(torch.autograd.Function):
    """One node for the layer and all its adapters: no sum of their gradients by x is ever made apart, and rows are
    written in place, which autograd's own bookkeeping of slices makes slow."""

    @staticmethod
    def forward(ctx, x, weight, bias, adapters, *anchors):
        y = storage.linear(x, weight, bias)
        downs = adapters.add_to(y.flatten(0, -2), x.flatten(0, -2))
        masks = adapters.masks()
        # Masks are saved as other tensors are, so that layers that are computed again do not keep them.
        ctx.save_for_backward(x, weight, *downs, *masks)
        ctx.adapters = adapters.with_masks([m if m is None else m.new_empty(0) for m in masks])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        x, weight, *saved = ctx.saved_tensors
        downs, masks = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        grad_y_TO, grad_x_TI = grad_y.flatten(0, -2), None
        if ctx.needs_input_grad[0]:
            grad_x_TI = storage.back_product(grad_y_TO, weight)
        adapters = ctx.adapters.with_masks(masks)
        adapters.add_gradients(grad_y_TO, x.flatten(0, -2), downs, grad_x_TI)
        grad_x = None if grad_x_TI is None else grad_x_TI.view(x.shape)
        return grad_x, None, None, None, *(None for _ in ctx.adapters.pieces)


def _add_product(y: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """y += scale * left right, rounded once where y is kept in fewer bits."""
    if y.dtype == left.dtype:
        y.addmm_(left, right, alpha=scale)
    else:
        y.add_(left @ right, alpha=scale)
