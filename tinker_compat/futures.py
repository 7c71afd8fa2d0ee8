"""The futures that calls return: Tinker's APIFuture and concurrent.futures.Future in one.

    f.result()                   blocks; again and again
    f.result(timeout)            TimeoutError when late; the operation goes on
    await f                      any number of times, on any loop
    await f.result_async(t)      TimeoutError when late; the operation is cancelled, as by asyncio.wait_for
    f.coroutine()                for asyncio.create_task
    concurrent.futures.wait, as_completed, asyncio.wrap_future, f.add_done_callback, ...    work as well

The operation runs whether or not its future is kept.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

import tinker

from tinker_compat.errors import to_connection_error, to_tinker
from together_post_training.client.loop import background_loop
from together_post_training.errors import ConnectionLostError, PostTrainingError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class OperationFuture(Future[T], tinker.APIFuture[T]):
    """The outcome of a call.

    Args:
        on_failure: called each time the failure is handed to the caller by `result()` or `await`. Looking at
            `exception()` does not count: asyncio's own bridges do that before the caller sees anything.
        on_result: called each time the result is handed to the caller.
    """

    def __init__(
        self,
        on_failure: Callable[[], None] | None = None,
        on_result: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._on_failure = on_failure
        self._on_result = on_result
        self._is_awaited = False

    def result(self, timeout: float | None = None) -> T:
        check_blocking(self, f"{type(self).__name__}.result()")
        try:
            value = super().result(timeout)
        except BaseException:
            self._note_failure()
            raise
        # Of a future that is awaited, asyncio's bridge takes the result before the caller has it.
        if not self._is_awaited:
            self._note_result()
        return value

    async def result_async(self, timeout: float | None = None) -> T:
        self._is_awaited = True
        try:
            async with asyncio.timeout(timeout):
                value = await asyncio.wrap_future(self)
        except BaseException:
            self._note_failure()
            raise
        self._note_result()
        return value

    def future(self) -> Future[T]:
        return self

    async def coroutine(self) -> T:
        return await self.result_async()

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def _note_failure(self) -> None:
        """A timeout of `result` is no failure of the operation."""
        if self.done() and self._on_failure is not None:
            self._on_failure()

    def _note_result(self) -> None:
        if self._on_result is not None:
            self._on_result()


def start(
    coroutine: Coroutine[Any, Any, T],
    on_failure: Callable[[], None] | None = None,
    on_result: Callable[[], None] | None = None,
) -> OperationFuture[T]:
    """Runs it on the background loop; what it raises is raised as Tinker's exceptions."""
    future: OperationFuture[T] = OperationFuture(on_failure, on_result)
    try:
        loop = background_loop()
    except RuntimeError:
        coroutine.close()
        raise
    loop.start(_translated(coroutine), future)
    return future


def completed(value: T) -> OperationFuture[T]:
    future: OperationFuture[T] = OperationFuture()
    future.set_result(value)
    return future


def check_blocking(future: Future[Any], what: str) -> None:
    """Waiting inside a running loop is allowed, with a warning; on the background loop it would never end."""
    if future.done() or not _in_running_loop():
        return
    advice = (
        f"{what} called inside a running event loop, which it blocks. Await the future instead."
    )
    if background_loop().is_current():
        raise RuntimeError(
            f"{advice} This is the client's own loop, where it would wait for itself forever."
        )
    if not _in_notebook():
        logger.warning("%s\n%s", advice, "".join(traceback.format_stack(limit=12)))


async def _translated(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        return await coroutine
    except PostTrainingError as error:
        raise to_tinker(error) from error
    except ConnectionLostError as error:
        raise to_connection_error(error) from error


def _in_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _in_notebook() -> bool:
    """In a notebook a loop always runs, and blocking it is how cells work."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ in ("ZMQInteractiveShell", "Shell")
