"""Adapters at inference: each token of a packed batch goes through its own snapshot's, over shared base weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backend.generator.linear import linear
from backend.trainer import targets
from backend.trainer.base import Adapter
from backend.trainer.checks import check_adapter
from backend.trainer.experts import columns_of_b, rows_of_a
from backend.trainer.targets import Layer


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SnapshotWeights:
    """A snapshot's own copy of an adapter. pairs: by layer's path, A^T (in, rank) and B^T (rank, out); of experts,
    (E, in, rank) and (E, rank, out)."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    scale: float


@dataclass(frozen=True, slots=True)
class Span:
    """Packed tokens start to stop go through this adapter."""

    start: int
    stop: int
    weights: SnapshotWeights


class Routes:
    """Which tokens go through which adapter, now; all others are the base model's. Owned by the engine's thread, read
    by all layers.

    chosen: takes, layer after layer, the experts that each token goes through, int64 (T, K). None: nobody asks.
    """

    def __init__(self) -> None:
        self.spans: Sequence[Span] = ()
        self.chosen: list[Tensor] | None = None


class RoutedLinear(nn.Module):
    """y = W x + b, and for the tokens of each snapshot y += scale B A x."""

    def __init__(self, layer: nn.Linear, path: str, routes: Routes) -> None:
        super().__init__()
        # In a tuple, because reading a registered parameter takes nn.Module a microsecond, hundreds of times per token.
        self._shared = (layer.weight, layer.bias)
        self._path = path
        self._routes = routes

    @property
    def weight(self) -> Tensor:
        """Transformers' models may look at it."""
        return self._shared[0]

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out); all but the last dimension are packed tokens."""
        x_T = x.reshape(-1, x.shape[-1])
        y_T = linear(x_T, *self._shared)
        if self._routes.spans:
            self._add(x_T, y_T)
        return y_T.view(*x.shape[:-1], -1)

    def _add(self, x_T: Tensor, y_T: Tensor) -> None:
        for span in self._routes.spans:
            pair = span.weights.pairs.get(self._path)
            if pair is not None:
                rows = slice(span.start, span.stop)
                add_product(y_T[rows], x_T[rows], *pair, span.weights.scale)


def add_product(y: Tensor, x: Tensor, a_t: Tensor, b_t: Tensor, scale: float) -> None:
    """y += scale * (x A^T) B^T, in float32 and rounded once where y is kept in fewer bits."""
    low = x.to(a_t.dtype).mm(a_t)
    if y.dtype == b_t.dtype:
        y.addmm_(low, b_t, alpha=scale)
    else:
        y.add_(low.mm(b_t), alpha=scale)


def install(module: nn.Module, layers: Mapping[str, nn.Linear], routes: Routes) -> None:
    """Wraps these layers of a module, by path, in place."""
    for path, layer in layers.items():
        module.set_submodule(path, RoutedLinear(layer, path, routes))


def snapshot_weights(
    adapter: Adapter, layers: Sequence[Layer], device: torch.device | None = None
) -> SnapshotWeights:
    """Copies an adapter of these layers, to the device that computes with it.

    Raises:
        PostTrainingError: INCOMPATIBLE_CHECKPOINT, naming tensors that are missing, unexpected or misshapen.
    """
    check_adapter(adapter, adapter.lora, targets.tensor_shapes(layers, adapter.lora.rank))
    pairs = {}
    for layer in layers:
        a, b = (
            torch.tensor(adapter.tensors[name], dtype=torch.float32, device=device)
            for name in layer.tensors
        )
        if layer.num_experts:
            a, b = rows_of_a(a, layer.num_experts), columns_of_b(b, layer.num_experts).contiguous()
        pairs[layer.path] = (a.mT, b.mT)
    return SnapshotWeights(pairs=pairs, scale=adapter.lora.scale)
