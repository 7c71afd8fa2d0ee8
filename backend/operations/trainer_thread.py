"""The one thread that owns a trainer. It never awaits; the event loop never blocks."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class TrainerThread:
    """Runs functions one after the other, in the order of their calls.

    The thread is a daemon, so that a long pass cannot keep a process alive that was told to end.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"trainer {name}", daemon=True)
        self._thread.start()

    def call(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """A future of the running loop. Cancelling it does not stop the function."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                value = function(*args, **kwargs)
            except BaseException as error:
                _deliver(loop, future, future.set_exception, _catchable(error))
            else:
                _deliver(loop, future, future.set_result, value)

        self._jobs.put(job)
        return future

    def close(self) -> None:
        """The thread ends after the jobs that wait."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _deliver(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future, settle: Callable, value: object
) -> None:
    def deliver() -> None:
        if not future.done():
            settle(value)

    # RuntimeError: the loop was closed, so nobody waits any more.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(deliver)


def _catchable(error: BaseException) -> Exception:
    """A future refuses StopIteration, and an engine's SystemExit must not end the loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"the engine raised {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
