"""One event loop for all I/O of this process, in a daemon thread.

gRPC's asyncio channels belong to the loop they were made on. With a loop of our own, a client works from plain
scripts, from any thread, inside any number of other loops and in notebooks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import warnings
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from together_post_training import FORK_STALLS_PARENT

logger = logging.getLogger(__name__)
T = TypeVar("T")


class BackgroundLoop:
    """An asyncio loop that runs in a daemon thread until the process ends."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(ignore_spurious_wakeups)
        # The loop itself holds tasks weakly.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(
            target=self._run, name="together-post-training", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        """SystemExit and KeyboardInterrupt leave a loop. Here they belong to the call that raised them, whose future
        has them, and the others go on."""
        while True:
            try:
                self.loop.run_forever()
            except (KeyboardInterrupt, SystemExit) as error:
                logger.debug("on the background loop: %r", error)
            else:
                return

    def is_current(self) -> bool:
        """Whether the caller is on this loop, where waiting for it would never end."""
        return threading.get_ident() == self._thread.ident

    def create_task(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs it whether or not the task is kept. To be called on the loop."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def start(
        self, coroutine: Coroutine[Any, Any, T], future: Future[T] | None = None
    ) -> Future[T]:
        """Runs the coroutine and completes `future` (a fresh one by default) with its outcome.

        Coroutines start in the order of these calls. Cancelling the future cancels the coroutine; dropping it
        does not.
        """
        outcome: Future[T] = Future() if future is None else future

        def begin() -> None:
            task = self.create_task(coroutine)
            outcome.add_done_callback(
                lambda done: done.cancelled() and self.loop.call_soon_threadsafe(task.cancel)
            )
            task.add_done_callback(lambda task: _copy_outcome(task, outcome))

        self.loop.call_soon_threadsafe(begin)
        return outcome


def ignore_spurious_wakeups(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An exception handler for loops that use gRPC.

    Where several loops of a process do, gRPC wakes all of them for each event, and those that find nothing fail in
    `PollerCompletionQueue._handle_events`, to no harm. Can go when https://github.com/grpc/grpc/issues/25364 is fixed.
    """
    is_spurious = isinstance(context.get("exception"), BlockingIOError)
    if not (is_spurious and "PollerCompletionQueue" in repr(context.get("handle"))):
        loop.default_exception_handler(context)


def _copy_outcome(task: asyncio.Task[T], future: Future[T]) -> None:
    if task.cancelled():
        future.cancel()
    error = None if task.cancelled() else task.exception()
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


class _Process:
    """What this process has: its loop, and whether gRPC was in use when it was forked off."""

    def __init__(self, *, forked_from_client: bool = False) -> None:
        self.forked_from_client = forked_from_client
        self.lock = threading.Lock()
        self.loop: BackgroundLoop | None = None


_process = _Process()


def background_loop() -> BackgroundLoop:
    """This process's loop, started on first use.

    Raises:
        RuntimeError: in a process that was forked from one that had used it. gRPC does not survive a fork.
    """
    process = _process
    if process.forked_from_client:
        raise RuntimeError(
            "This process was forked from one that was already connected to the service, and gRPC connections do "
            "not survive a fork. Start workers with the 'spawn' or 'forkserver' method "
            "(multiprocessing.get_context('spawn')), or fork them before the client is first used."
        )
    with process.lock:
        if process.loop is None:
            process.loop = BackgroundLoop()
        return process.loop


def on_background_loop() -> bool:
    """Whether the caller is on it. Starts none, and may be asked in any process."""
    loop = _process.loop
    return loop is not None and loop.is_current()


def _warn_before_fork() -> None:
    if FORK_STALLS_PARENT and _process.loop is not None:
        warnings.warn(
            "Forking while connected to the service, with gRPC's fork handlers on: this process's calls may stall "
            "from now on. Import the client before grpc, or set GRPC_ENABLE_FORK_SUPPORT=false.",
            RuntimeWarning,
            stacklevel=2,
        )


def _after_fork_in_child() -> None:
    global _process
    _process = _Process(forked_from_client=_process.forked_from_client or _process.loop is not None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_warn_before_fork, after_in_child=_after_fork_in_child)
