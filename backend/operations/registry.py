"""Operations by name: those in memory, those that just ended, and those in the journal.

The event loop owns it. Whatever it says about an operation is in the journal already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from backend.operations.ended import error_message, is_ended, timestamp, without_result
from backend.operations.journal import Journal, OperationEntry
from backend.operations.recent import Recent
from backend.operations.session import Operation
from backend.operations.waiters import Key, Waiters
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.names import operation_name
from together_post_training.v1 import operations_pb2 as pb

log = logging.getLogger(__name__)


class OperationRegistry:
    """`clock`: seconds since 1970."""

    def __init__(self, journal: Journal, clock: Callable[[], float]) -> None:
        self._journal = journal
        self._clock = clock
        self._live: dict[Key, Operation] = {}
        self._recent = Recent()
        self.waiters = Waiters()

    def live(self, key: Key) -> Operation | None:
        """An operation that has not ended, or whose end is being written down."""
        return self._live.get(key)

    def expect(self, operation: Operation) -> None:
        """A submission is being decoded and written down: `accept` or `forget` follows."""
        self._live[operation.key] = operation
        operation.session.operation_expected()

    async def accept(self, operation: Operation, request: bytes) -> None:
        """Writes the submission down."""
        entry = OperationEntry(operation=operation.header, digest=operation.digest)
        await self._journal.add_operation(*operation.key, entry, request)
        operation.accepted.set_result(None)
        if is_ended(operation.header):
            self._announce(operation, operation.header)

    def forget(self, operation: Operation, error: BaseException) -> None:
        """It could not be accepted: it was never here. Whoever waits for it gets the error."""
        del self._live[operation.key]
        operation.session.operation_gone()
        operation.accepted.set_exception(error)
        operation.accepted.exception()  # Retrieved: nobody need be waiting.

    def started(self, operation: Operation) -> None:
        operation.is_started = True
        operation.header.state = pb.OPERATION_STATE_RUNNING
        operation.header.start_time.CopyFrom(timestamp(self._clock()))

    async def succeed(
        self, operation: Operation, result: pb.Operation, policy_version: int | None = None
    ) -> None:
        """`result`: a message with nothing but its result set; it becomes the operation's."""
        header = operation.header
        result.name, result.kind = header.name, header.kind
        result.state = pb.OPERATION_STATE_SUCCEEDED
        result.create_time.CopyFrom(header.create_time)
        result.start_time.CopyFrom(header.start_time)
        result.end_time.CopyFrom(timestamp(self._clock()))
        try:
            await self._journal.finish_operation(*operation.key, result, policy_version)
        except Exception as error:
            log.exception("%s ran, but its result could not be stored", header.name)
            await self.fail(operation, _not_stored(error))
            return
        self._announce(operation, result)

    async def fail(
        self,
        operation: Operation,
        error: PostTrainingError,
        state: pb.OperationState = pb.OPERATION_STATE_FAILED,
    ) -> None:
        ended = without_result(operation.header)
        mark_failed(ended, error, state, self._clock())
        try:
            await self._journal.finish_operation(*operation.key, ended, None)
        except Exception:
            # The caller must not wait for ever. After a restart the operation reads as lost.
            log.exception("the end of %s could not be stored", ended.name)
        self._announce(operation, ended)

    async def get(self, key: Key) -> pb.Operation:
        """As it is now. Raises OPERATION_NOT_FOUND."""
        found = await self.find(key)
        if found is None:
            raise fail(
                Reason.OPERATION_NOT_FOUND,
                f"Unknown operation {operation_name(*key)!r}: nothing was submitted with that number.",
                operation=operation_name(*key),
            )
        return found

    async def find(self, key: Key) -> pb.Operation | None:
        operation = self._live.get(key)
        if operation is not None:
            await asyncio.shield(operation.accepted)
            operation = self._live.get(key)
        if operation is not None:
            return without_result(operation.header)
        recent = self._recent.get(key)
        if recent is not None:
            return recent
        entry = await self._journal.get_operation(*key)
        return None if entry is None else entry.operation

    async def wait(self, key: Key, timeout_s: float) -> pb.Operation:
        """The ended operation, or after `timeout_s` the operation as it is then."""
        with self.waiters.waiting(key) as ended:
            found = await self.find(key)
            if found is not None and is_ended(found):
                return found
            await asyncio.wait([ended], timeout=timeout_s)
            if ended.done():
                return ended.result()
        return await self.find(key) or pb.Operation(name=operation_name(*key))

    async def list(self, session: str, before: int, count: int) -> Sequence[pb.Operation]:
        """Newest first, without results."""
        kept = await self._journal.list_operations(session, before, count)
        live = (self._live.get((session, _sequence(operation))) for operation in kept)
        return [
            operation if now is None else without_result(now.header)
            for operation, now in zip(kept, live, strict=True)
        ]

    def _announce(self, operation: Operation, ended: pb.Operation) -> None:
        self._live.pop(operation.key, None)
        self._recent.put(operation.key, ended)
        operation.session.operation_ended(operation.sequence)
        self.waiters.announce(operation.key, ended)


def mark_failed(
    operation: pb.Operation,
    error: PostTrainingError,
    state: pb.OperationState,
    time_s: float,
) -> None:
    operation.state = state
    operation.error.CopyFrom(error_message(error))
    operation.end_time.CopyFrom(timestamp(time_s))


def _sequence(operation: pb.Operation) -> int:
    return int(operation.name.rpartition("/")[2])


def _not_stored(error: Exception) -> PostTrainingError:
    return fail(
        Reason.RESOURCE_EXHAUSTED,
        f"The operation ran, but the server could not store its result ({error}).",
    )
