"""Takes submissions in: in any order, any number of times, kept before they are acknowledged.

The event loop owns it. Large requests are digested and decoded in worker threads.

Two submissions are the same when all their fields are, `failures_seen_through` included: it is part of what an
operation may do, and a retry sends it again. Their bytes may differ, because a map's entries have no order.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from backend.operations.executor import Executor, stopped
from backend.operations.journal import Journal
from backend.operations.registry import OperationRegistry, mark_failed
from backend.operations.sequencer import check_same
from backend.operations.session import Operation, Session, new_header
from backend.operations.work import Work
from together_post_training.errors import PostTrainingError
from together_post_training.v1 import operations_pb2 as pb

T = TypeVar("T")

# Below this a thread costs more than it saves.
_OFF_LOOP_BYTES = 32 * 1024
_SAMPLES_IN_A_PIECE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A request, decoded for the engine; `refusal`: why it cannot be."""

    digest: bytes
    work: Work | None
    refusal: PostTrainingError | None


class Intake:
    """`clock`: seconds since 1970."""

    def __init__(
        self, registry: OperationRegistry, journal: Journal, clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self._journal = journal
        self._clock = clock
        self._tasks: set[asyncio.Task] = set()
        self._closed: PostTrainingError | None = None

    def close(self, error: PostTrainingError) -> None:
        """Refuses submissions from now on."""
        self._closed = error

    async def submit(
        self,
        session: Session,
        executor: Executor,
        kind: pb.OperationKind,
        request: Message,
        body: bytes,
        decode: Callable[[], Work],
    ) -> pb.Operation:
        """The operation that the request's number names, once it is in the journal.

        Args:
            body: the request as it arrived, for the journal.
        """
        if self._closed is not None:
            raise self._closed
        prepared = await _maybe_off_loop(body, lambda: _prepare(request, decode))
        _, sequence = _key(request)
        if not session.is_running and not session.sequencer.is_used(sequence):
            raise stopped(session.id)
        if not session.sequencer.claim(sequence, prepared.digest):
            return await self._registry.get((session.id, sequence))
        operation = Operation(
            session=session,
            sequence=sequence,
            header=new_header(session.id, sequence, kind, self._clock()),
            digest=prepared.digest,
            work=prepared.work,
            num_chunks=_optional(request, "num_chunks", 1),
            seen_through=_optional(request, "failures_seen_through", 0),
        )
        if prepared.refusal is not None:
            self._refuse(operation, prepared.refusal, pb.OPERATION_STATE_FAILED)
        self._expect(operation)
        kept = body if prepared.refusal is None else b""
        return await self._shielded(self._accept(operation, executor, kept))

    async def recall(self, request: Message, body: bytes) -> pb.Operation | None:
        """The answer to a submission that was accepted before its session ended; None: it was not.

        Raises:
            PostTrainingError: SEQUENCE_REUSED.
        """
        session, sequence = _key(request)
        entry = await self._journal.get_operation(session, sequence)
        if entry is None:
            return None
        digest = await _maybe_off_loop(body, lambda: _digest(request))
        check_same(sequence, entry.digest or None, digest)
        return entry.operation

    async def use_up(
        self,
        session: Session,
        executor: Executor,
        sequence: int,
        error: PostTrainingError,
        state: pb.OperationState,
    ) -> pb.Operation:
        """Ends a number that was never submitted; one that was by now stays as it is."""
        if not session.sequencer.claim(sequence, None):
            return await self._registry.get((session.id, sequence))
        operation = Operation(
            session=session,
            sequence=sequence,
            header=new_header(session.id, sequence, pb.OPERATION_KIND_UNSPECIFIED, self._clock()),
            digest=b"",
            num_chunks=None,
            seen_through=0,
        )
        self._refuse(operation, error, state)
        self._expect(operation)
        return await self._shielded(self._accept(operation, executor, b""))

    async def _accept(self, operation: Operation, executor: Executor, body: bytes) -> pb.Operation:
        session = operation.session
        try:
            await self._registry.accept(operation, body)
        except BaseException as error:
            self._forget(operation, error)
            raise
        shown = pb.Operation()
        for sequence in session.sequencer.commit(operation.sequence):
            executor.add(session.held.pop(sequence))
        shown.CopyFrom(operation.header)
        return shown

    def _refuse(
        self, operation: Operation, error: PostTrainingError, state: pb.OperationState
    ) -> None:
        operation.refusal = error
        mark_failed(operation.header, error, state, self._clock())

    def _expect(self, operation: Operation) -> None:
        operation.session.held[operation.sequence] = operation
        self._registry.expect(operation)

    def _forget(self, operation: Operation, error: BaseException) -> None:
        del operation.session.held[operation.sequence]
        operation.session.sequencer.abandon(operation.sequence)
        self._registry.forget(operation, error)

    async def _shielded(self, work: Awaitable[T]) -> T:
        """A caller that hangs up does not take the submission back."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)


def _key(request: Message) -> tuple[str, int]:
    """Every request of TrainerService has these two fields."""
    return request.session, request.sequence  # pyright: ignore[reportAttributeAccessIssue]


def _prepare(request: Message, decode: Callable[[], Work]) -> _Prepared:
    digest = _digest(request)
    try:
        return _Prepared(digest=digest, work=decode(), refusal=None)
    except PostTrainingError as error:
        return _Prepared(digest=digest, work=None, refusal=error)


def _digest(request: Message) -> bytes:
    """The same for the same fields of the same kind of request."""
    digest = hashlib.sha256(request.DESCRIPTOR.full_name.encode())
    for piece in _canonical(request):
        digest.update(piece)
    return digest.digest()


def _canonical(request: Message) -> Iterator[bytes]:
    """Pieces that joined are one of the encodings of the request, always the same one.

    In one piece, a request of some megabytes takes several times as long: its memory has to be mapped afresh.
    """
    kind = type(request)
    fields = {field.name: value for field, value in request.ListFields()}
    for name in ("samples", "gradients"):
        values = fields.pop(name, ())
        for start in range(0, len(values), _SAMPLES_IN_A_PIECE):
            part = kind(**{name: values[start : start + _SAMPLES_IN_A_PIECE]})
            yield part.SerializeToString(deterministic=True)
    yield kind(**fields).SerializeToString(deterministic=True)


def _optional(request: Message, field: str, default: int) -> int:
    if field not in request.DESCRIPTOR.fields_by_name or not request.HasField(field):
        return default
    return getattr(request, field)


async def _maybe_off_loop(body: bytes, function: Callable[[], T]) -> T:
    """`function` works on a request of these bytes."""
    return await asyncio.to_thread(function) if len(body) > _OFF_LOOP_BYTES else function()
