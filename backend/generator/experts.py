"""A mixture of experts at inference: each token through its experts, under its own snapshot's adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from backend.generator.lora import Routes, SnapshotWeights
from backend.trainer.experts import Dispatch, dispatch

# Of each adapter of experts, what `Dispatch.ranges_of` gives for its tokens.
_Places = Sequence[tuple[SnapshotWeights, Sequence[tuple[int, int, int]]]]


class RoutedExperts(nn.Module):
    """What `backend.trainer.experts` computes, with the adapters that the routes name."""

    def __init__(self, experts: nn.Module, path: str, routes: Routes) -> None:
        super().__init__()
        # In a dictionary of its own, as the weights of RoutedLinear are.
        self._shared = {name: experts.get_parameter(name) for name in ("gate_up_proj", "down_proj")}
        self._apply_gate = cast(Callable[[Tensor], Tensor], experts._apply_gate)
        self._path = path
        self._routes = routes

    def forward(self, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if self._routes.chosen is not None:
            self._routes.chosen.append(experts_TK)
        sent = dispatch(experts_TK, len(self._shared["down_proj"]))
        places = self._places(sent)
        gate_up = self._linear("gate_up_proj", sent.gather(hidden_TH), sent, places)
        down = self._linear("down_proj", self._apply_gate(gate_up), sent, places)
        return sent.combine(down, weights_TK)

    def _places(self, sent: Dispatch) -> _Places:
        paths = [f"{self._path}.{name}" for name in self._shared]
        return [
            (span.weights, sent.ranges_of(span.start, span.stop))
            for span in self._routes.spans
            if any(path in span.weights.pairs for path in paths)
        ]

    def _linear(self, name: str, x_SI: Tensor, sent: Dispatch, places: _Places) -> Tensor:
        weight_EOI, products = self._shared[name], self._routes.products
        y_SO = torch.cat(
            [
                products.part_linear(x_SI[lo:hi], weight_EOI[expert], None)
                for expert, lo, hi in sent.ranges()
            ]
        )
        for weights, ranges in places:
            pair = weights.pairs.get(f"{self._path}.{name}")
            if pair is not None:
                a_t, b_t = pair
                for expert, lo, hi in ranges:
                    products.add_product(y_SO[lo:hi], x_SI[lo:hi], a_t[expert], b_t[expert])
        return y_SO


def install(module: nn.Module, experts: Mapping[str, nn.Module], routes: Routes) -> None:
    """Wraps these experts of a model, by path, in place."""
    for path, part in experts.items():
        module.set_submodule(path, RoutedExperts(part, path, routes))
