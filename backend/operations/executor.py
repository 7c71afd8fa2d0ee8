"""Runs the operations of one model resource, each session's in sequence order.

The event loop decides, the trainer's thread computes. Passes and optimiser steps take turns, chosen by the
scheduler; publishing, saving and loading need the trainer only to copy tensors, and read and write files while
others train. This is the border where exceptions become failed operations.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Protocol

from backend.operations.registry import OperationRegistry
from backend.operations.scheduler import Scheduler
from backend.operations.session import Operation, Session
from backend.operations.window import Failure
from backend.operations.work import OptimStepWork, PassWork
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.v1 import operations_pb2 as pb

log = logging.getLogger(__name__)

# What changes weights or gradients: when one of these fails, what was sent along behind it does not run.
_VOIDING = frozenset(
    {
        pb.OPERATION_KIND_UNSPECIFIED,
        pb.OPERATION_KIND_FORWARD_BACKWARD,
        pb.OPERATION_KIND_CUSTOM_FORWARD_BACKWARD,
        pb.OPERATION_KIND_OPTIM_STEP,
        pb.OPERATION_KIND_LOAD_CHECKPOINT,
    }
)
_GRADIENT = frozenset(
    {
        pb.OPERATION_KIND_FORWARD_BACKWARD,
        pb.OPERATION_KIND_CUSTOM_FORWARD_BACKWARD,
        pb.OPERATION_KIND_OPTIM_STEP,
    }
)


# Of everything that is not a pass.
_SMALL_COST_TOKENS = 64


class Actions(Protocol):
    """What operations do. Raises PostTrainingError for what a caller did."""

    async def run(self, operation: Operation) -> pb.Operation:
        """Carries out the operation's work. Answers with a message that has only its result set."""
        ...

    async def clear_gradients(self, session: str) -> None: ...


