"""How many calls a connection has on the wire at a time. The others queue here, where they cost nobody anything."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# More keep a server no busier, and hold up what others send to it.
MAX_CALLS = 2048


class Window:
    """The oldest call goes first. Owned by the loop that calls.

    A server that is full takes some of the calls that were sent and refuses the rest. So many as it took are sent from
    then on, and one more for each so many that it answers, until it refuses one again: additive increase, as TCP has
    it, and a decrease by what was too much.
    """

    def __init__(self, max_calls: int = MAX_CALLS) -> None:
        self._max_calls = max_calls
        self._limit = float(max_calls)
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self.num_out = 0

    @property
    def limit(self) -> int:
        return int(self._limit)

    def number(self) -> int:
        """A call's place among all calls, for all its attempts."""
        return next(self._numbers)

    @asynccontextmanager
    async def place(self, number: int) -> AsyncIterator[None]:
        """For one attempt: waits until it may be sent."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (number, mine))
        self._send()
        try:
            await mine
            yield
        finally:
            if mine.done() and not mine.cancelled():
                self.num_out -= 1
                self._send()

    def note_answer(self) -> None:
        """To be called within the place."""
        self._limit = min(self._limit + 1 / self._limit, self._max_calls)

    def note_refusal(self) -> None:
        """The server is full. To be called within the place."""
        self._limit = max(min(self._limit, self.num_out - 1.0), 1.0)

    def _send(self) -> None:
        while self._waiting and self.num_out < self.limit:
            _, next_ = heapq.heappop(self._waiting)
            if not next_.cancelled():
                self.num_out += 1
                next_.set_result(None)
