"""A mixture of experts with many adapters: each token through its experts, under the adapter of its own session.

With the router's choice of K experts a token, and for expert e of E, as transformers computes it:

    y_t = sum_k w_tk * down_e(act(gate_e(x_t)) * up_e(x_t)),    e = the k-th expert of token t

gate and up are one matrix (2I, H) of each expert, down another; each takes an adapter as a linear layer does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from backend.trainer.lora import AdaptedRows, Adapters, LoraWeights, Routing, Segment


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
    """The pairs of T tokens and their K experts, S = T * K of them, sorted by expert, then by token.

    order: int64 (S,): which pair, in the router's order, stands in each place.
    tokens: int64 (S,): its token.
    bounds: E + 1 numbers: where each expert's pairs begin, and where the last one's end.
    """

    order: Tensor
    tokens: Tensor
    bounds: Sequence[int]
    num_tokens: int

    def ranges(self) -> list[tuple[int, int, int]]:
        """(expert, start, stop) for each that has any tokens."""
        return [(e, lo, hi) for e, (lo, hi) in enumerate(pairwise(self.bounds)) if lo < hi]

    def ranges_of(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(expert, start, stop) of the pairs of these neighbouring tokens: of each expert, they are neighbours too."""
        if start == 0 and stop == self.num_tokens:
            return self.ranges()
        bounds = torch.tensor(self.bounds, device="cpu")
        experts = torch.arange(len(self.bounds) - 1, device="cpu")
        num_pairs = bounds.diff()
        rank = experts.repeat_interleave(num_pairs) * self.num_tokens + self.tokens.cpu()
        edges = experts[:, None] * self.num_tokens + torch.tensor([start, stop], device="cpu")
        found = torch.searchsorted(rank, edges).tolist()
        return [(e, lo, hi) for e, (lo, hi) in enumerate(found) if lo < hi]

    def gather(self, x_TH: Tensor) -> Tensor:
        """(S, H)."""
        return x_TH.index_select(0, self.tokens)

    def combine(self, y_SH: Tensor, weights_TK: Tensor) -> Tensor:
        """Each token's sum over its experts, in the router's order whatever lies beside it: (T, H)."""
        weighted = y_SH * weights_TK.reshape(-1).index_select(0, self.order).unsqueeze(1)
        places = torch.empty_like(self.order)
        places[self.order] = torch.arange(len(self.order), device=places.device)
        return weighted.index_select(0, places).unflatten(0, weights_TK.shape).sum(1).to(y_SH.dtype)


def dispatch(experts_TK: Tensor, num_experts: int) -> Dispatch:
    """`experts_TK`: int64, the router's choice; no token chooses an expert twice."""
    pairs = experts_TK.reshape(-1)
    order = pairs.argsort(stable=True)
    counts = torch.bincount(pairs, minlength=num_experts)
    return Dispatch(
        order=order,
        tokens=order // experts_TK.shape[1],
        bounds=[0, *counts.cumsum(0).tolist()],
        num_tokens=len(experts_TK),
    )


class LoraExperts(nn.Module):
    """Frozen experts, shared, under whatever adapters the routing names."""

    def __init__(self, experts: nn.Module, path: str, routing: Routing) -> None:
        super().__init__()
        self.gate_up_proj = experts.get_parameter("gate_up_proj")
        self.down_proj = experts.get_parameter("down_proj")
        self._apply_gate = cast(Callable[[Tensor], Tensor], experts._apply_gate)
        self._path = path
        self._routing = routing

    def forward(self, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        sent = dispatch(experts_TK, len(self.down_proj))
        gate_up = self._linear("gate_up_proj", sent.gather(hidden_TH), sent)
        down = self._linear("down_proj", self._apply_gate(gate_up), sent)
        return sent.combine(down, weights_TK)

    def _linear(self, name: str, x_SI: Tensor, sent: Dispatch) -> Tensor:
        weight = getattr(self, name)
        adapters = _adapters(f"{self._path}.{name}", self._routing.segments, sent)
        anchors = (piece.anchor for piece in adapters.pieces)
        return _Grouped.apply(x_SI, weight, sent.ranges(), adapters, *anchors)


class _Grouped(torch.autograd.Function):
    """As one node of `lora`, for rows of which each range (expert, start, stop) has a weight of its own."""

    @staticmethod
    def forward(ctx, x_SI, weight_EOI, ranges, adapters, *anchors):
        y_SO = x_SI.new_empty(len(x_SI), weight_EOI.shape[1])
        for expert, start, stop in ranges:
            torch.mm(x_SI[start:stop], weight_EOI[expert].T, out=y_SO[start:stop])
        downs = adapters.add_to(y_SO, x_SI)
        ctx.save_for_backward(x_SI, weight_EOI, *downs)
        ctx.ranges, ctx.adapters = ranges, adapters
        return y_SO

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SO):
        x_SI, weight_EOI, *downs = ctx.saved_tensors
        grad_SI = torch.empty_like(x_SI) if ctx.needs_input_grad[0] else None
        if grad_SI is not None:
            for expert, start, stop in ctx.ranges:
                torch.mm(grad_SO[start:stop], weight_EOI[expert], out=grad_SI[start:stop])
        ctx.adapters.add_gradients(grad_SO, x_SI, downs, grad_SI)
        return grad_SI, None, None, None, *(None for _ in ctx.adapters.pieces)


def _adapters(path: str, segments: Sequence[Segment], sent: Dispatch) -> Adapters:
    """Each segment's adapters of each of its experts. They have no dropout; see `targets.select`."""
    return Adapters(
        tuple(
            AdaptedRows(
                start=start,
                stop=stop,
                weights=_of_expert(segment.weights[path], expert, len(sent.bounds) - 1),
                anchor=segment.anchor,
            )
            for segment in segments
            if path in segment.weights
            for expert, start, stop in sent.ranges_of(segment.start, segment.stop)
        )
    )


def _of_expert(lora: LoraWeights, expert: int, num_experts: int) -> LoraWeights:
    """Views of one expert's part."""
    return replace(
        lora,
        a=rows_of_a(lora.a, num_experts)[expert],
        b=columns_of_b(lora.b, num_experts)[expert],
        grad_a=rows_of_a(lora.grad_a, num_experts)[expert],
        grad_b=columns_of_b(lora.grad_b, num_experts)[expert],
    )


def rows_of_a(a: Tensor, num_experts: int) -> Tensor:
    """A of all experts, as PEFT keeps it (E * R, in), by expert: a view (E, R, in)."""
    return a.unflatten(0, (num_experts, -1))


def columns_of_b(b: Tensor, num_experts: int) -> Tensor:
    """B of all experts, as PEFT keeps it (out, R * E), by expert: a view (E, out, R)."""
    return b.unflatten(1, (-1, num_experts)).permute(2, 0, 1)


def install(module: nn.Module, experts: Mapping[str, nn.Module], routing: Routing) -> None:
    """Wraps these experts of a model, by path, in place."""
    for path, part in experts.items():
        module.set_submodule(path, LoraExperts(part, path, routing))