class Executor:
    """Owned by the event loop.

    What goes wrong in `actions` fails the operation. What goes wrong here is a fault of this server's own: it then
    runs nothing any more, fails what waits and what comes, and calls `on_death`.
    """

    def __init__(
        self, actions: Actions, registry: OperationRegistry, on_death: Callable[[], None]
    ) -> None:
        self._actions = actions
        self._registry = registry
        self._on_death = on_death
        self._scheduler: Scheduler[Operation] = Scheduler()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()
        self._loop_task: asyncio.Task | None = None
        self._is_draining = False
        self._death: PostTrainingError | None = None

    def start(self) -> None:
        self._loop_task = asyncio.create_task(self._guarded(self._run()), name="executor")

    def add(self, operation: Operation) -> None:
        """Called in sequence order; also with operations that will not run, which count in their place."""
        if operation.refusal is None:
            if self._death is not None:
                self._spawn(self._end(operation, self._death, pb.OPERATION_STATE_FAILED))
                return
            if not operation.session.is_running:
                self._spawn(self._cancel(operation, stopped(operation.session.id)))
                return
            operation.header.state = pb.OPERATION_STATE_QUEUED
        self._scheduler.add(operation.session.id, operation, _cost(operation))
        self._wake.set()

    async def cancel(self, operation: Operation, error: PostTrainingError) -> None:
        """Ends an operation that has not started; leaves others as they are."""
        if not operation.is_started and operation.refusal is None:
            await self._cancel(operation, error)

    async def stop_session(self, session: Session) -> None:
        """Cancels what has not started, and returns when what runs has ended."""
        waiting = [*self._scheduler.drop(session.id), *session.held.values()]
        error = stopped(session.id)
        await asyncio.gather(*(self.cancel(operation, error) for operation in waiting))
        await session.wait_until_none_live()

    async def drain(self, grace_s: float) -> bool:
        """Starts nothing any more. False: what was running still is after `grace_s`."""
        self._is_draining = True
        self._wake.set()
        deadline = asyncio.get_running_loop().time() + grace_s
        # The loop's last turn leaves a task that writes its result down.
        for wait_for in (lambda: [self._loop_task], lambda: list(self._tasks)):
            tasks = [task for task in wait_for() if task is not None]
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            if tasks and (await asyncio.wait(tasks, timeout=left))[1]:
                return False
        return True

    async def _run(self) -> None:
        while not self._is_draining and self._death is None:
            operation = self._scheduler.next()
            if operation is None:
                self._wake.clear()
                await self._wake.wait()
            elif operation.refusal is not None:
                self._count_refused(operation)
            elif isinstance(operation.work, PassWork | OptimStepWork):
                await self._guarded(self._take_turn(operation), operation)
            else:
                self._spawn(self._run_aside(operation), operation)

    def _count_refused(self, operation: Operation) -> None:
        assert operation.refusal is not None
        self._note_failure(operation, operation.refusal)
        self._release(operation.session)

    async def _take_turn(self, operation: Operation) -> None:
        """The next turn begins when the trainer is done, while this one's result is written down."""
        self._registry.started(operation)
        result = await self._attempt(operation)
        self._release(operation.session)
        self._spawn(self._finish(operation, result), operation)

    async def _run_aside(self, operation: Operation) -> None:
        self._registry.started(operation)
        result = await self._attempt(operation)
        await self._finish(operation, result)
        self._release(operation.session)

    async def _attempt(self, operation: Operation) -> pb.Operation | PostTrainingError:
        try:
            if operation.kind in _GRADIENT:
                void = await self._enter_window(operation)
                if void is not None:
                    return void
            result = await self._actions.run(operation)
        except Exception as error:
            failure = _as_failure(operation, error)
            self._after_failure(operation, failure)
            return failure
        self._after_success(operation, result)
        return result

    async def _enter_window(self, operation: Operation) -> PostTrainingError | None:
        """Why the operation must not run, if it must not."""
        session = operation.session
        entry = session.window.enter(operation.seen_through)
        if entry.drop_gradients:
            await self._actions.clear_gradients(session.id)
        if entry.void is not None and operation.kind == pb.OPERATION_KIND_OPTIM_STEP:
            session.window.close(drop_gradients=True)
        return entry.void

    def _after_success(self, operation: Operation, result: pb.Operation) -> None:
        session = operation.session
        version = _new_policy_version(result)
        if version is not None:
            session.policy_version = version
            session.window.close()
        elif operation.kind in _GRADIENT:
            session.window.contributed(operation.num_chunks or 1)

    def _after_failure(self, operation: Operation, error: PostTrainingError) -> None:
        if operation.kind == pb.OPERATION_KIND_OPTIM_STEP:
            # It ran, so the window ends here; its gradient is not to be found in the next one.
            operation.session.window.close(drop_gradients=True)
            if error.reason != Reason.INTERNAL:
                return  # Nothing was changed.
        self._note_failure(operation, error)

    def _note_failure(self, operation: Operation, error: PostTrainingError) -> None:
        if operation.kind in _VOIDING:
            failure = Failure(
                sequence=operation.sequence,
                what=operation.what,
                error=error,
                num_chunks=operation.num_chunks,
                is_partial=operation.is_started and error.reason == Reason.INTERNAL,
            )
            operation.session.window.failed(failure, operation.seen_through)

    async def _finish(self, operation: Operation, result: pb.Operation | PostTrainingError) -> None:
        if isinstance(result, PostTrainingError):
            log.info("%s failed: %s", operation.header.name, result.reason)
            await self._registry.fail(operation, result)
            return
        await self._registry.succeed(operation, result, _new_policy_version(result))

    async def _cancel(self, operation: Operation, error: PostTrainingError) -> None:
        await self._end(operation, error, pb.OPERATION_STATE_CANCELLED)

    async def _end(
        self, operation: Operation, error: PostTrainingError, state: pb.OperationState
    ) -> None:
        """Ends one that will not run, or whose own end was not written down."""
        operation.refusal = error
        await asyncio.wait([operation.accepted])
        if self._registry.live(operation.key) is operation:
            await self._registry.fail(operation, error, state)

    def _release(self, session: Session) -> None:
        self._scheduler.release(session.id)
        self._wake.set()

    def _spawn(self, work: Coroutine, operation: Operation | None = None) -> None:
        task = asyncio.create_task(self._guarded(work, operation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine, operation: Operation | None = None) -> None:
        """`operation`: the one that nobody ends if the work fails."""
        try:
            await work
        except Exception as error:
            log.critical("no operation of this model runs any more", exc_info=error)
            self._die(_died(error), operation)

    def _die(self, death: PostTrainingError, operation: Operation | None) -> None:
        self._death = death
        self._wake.set()
        waiting = [one for one in self._scheduler.drop_all() if one.refusal is None]
        for one in waiting if operation is None else (operation, *waiting):
            self._spawn(self._end(one, death, pb.OPERATION_STATE_FAILED))
        self._on_death()


def stopped(session: str) -> PostTrainingError:
    return fail(
        Reason.SESSION_STOPPED,
        f"Session {session!r} was stopped before this operation started. Make a new one, from a checkpoint if you "
        "saved one.",
        session=session,
    )


def _new_policy_version(result: pb.Operation) -> int | None:
    """None: the operation leaves it as it is."""
    if result.HasField("optim_step"):
        return result.optim_step.policy_version
    if result.HasField("load_checkpoint"):
        return result.load_checkpoint.policy_version
    return None


def _cost(operation: Operation) -> int:
    """In tokens."""
    if operation.refusal is None and isinstance(operation.work, PassWork):
        return operation.work.num_tokens
    return _SMALL_COST_TOKENS


def _died(error: Exception) -> PostTrainingError:
    return fail(
        Reason.INTERNAL,
        f"The server cannot run operations on this model any more ({type(error).__name__}); its log has the details. "
        "Restart it, and start a new session from a checkpoint.",
    )


def _as_failure(operation: Operation, error: Exception) -> PostTrainingError:
    if isinstance(error, PostTrainingError):
        return error
    log.error("%s failed inside the server", operation.header.name, exc_info=error)
    return fail(
        Reason.INTERNAL,
        f"The server failed at this operation ({type(error).__name__}). The server's log has the details under "
        f"{operation.header.name}.",
        operation=operation.header.name,
    )
