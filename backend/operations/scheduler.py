"""Which operations run next, and which run together.

Fair over sessions by deficit round robin in tokens: each turn adds a quantum of tokens to a session's credit, and its
operations run while the credit covers their cost. So sessions that always have work get the same number of tokens,
whether they send them in small operations or in large ones. Source: Shreedhar and Varghese, "Efficient fair queueing
using deficit round robin", 1995.

Two kinds of operations run before their session's turn comes, on credit that it must make up for. The debt is bounded,
and so is what one session can get ahead of another:

- A small pass joins that of the session whose turn it is, because many small passes take hardly longer than one.
- What is short goes before any pass. An optim_step is, and when it has run its session's next pass can join others.

Pure: no clock, no I/O, no locks. The event loop owns it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

T = TypeVar("T")

# Small: turns change often, so that nobody waits for another's long row of small operations.
QUANTUM_TOKENS = 64


class Kind(Enum):
    """Passes of one kind may run together."""

    SHORT = auto()
    FORWARD = auto()
    BACKWARD = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry(Generic[T]):
    item: T
    cost: int
    kind: Kind


@dataclass(slots=True)
class _Lane(Generic[T]):
    """has_turn: it has had the quantum of its turn, which lasts until its credit covers no more."""

    entries: deque[_Entry[T]] = field(default_factory=deque)
    credit: int = 0
    has_turn: bool = False
    is_busy: bool = False

    @property
    def is_ready(self) -> bool:
        return bool(self.entries) and not self.is_busy

    @property
    def head(self) -> _Entry[T]:
        return self.entries[0]

    @property
    def credit_after(self) -> int:
        """Its credit when its head has run."""
        return self.credit - self.head.cost

    def serve(self) -> T:
        self.credit = self.credit_after
        self.is_busy = True
        return self.entries.popleft().item


class Scheduler(Generic[T]):
    """Items of one session come out in the order they were put in, one at a time.

    merge_tokens: how many tokens passes that run together have at most; 0: each runs alone.
    """

    def __init__(self, *, merge_tokens: int = 0, quantum_tokens: int = QUANTUM_TOKENS) -> None:
        self._merge_tokens = merge_tokens
        self._quantum = quantum_tokens
        self._max_debt = quantum_tokens + merge_tokens
        # In the order of their turns.
        self._lanes: OrderedDict[str, _Lane[T]] = OrderedDict()

    def add(self, session: str, item: T, cost: int, kind: Kind = Kind.SHORT) -> None:
        """`cost`: in tokens. It counts as 1 at least: a session of free items would never let others have a turn."""
        entry = _Entry(item=item, cost=max(1, cost), kind=kind)
        self._lanes.setdefault(session, _Lane()).entries.append(entry)

    def next_batch(self) -> list[T]:
        """Items of different sessions to run together: short ones, or passes of one kind; none if nothing can run.

        The sessions are busy from then on.
        """
        ready = [lane for lane in self._lanes.values() if lane.is_ready]
        short = [lane for lane in ready if lane.head.kind is Kind.SHORT and self._may_borrow(lane)]
        if short or not ready:
            return [lane.serve() for lane in short]
        first = self._in_turn(ready)
        # Whose turn is next joins first.
        joining = list(self._joining(first.head))
        return [lane.serve() for lane in (first, *joining)]

    def release(self, session: str) -> None:
        """The session's item has run."""
        lane = self._lanes[session]
        lane.is_busy = False
        if not lane.entries:
            del self._lanes[session]

    def drop(self, session: str) -> list[T]:
        """Takes out all of a session's waiting items."""
        lane = self._lanes.get(session)
        if lane is None:
            return []
        items = [entry.item for entry in lane.entries]
        lane.entries.clear()
        if not lane.is_busy:
            del self._lanes[session]
        return items

    def drop_all(self) -> list[T]:
        """Takes out all waiting items of all sessions."""
        return [item for session in list(self._lanes) for item in self.drop(session)]

    def _in_turn(self, ready: list[_Lane[T]]) -> _Lane[T]:
        self._skip_idle_rounds(ready)
        while True:
            for name, lane in list(self._lanes.items()):
                if not lane.is_ready:
                    continue
                if not lane.has_turn:
                    lane.credit += self._quantum
                    lane.has_turn = True
                if lane.credit_after >= 0:
                    return lane
                lane.has_turn = False
                self._lanes.move_to_end(name)

    def _skip_idle_rounds(self, ready: list[_Lane[T]]) -> None:
        """Gives everyone at once what rounds in which nothing could run would have given."""
        needed = min(-(lane.credit_after // self._quantum) for lane in ready)
        if needed > 1:
            for lane in ready:
                lane.credit += (needed - 1) * self._quantum

    def _joining(self, first: _Entry[T]) -> Iterator[_Lane[T]]:
        """Others whose next pass fits beside `first`."""
        if first.kind is Kind.SHORT:
            return
        room = self._merge_tokens - first.cost
        for lane in self._lanes.values():
            if not lane.is_ready or lane.head is first or lane.head.kind is not first.kind:
                continue
            if lane.head.cost <= room and self._may_borrow(lane):
                room -= lane.head.cost
                yield lane

    def _may_borrow(self, lane: _Lane[T]) -> bool:
        return lane.credit_after >= -self._max_debt
