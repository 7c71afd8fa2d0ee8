"""Adapters at inference: each token of a packed batch goes through its own snapshot's, over shared base weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backend.generator.linear import linear
from backend.trainer import targets
from backend.trainer.base import Adapter
from backend.trainer.checks import check_adapter
from backend.trainer.experts import columns_of_b, rows_of_a
from backend.trainer.targets import Layer


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, kw_only=True)
class SnapshotWeights:
    """A snapshot's own copy of an adapter. pairs: by layer's path, A^T (in, rank) and B^T (rank, out), float32, B times
    the adapter's scale; of experts, (E, in, rank) and (E, rank, out)."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    rank: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """Packed tokens start to stop go through this adapter."""

    start: int
    stop: int
    weights: SnapshotWeights


def add_product(y: Tensor, x: Tensor, a_t: Tensor, b_t: Tensor) -> None:
    """y += (x A^T) B^T, in float32 and rounded once where y is kept in fewer bits."""
    low = x.to(a_t.dtype).mm(a_t)
    if y.dtype == b_t.dtype:
        y.addmm_(low, b_t)
    else:
        y.add_(low.mm(b_t))


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """How to multiply all tokens with a layer, some of them with one of its experts, some with an adapter."""

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = linear
    part_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = linear
    add_product: Callable[[Tensor, Tensor, Tensor, Tensor], None] = add_product


class Adapters(Protocol):
    """Of the packed tokens of one forward."""

    def add(self, path: str, y_TO: Tensor, x_TI: Tensor) -> None:
        """y += what the adapters of this layer give for x."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OneByOne:
    """Adapters, each computed for itself."""

    spans: Sequence[Span]
    products: Products

    def add(self, path: str, y_TO: Tensor, x_TI: Tensor) -> None:
        for span in self.spans:
            pair = span.weights.pairs.get(path)
            if pair is not None:
                rows = slice(span.start, span.stop)
                self.products.add_product(y_TO[rows], x_TI[rows], *pair)


class Routes:
    """Which tokens go through which adapter, now; all others are the base model's. Owned by the engine's thread, read
    by all layers.

    adapters: None, if there are no spans. chosen: where layers with experts put those that the tokens go through; None:
    nobody asks.
    """

    def __init__(self, products: Products) -> None:
        self.products = products
        self.spans: Sequence[Span] = ()
        self.adapters: Adapters | None = None
        self.chosen: list[Tensor] | None = None


class RoutedLinear(nn.Module):
    """y = W x + b, and for the tokens of each snapshot y += scale B A x."""

    def __init__(self, layer: nn.Linear, path: str, routes: Routes) -> None:
        super().__init__()
        # In a tuple, because reading a registered parameter takes nn.Module a microsecond, hundreds of times per token.
        self._shared = (layer.weight, layer.bias)
        self._linear = routes.products.linear
        self._path = path
        self._routes = routes

    @property
    def weight(self) -> Tensor:
        """Transformers' models may look at it."""
        return self._shared[0]

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out); all but the last dimension are packed tokens."""
        x_T = x.reshape(-1, x.shape[-1])
        y_T = self._linear(x_T, *self._shared)
        if self._routes.adapters is not None:
            self._routes.adapters.add(self._path, y_T, x_T)
        return y_T.view(*x.shape[:-1], -1)


def install(module: nn.Module, layers: Mapping[str, nn.Linear], routes: Routes) -> None:
    """Wraps these layers of a module, by path, in place."""
    for path, layer in layers.items():
        module.set_submodule(path, RoutedLinear(layer, path, routes))


def snapshot_weights(
    adapter: Adapter,
    layers: Sequence[Layer],
    device: torch.device | None = None,
    *,
    rank_multiple: int = 1,
) -> SnapshotWeights:
    """Copies an adapter of these layers, to the device that computes with it; its rank is filled up with 0 to a
    multiple.

    Raises:
        PostTrainingError: INCOMPATIBLE_CHECKPOINT, naming tensors that are missing, unexpected or misshapen.
    """
    check_adapter(adapter, adapter.lora, targets.tensor_shapes(layers, adapter.lora.rank))
    pairs = {}
    missing = -adapter.lora.rank % rank_multiple
    for layer in layers:
        a, b = (
            torch.tensor(adapter.tensors[name], dtype=torch.float32, device=device)
            for name in layer.tensors
        )
        if layer.num_experts:
            a, b = rows_of_a(a, layer.num_experts), columns_of_b(b, layer.num_experts)
        # Contiguous as they are multiplied: faster by a sixth.
        a_t, b_t = a.mT.contiguous(), b.mT.contiguous().mul_(adapter.lora.scale)
        if missing:
            a_t, b_t = F.pad(a_t, (0, missing)), F.pad(b_t, (0, 0, 0, missing))
        pairs[layer.path] = a_t, b_t
    num_bytes = sum(t.nbytes for pair in pairs.values() for t in pair)
    return SnapshotWeights(pairs=pairs, rank=adapter.lora.rank + missing, num_bytes=num_bytes)
