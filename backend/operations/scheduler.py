"""Which operation runs next: fair over sessions, by deficit round robin in tokens.

Each turn adds a quantum of tokens to a session's credit; its operations run while the credit covers their cost. So
sessions that always have work get the same number of tokens, whether they send them in small operations or in
large ones. Source: Shreedhar and Varghese, "Efficient fair queueing using deficit round robin", 1995.

Pure: no clock, no I/O, no locks. The event loop owns it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

QUANTUM_TOKENS = 4096


@dataclass(slots=True)
class _Lane(Generic[T]):
    items: deque[tuple[T, int]] = field(default_factory=deque)
    credit: int = 0
    is_busy: bool = False


class Scheduler(Generic[T]):
    """Items of one session come out in the order they were put in, one at a time."""

    def __init__(self, quantum_tokens: int = QUANTUM_TOKENS) -> None:
        self._quantum = quantum_tokens
        # In the order of their turns.
        self._lanes: OrderedDict[str, _Lane[T]] = OrderedDict()

    def add(self, session: str, item: T, cost: int) -> None:
        """`cost`: in tokens, 0 or more."""
        self._lanes.setdefault(session, _Lane()).items.append((item, cost))

    def next(self) -> T | None:
        """The next item of a session that is not busy; the session is busy from then on. None: nothing can run."""
        ready = [name for name, lane in self._lanes.items() if lane.items and not lane.is_busy]
        if not ready:
            return None
        rounds = min(self._rounds_until_served(self._lanes[name]) for name in ready)
        for name in ready:
            self._lanes[name].credit += self._quantum * max(0, rounds - 1)
        for name in ready:
            lane = self._lanes[name]
            if rounds:
                lane.credit += self._quantum
            if lane.credit >= lane.items[0][1]:
                return self._serve(name)
            self._lanes.move_to_end(name)
        raise AssertionError("one of them has the credit")

    def release(self, session: str) -> None:
        """The session's item has run."""
        lane = self._lanes[session]
        lane.is_busy = False
        if not lane.items:
            del self._lanes[session]

    def drop(self, session: str) -> list[T]:
        """Takes out all of a session's waiting items."""
        lane = self._lanes.get(session)
        if lane is None:
            return []
        items = [item for item, _ in lane.items]
        lane.items.clear()
        if not lane.is_busy:
            del self._lanes[session]
        return items

    def _rounds_until_served(self, lane: _Lane[T]) -> int:
        return max(0, -(-(lane.items[0][1] - lane.credit) // self._quantum))

    def _serve(self, name: str) -> T:
        lane = self._lanes[name]
        item, cost = lane.items.popleft()
        lane.credit -= cost
        lane.is_busy = True
        return item
