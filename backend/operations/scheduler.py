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
    """has_turn: it has had the quantum of its turn, which lasts until its credit covers no more."""

    items: deque[tuple[T, int]] = field(default_factory=deque)
    credit: int = 0
    has_turn: bool = False
    is_busy: bool = False

    @property
    def is_ready(self) -> bool:
        return bool(self.items) and not self.is_busy

    @property
    def cost(self) -> int:
        return self.items[0][1]

    def serve(self) -> T:
        item, cost = self.items.popleft()
        self.credit -= cost
        self.is_busy = True
        return item


class Scheduler(Generic[T]):
    """Items of one session come out in the order they were put in, one at a time."""

    def __init__(self, quantum_tokens: int = QUANTUM_TOKENS) -> None:
        self._quantum = quantum_tokens
        # In the order of their turns.
        self._lanes: OrderedDict[str, _Lane[T]] = OrderedDict()

    def add(self, session: str, item: T, cost: int) -> None:
        """`cost`: in tokens. It counts as 1 at least: a session of free items would never let others have a turn."""
        self._lanes.setdefault(session, _Lane()).items.append((item, max(1, cost)))

    def next(self) -> T | None:
        """The next item of a session that is not busy; the session is busy from then on. None: nothing can run."""
        ready = [lane for lane in self._lanes.values() if lane.is_ready]
        if not ready:
            return None
        self._skip_idle_rounds(ready)
        while True:
            for name, lane in list(self._lanes.items()):
                if not lane.is_ready:
                    continue
                if not lane.has_turn:
                    lane.credit += self._quantum
                    lane.has_turn = True
                if lane.credit >= lane.cost:
                    return lane.serve()
                lane.has_turn = False
                self._lanes.move_to_end(name)

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

    def drop_all(self) -> list[T]:
        """Takes out all waiting items of all sessions."""
        return [item for session in list(self._lanes) for item in self.drop(session)]

    def _skip_idle_rounds(self, ready: list[_Lane[T]]) -> None:
        """Gives everyone at once what rounds in which nothing could run would have given."""
        needed = min(-(-(lane.cost - lane.credit) // self._quantum) for lane in ready)
        if needed > 1:
            for lane in ready:
                lane.credit += (needed - 1) * self._quantum
