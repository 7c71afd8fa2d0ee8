"""How many calls a generator works on at a time; the others wait their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from backend.generator.queueing import FairQueue


class Turns:
    """Owned by the event loop. At most `max_running` at a time; see `FairQueue` for who is next."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self.num_running = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @asynccontextmanager
    async def turn(self, flow: str, cost: int) -> AsyncIterator[None]:
        """Waits for a turn, and has it until the end. Who is cancelled while waiting leaves at once.

        Args:
            flow: calls of one flow come one after the other; flows get equal shares.
            cost: of the call, in tokens.
        """
        if self.num_running < self._max_running:
            self.num_running += 1
        else:
            await self._wait(flow, cost)
        try:
            yield
        finally:
            self._hand_on()

    async def _wait(self, flow: str, cost: int) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.push(flow, mine, cost)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # it was given a turn at this very moment
                self._hand_on()
            raise
        finally:
            self._queue.leave(mine)

    def _hand_on(self) -> None:
        while self._queue:
            next_ = self._queue.pop()
            if not next_.cancelled():  # it is about to leave
                next_.set_result(None)
                return
        self.num_running -= 1
