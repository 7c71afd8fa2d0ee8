"""The adapters of several snapshots as one: two batched products for all of them, where each would take two small ones.

Shapes: T packed tokens, n snapshots, m tokens of each, R rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.generator.lora import Adapters, OneByOne, Products, SnapshotWeights, Span

# A stack is a copy of its adapters. Where these are larger, their products are too, and win less by being few.
_MAX_BYTES = 256 * 2**20
_MAX_TOKENS_EACH = 64
# All ranks, and all numbers of tokens, are filled up to the largest: at most to so many times what is asked for.
_MAX_FILL = 2


class Stacks:
    """Keeps the last stack, as most steps have the adapters of the step before. Owned by the engine's thread.

    It does not keep snapshots alive, nor itself when one of them is gone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._members: list[weakref.ref[SnapshotWeights]] = []
        self._stack: _Stack | None = None

    def adapters(self, spans: Sequence[Span], products: Products) -> Adapters:
        """`spans`: in order."""
        if not _pays(spans):
            return OneByOne(spans=spans, products=products)
        stack = self._stack_of([span.weights for span in spans])
        return _Stacked(stack, _Rows.of(spans, self._device))

    def _stack_of(self, members: list[SnapshotWeights]) -> _Stack:
        stack = self._stack
        if stack is None or [member() for member in self._members] != members:
            self._members = [weakref.ref(member, self._forget) for member in members]
            stack = self._stack = _Stack([member.pairs for member in members])
        return stack

    def _forget(self, _: object) -> None:
        self._stack = None


@dataclass(frozen=True, slots=True)
class _Stacked:
    stack: _Stack
    rows: _Rows

    def add(self, path: str, y_TO: Tensor, x_TI: Tensor) -> None:
        pair = self.stack.pair(path)
        if pair is not None:
            self.rows.add(y_TO, x_TI, *pair)


class _Stack:
    """By layer, A^T (n, in, R) and B^T (n, R, out); 0 for what a snapshot lacks. Stacked when first asked for."""

    def __init__(self, members: Sequence[Mapping[str, tuple[Tensor, Tensor]]]) -> None:
        self._members = members
        self._pairs: dict[str, tuple[Tensor, Tensor] | None] = {}

    def pair(self, path: str) -> tuple[Tensor, Tensor] | None:
        """None: no snapshot adapts this layer."""
        if path not in self._pairs:
            self._pairs[path] = self._stacked(path)
        return self._pairs[path]

    def _stacked(self, path: str) -> tuple[Tensor, Tensor] | None:
        pairs = [pairs.get(path) for pairs in self._members]
        known = [pair for pair in pairs if pair is not None]
        if not known:
            return None
        rank = max(len(b_RO) for _, b_RO in known)
        a_IR, b_RO = known[0]
        a_nIR = a_IR.new_zeros(len(pairs), len(a_IR), rank)
        b_nRO = b_RO.new_zeros(len(pairs), rank, b_RO.shape[1])
        for i, pair in enumerate(pairs):
            if pair is not None:
                a_nIR[i, :, : len(pair[1])], b_nRO[i, : len(pair[1])] = pair
        return a_nIR, b_nRO


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Tokens start to stop, those of each snapshot at m places.

    sources: (n * m,), which token stands in each place, counted from `start`; None: they lie so already. places:
    (stop - start,), where each token is found; tokens of no snapshot in the place `empty`, None if there are none.
    """

    start: int
    stop: int
    num_snapshots: int
    sources: Tensor | None = None
    places: Tensor | None = None
    empty: int | None = None

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> _Rows:
        start, stop = spans[0].start, spans[-1].stop
        lengths = [span.stop - span.start for span in spans]
        longest, has_gaps = max(lengths), sum(lengths) < stop - start
        if min(lengths) == longest and not has_gaps:
            return cls(start=start, stop=stop, num_snapshots=len(spans))
        num_each = longest + (has_gaps and min(lengths) == longest)
        # The first one that no token takes; without gaps, no token looks at it.
        empty = next(i * num_each + n for i, n in enumerate(lengths) if n < num_each)
        sources, places = [0] * (len(spans) * num_each), [empty] * (stop - start)
        for i, span in enumerate(spans):
            for j, token in enumerate(range(span.start - start, span.stop - start)):
                sources[i * num_each + j], places[token] = token, i * num_each + j
        return cls(
            start=start,
            stop=stop,
            num_snapshots=len(spans),
            sources=torch.tensor(sources, device=device),
            places=torch.tensor(places, device=device),
            empty=empty if has_gaps else None,
        )

    def add(self, y_TO: Tensor, x_TI: Tensor, a_nIR: Tensor, b_nRO: Tensor) -> None:
        x, y = x_TI[self.start : self.stop], y_TO[self.start : self.stop]
        if self.sources is None or self.places is None:
            low = x.unflatten(0, (self.num_snapshots, -1)).bmm(a_nIR)
            y.unflatten(0, (self.num_snapshots, -1)).baddbmm_(low, b_nRO)
            return
        low = x.index_select(0, self.sources).unflatten(0, (self.num_snapshots, -1)).bmm(a_nIR)
        if self.empty is not None:
            low.flatten(0, 1)[self.empty] = 0
        y.add_(low.bmm(b_nRO).flatten(0, 1).index_select(0, self.places))


def _pays(spans: Sequence[Span]) -> bool:
    if len(spans) < 2:
        return False
    lengths = [span.stop - span.start for span in spans]
    ranks = [span.weights.rank for span in spans]
    return (
        max(lengths) <= _MAX_TOKENS_EACH
        and _is_level(lengths)
        and _is_level(ranks)
        and sum(span.weights.num_bytes for span in spans) <= _MAX_BYTES
    )


def _is_level(numbers: Sequence[int]) -> bool:
    return len(numbers) * max(numbers) <= _MAX_FILL * sum(numbers)
