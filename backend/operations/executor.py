"""Runs the operations of one model resource, each session's in sequence order.

The event loop decides, the trainer's thread computes. Passes and optimiser steps take turns, chosen by the
scheduler, which lets those of several sessions take one together; publishing, saving and loading need the trainer
only to copy tensors, and read and write files while others train. This is the border where exceptions become failed
operations.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

from backend.operations import effects
from backend.operations.registry import OperationRegistry
from backend.operations.scheduler import Kind, Scheduler
from backend.operations.session import Operation, Session
from backend.operations.work import OptimStepWork, PassWork
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.v1 import operations_pb2 as pb

log = logging.getLogger(__name__)

# Of everything that is not a pass.
_SHORT_COST_TOKENS = 64

# How an operation ended: a message that has only its result set, or why it failed.
Outcome = pb.Operation | PostTrainingError


class Actions(Protocol):
    """What operations do. Raises PostTrainingError for what a caller did."""

    async def run(self, operation: Operation) -> pb.Operation:
        """Carries out the work of an operation that is no pass."""
        ...

    async def run_passes(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Carries out passes of different sessions, all with gradients or all without; each fails by itself."""
        ...

    async def clear_gradients(self, session: str) -> None: ...


class Executor:
    """Owned by the event loop.

    What goes wrong in `actions` fails the operation. What goes wrong here is a fault of this server's own: it then
    runs nothing any more, fails what waits and what comes, and calls `on_death`.

    merge_tokens: passes of several sessions run together as long as they have at most so many tokens; 0: never.
    """

    def __init__(
        self,
        actions: Actions,
        registry: OperationRegistry,
        on_death: Callable[[], None],
        *,
        merge_tokens: int = 0,
    ) -> None:
        self._actions = actions
        self._registry = registry
        self._on_death = on_death
        self._scheduler: Scheduler[Operation] = Scheduler(merge_tokens=merge_tokens)
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
        self._scheduler.add(
            operation.session.id, operation, _cost(operation), _scheduled_as(operation)
        )
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
            batch = self._scheduler.next_batch()
            if batch:
                await self._take_turn(batch)
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _take_turn(self, batch: Sequence[Operation]) -> None:
        """The next one begins when the trainer is done, while this one's results are written down."""
        passes = [one for one in batch if one.refusal is None and isinstance(one.work, PassWork)]
        if passes:
            await self._guarded(self._run_passes(passes), *passes)
        # Each step's result is announced while others still run.
        await asyncio.gather(*(self._start(one) for one in batch if one not in passes))

    async def _start(self, operation: Operation) -> None:
        if operation.refusal is not None:
            effects.refused(operation, operation.refusal)
            self._release(operation)
        elif isinstance(operation.work, OptimStepWork):
            await self._guarded(self._run_step(operation), operation)
        else:
            self._spawn(self._run_aside(operation), operation)

    async def _run_passes(self, passes: Sequence[Operation]) -> None:
        for operation in passes:
            self._registry.started(operation)
        outcomes = await self._attempt_passes(passes)
        for operation in passes:
            self._release(operation)
        for operation, outcome in zip(passes, outcomes, strict=True):
            self._spawn(self._finish(operation, outcome), operation)

    async def _run_step(self, step: Operation) -> None:
        self._registry.started(step)
        outcome = await self._attempt(step)
        self._release(step)
        self._spawn(self._finish(step, outcome), step)

    async def _run_aside(self, operation: Operation) -> None:
        self._registry.started(operation)
        outcome = await self._attempt(operation)
        await self._finish(operation, outcome)
        self._release(operation)

    async def _attempt(self, operation: Operation) -> Outcome:
        void = await self._entered(operation)
        if void is not None:
            return void
        try:
            outcome = await self._actions.run(operation)
        except Exception as error:
            outcome = _as_failure(operation, error)
        _took_effect(operation, outcome)
        return outcome

    async def _attempt_passes(self, passes: Sequence[Operation]) -> list[Outcome]:
        """In order; those that must not run are left out of the others' call."""
        voids = [await self._entered(operation) for operation in passes]
        to_run = [one for one, void in zip(passes, voids, strict=True) if void is None]
        outcomes = iter(await self._call_passes(to_run))
        return [next(outcomes) if void is None else void for void in voids]

    async def _call_passes(self, passes: Sequence[Operation]) -> list[Outcome]:
        if not passes:
            return []
        log.debug("running together: %s", [operation.header.name for operation in passes])
        try:
            outcomes = await self._actions.run_passes(passes)
        except Exception as error:
            outcomes: list[Outcome] = [_as_failure(operation, error) for operation in passes]
        for operation, outcome in zip(passes, outcomes, strict=True):
            _took_effect(operation, outcome)
        return outcomes

    async def _entered(self, operation: Operation) -> PostTrainingError | None:
        """Why the operation must not run, if it must not."""
        entry = effects.entered(operation)
        if entry.drop_gradients:
            try:
                await self._actions.clear_gradients(operation.session.id)
            except Exception as error:
                failure = _as_failure(operation, error)
                effects.failed(operation, failure)
                return failure
        return entry.void

    async def _finish(self, operation: Operation, outcome: Outcome) -> None:
        if isinstance(outcome, PostTrainingError):
            log.info("%s failed: %s", operation.header.name, outcome.reason)
            await self._registry.fail(operation, outcome)
            return
        version = effects.new_policy_version(outcome)
        await self._registry.succeed(operation, outcome, version)

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

    def _release(self, operation: Operation) -> None:
        self._scheduler.release(operation.session.id)
        self._wake.set()

    def _spawn(self, work: Coroutine, *operations: Operation) -> None:
        task = asyncio.create_task(self._guarded(work, *operations))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine, *operations: Operation) -> None:
        """`operations`: those that nobody ends if the work fails."""
        try:
            await work
        except Exception as error:
            log.critical("no operation of this model runs any more", exc_info=error)
            self._die(_died(error), operations)

    def _die(self, death: PostTrainingError, operations: Sequence[Operation]) -> None:
        self._death = death
        self._wake.set()
        waiting = [one for one in self._scheduler.drop_all() if one.refusal is None]
        for one in (*operations, *waiting):
            self._spawn(self._end(one, death, pb.OPERATION_STATE_FAILED))
        self._on_death()


def stopped(session: str) -> PostTrainingError:
    return fail(
        Reason.SESSION_STOPPED,
        f"Session {session!r} was stopped before this operation started. Make a new one, from a checkpoint if you "
        "saved one.",
        session=session,
    )


def _cost(operation: Operation) -> int:
    """In tokens."""
    if operation.refusal is None and isinstance(operation.work, PassWork):
        return operation.work.num_tokens
    return _SHORT_COST_TOKENS


def _scheduled_as(operation: Operation) -> Kind:
    if operation.refusal is None and isinstance(operation.work, PassWork):
        return Kind.BACKWARD if operation.work.work.backward else Kind.FORWARD
    return Kind.SHORT


def _took_effect(operation: Operation, outcome: Outcome) -> None:
    if isinstance(outcome, PostTrainingError):
        effects.failed(operation, outcome)
    else:
        effects.succeeded(operation, outcome)


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
