"""A training run: the core of a TrainingClient."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from tinker import types

from tinker_compat.futures import OperationFuture
from tinker_compat.holder import Holder
from tinker_compat.server_warnings import show_new
from together_post_training.client.loop import background_loop
from together_post_training.client.session import TrainerRequest, TrainingSession, Turn
from together_post_training.v1 import operations_pb2

T = TypeVar("T")
_POISONED = (
    "A previous request failed; this TrainingClient is poisoned and cannot accept further requests."
)


class Run:
    """Gives every call its place in the session's order, at the moment of the call.

    A call with a custom loss takes its places before it knows what to send there. Later calls wait until it does
    (they could not run earlier anyway), and are refused if it never will: that is what poisons a client.
    """

    def __init__(
        self, holder: Holder, session: TrainingSession, info: types.GetInfoResponse
    ) -> None:
        self.holder = holder
        self.session = session
        self.info = info
        self._lock = threading.Lock()
        # Set when the latest custom-loss call has sent what it has to send, or has failed.
        self._latest: asyncio.Event | None = None
        self._poison: BaseException | None = None

    def submit(
        self,
        requests: Sequence[TrainerRequest],
        convert: Callable[[list[operations_pb2.Operation]], T],
    ) -> OperationFuture[T]:
        """Makes the requests the session's next operations; the future holds their converted results."""
        self.holder.check_open()
        with self._lock:
            turn = self.session.reserve(len(requests))
            before = self._latest
        self.session.number(requests, turn)

        async def run() -> T:
            return convert(await self.session.run(requests, after=self.await_turn(before)))

        return self._start(run(), turn)

    def submit_in_two_steps(
        self,
        count: int,
        run: Callable[[Turn, asyncio.Event | None, asyncio.Event], Coroutine[Any, Any, T]],
    ) -> OperationFuture[T]:
        """Reserves `count` places for `run(turn, before, sent)`, a coroutine function that sends its requests over
        time, after `before`, and sets `sent` when no more will come."""
        self.holder.check_open()
        sent = asyncio.Event()
        with self._lock:
            turn = self.session.reserve(count)
            before, self._latest = self._latest, sent
        future = self._start(run(turn, before, sent), turn)
        loop = background_loop().loop
        future.add_done_callback(
            lambda done: loop.call_soon_threadsafe(self._settle, done, turn, sent)
        )
        return future

    async def await_turn(self, before: asyncio.Event | None) -> None:
        """Raises RuntimeError if the call before has poisoned the client."""
        if before is None:
            return
        await before.wait()
        if self._poison is not None:
            raise RuntimeError(_POISONED) from self._poison

    def _settle(self, done: Future[Any], turn: Turn, sent: asyncio.Event) -> None:
        """On the background loop, when a call of two steps has ended."""
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is not None:
            self._poison = self._poison or error
            self.session.give_up(turn.sequences, cause=f"a custom loss failed: {error!r}")
        sent.set()

    def _start(self, coroutine: Coroutine[Any, Any, T], turn: Turn) -> OperationFuture[T]:
        session, last = self.session, turn.sequences[-1]
        return self.holder.start_operation(
            coroutine, lambda: session.failure_delivered(last), lambda: show_new(session.warnings)
        )
