"""Whose turn it is, of those who wait for a place in the batch. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Ticket:
    flow: str
    cost: int


class FairQueue(Generic[Item]):
    """Fair over flows by the tokens that they were served, first come first served within each.

    Virtual token counters (Sheng et al., Fairness in Serving Large Language Models, 2024): the flow that was served the
    least is next. A flow that had nothing to wait for begins where the one that was served last stood: it has no claim
    to what it left to others. So of two flows that both wait, none is ever ahead of the other by more than the dearest
    item, apart from what `leave` corrects.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, OrderedDict[Item, None]] = {}
        self._tickets: dict[Item, _Ticket] = {}
        self._served: dict[str, int] = {}
        self._floor = 0

    def __len__(self) -> int:
        """Of all that wait."""
        return sum(map(len, self._waiting.values()))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Item]:
        """All that wait, flow by flow."""
        return (item for items in self._waiting.values() for item in items)

    def push(self, flow: str, item: Item, cost: int) -> None:
        """`cost`: in tokens, as far as it is known."""
        if not self._waiting:
            self._forget_everything()
        if flow not in self._waiting:
            self._forget_old_flows()
            self._served[flow] = max(self._served.get(flow, 0), self._floor)
            self._waiting[flow] = OrderedDict()
        self._waiting[flow][item] = None
        self._tickets[item] = _Ticket(flow, cost)

    def pop(self) -> Item:
        """The next one, which counts as served; there must be one."""
        flow = min(self._waiting, key=self._served.__getitem__)
        item = next(iter(self._waiting[flow]))
        self._take_out(flow, item)
        self._floor = max(self._floor, self._served[flow])
        self._served[flow] += self._tickets[item].cost
        return item

    def put_back(self, item: Item) -> None:
        """One that was popped, and could not be served: it is the first of its flow again."""
        ticket = self._tickets[item]
        self._served[ticket.flow] -= ticket.cost
        items = self._waiting.setdefault(ticket.flow, OrderedDict())
        items[item] = None
        items.move_to_end(item, last=False)

    def leave(self, item: Item, more: int = 0) -> None:
        """Takes out an item, whether it waits or was popped; one that is not here is ignored.

        Args:
            more: tokens that it was served beyond its cost.
        """
        ticket = self._tickets.pop(item, None)
        if ticket is None:
            return
        flow = ticket.flow
        if item in self._waiting.get(flow, ()):
            self._take_out(flow, item)
        else:
            self._served[flow] = self._served.get(flow, self._floor) + more

    def _take_out(self, flow: str, item: Item) -> None:
        del self._waiting[flow][item]
        if not self._waiting[flow]:
            del self._waiting[flow]

    def _forget_everything(self) -> None:
        """Where nobody waited, nobody has had anything at the cost of others."""
        self._tickets.clear()
        self._served.clear()
        self._floor = 0

    def _forget_old_flows(self) -> None:
        """Those that would begin at the floor anyway."""
        if len(self._served) > 2 * len(self._waiting) + 16:
            self._served = {
                flow: served
                for flow, served in self._served.items()
                if flow in self._waiting or served > self._floor
            }
