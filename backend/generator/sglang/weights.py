"""Whose turn it is: a server has one set of base weights at a time.

Snapshots of full weights take the place of the base model's, and adapters apply to whatever is there. So calls take
turns by weights: those for the same run together, and the weights are replaced when nobody runs. Who wants others than
those that are there does not wait for ever: once somebody has waited for a while, nobody else joins those who run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from backend.generator.sglang.client import ServerLost
from together_post_training.errors import PostTrainingError

log = logging.getLogger(__name__)

# None: the base model's.
Name = str | None
Replace = Callable[[Name], Awaitable[None]]

_UNKNOWN = "(unknown)"


class WeightTurns:
    """Owned by the event loop.

    Args:
        replace: makes these the server's weights, nobody running; leaves the old ones where it raises.
        start_number: of the server's starts.
        after_restart: which weights it has then.
        patience_s: how long one who waits lets others join those who run.
    """

    def __init__(
        self,
        replace: Replace,
        start_number: Callable[[], int],
        after_restart: Callable[[], Name],
        *,
        patience_s: float = 1.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replace = replace
        self._start_number = start_number
        self._after_restart = after_restart
        self._patience_s = patience_s
        self._monotonic = monotonic
        self._live: Name = None
        self._live_since = start_number()
        self._num_running = 0
        # Who came first is first.
        self._waiting: OrderedDict[Name, list[asyncio.Future[None]]] = OrderedDict()
        self._first_wait = 0.0
        self._switching: asyncio.Task[None] | None = None

    @property
    def live(self) -> Name:
        return self._live

    @asynccontextmanager
    async def turn(self, weights: Name) -> AsyncIterator[None]:
        """The server has these weights from here to the end, or until it is started again.

        Raises:
            PostTrainingError: what `replace` raises.
        ServerLost: it failed meanwhile.
        """
        self._notice_restart()
        if self._may_join(weights):
            self._num_running += 1
        else:
            await self._wait(weights)
        try:
            yield
        finally:
            self._leave()

    def forget(self) -> None:
        """Nobody knows what the server has: it is given weights anew before anyone runs."""
        self._live = _UNKNOWN

    def _may_join(self, weights: Name) -> bool:
        if self._switching is not None or weights != self._live:
            return False
        return not self._waiting or self._monotonic() < self._first_wait + self._patience_s

    async def _wait(self, weights: Name) -> None:
        if not self._waiting:
            self._first_wait = self._monotonic()
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(weights, []).append(mine)
        self._switch_if_idle()
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled() and mine.exception() is None:
                self._leave()  # It was let in at this very moment.
            else:
                self._give_up(weights, mine)
            raise

    def _give_up(self, weights: Name, mine: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(weights)
        if waiting is not None and mine in waiting:
            waiting.remove(mine)
            if not waiting:
                del self._waiting[weights]

    def _leave(self) -> None:
        self._num_running -= 1
        self._switch_if_idle()

    def _switch_if_idle(self) -> None:
        if self._waiting and not self._num_running and self._switching is None:
            self._switching = asyncio.create_task(self._switch(), name="replace weights")

    async def _switch(self) -> None:
        weights = next(iter(self._waiting))
        self._notice_restart()
        error: BaseException | None = None
        try:
            if weights != self._live:
                number = self._start_number()
                await self._replace(weights)
                self._live, self._live_since = weights, number
        except PostTrainingError as refused:
            error = refused
        except ServerLost as lost:
            self.forget()
            error = lost
        except Exception as unexpected:
            log.exception("the weights of an SGLang server could not be replaced")
            self.forget()
            error = unexpected
        finally:
            self._switching = None
        self._let_in(weights, error)
        self._switch_if_idle()

    def _let_in(self, weights: Name, error: BaseException | None) -> None:
        self._first_wait = self._monotonic()
        for waiter in self._waiting.pop(weights, []):
            if waiter.done():
                continue
            if error is not None:
                waiter.set_exception(error)
            else:
                self._num_running += 1
                waiter.set_result(None)

    def _notice_restart(self) -> None:
        """Those who ran then have failed, and are on their way out."""
        number = self._start_number()
        if number != self._live_since:
            self._live, self._live_since = self._after_restart(), number
