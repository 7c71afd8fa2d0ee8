"""Which of those who wait is next: fair over flows, first come first served within each. Pure."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


@dataclass(slots=True, eq=False)
class _Flow(Generic[Item]):
    """start: where its next item begins on the clock that all flows share. costs: of its items, oldest first."""

    start: float
    costs: OrderedDict[Item, float] = field(default_factory=OrderedDict)


class FairOrder(Generic[Item]):
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996): each flow has a clock that its items advance by their
    costs, and the flow whose clock is least is next. One that was idle gets no credit for it, and one that has had much
    waits until the others have had as much."""

    def __init__(self) -> None:
        self._now = 0.0
        self._flows: dict[str, _Flow[Item]] = {}
        # (start, name) of every flow above, also of those without items until the others have caught up with them.
        self._heap: list[tuple[float, str]] = []
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def push(self, flow: str, item: Item, cost: float) -> None:
        """`item` is in no flow; `cost` is above 0."""
        if flow not in self._flows:
            self._flows[flow] = _Flow(self._now)
            heapq.heappush(self._heap, (self._now, flow))
        self._flows[flow].costs[item] = cost
        self._num_items += 1

    def pop(self) -> Item:
        """The next; there must be one."""
        assert self._num_items, "nothing waits"
        self._now, name = heapq.heappop(self._heap)
        while not self._flows[name].costs:
            del self._flows[name]
            self._now, name = heapq.heappop(self._heap)
        flow = self._flows[name]
        item, cost = flow.costs.popitem(last=False)
        flow.start += cost
        heapq.heappush(self._heap, (flow.start, name))
        self._count_out()
        return item

    def discard(self, flow: str, item: Item) -> None:
        """Takes an item out, if it waits."""
        known = self._flows.get(flow)
        if known is not None and known.costs.pop(item, None) is not None:
            self._count_out()

    def _count_out(self) -> None:
        self._num_items -= 1
        if not self._num_items:
            self._now = 0.0
            self._flows.clear()
            self._heap.clear()
