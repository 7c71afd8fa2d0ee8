"""A training session as its client sees it: numbered requests in, finished operations out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass

from together_post_training.client.channel import Connection
from together_post_training.client.loop import background_loop
from together_post_training.client.numbering import first_samples, renumbered, renumbered_error
from together_post_training.client.server_warnings import ServerWarnings
from together_post_training.client.status import operation_error
from together_post_training.errors import ConnectionLostError, PostTrainingError, Reason
from together_post_training.names import operation_name
from together_post_training.v1 import operations_pb2 as ops
from together_post_training.v1 import sessions_pb2, trainer_pb2

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 10.0
_WAIT_S = 30.0
# Beyond this the answer to a wait is lost, not late.
_WAIT_SLACK_S = 15.0
# How many submissions of a session may be on the wire; the rest queue in the client, lowest number first.
_MAX_SUBMITTING = 16

TrainerRequest = (
    trainer_pb2.ForwardRequest
    | trainer_pb2.ForwardBackwardRequest
    | trainer_pb2.CustomForwardBackwardRequest
    | trainer_pb2.OptimStepRequest
    | trainer_pb2.WeightsSyncRequest
    | trainer_pb2.SaveCheckpointRequest
    | trainer_pb2.LoadCheckpointRequest
)
_METHODS = {
    trainer_pb2.ForwardRequest: "trainer.Forward",
    trainer_pb2.ForwardBackwardRequest: "trainer.ForwardBackward",
    trainer_pb2.CustomForwardBackwardRequest: "trainer.CustomForwardBackward",
    trainer_pb2.OptimStepRequest: "trainer.OptimStep",
    trainer_pb2.WeightsSyncRequest: "trainer.WeightsSync",
    trainer_pb2.SaveCheckpointRequest: "trainer.SaveCheckpoint",
    trainer_pb2.LoadCheckpointRequest: "trainer.LoadCheckpoint",
}
# Requests that add to, or use, the gradient window tell which failures the caller knows of.
_OF_THE_WINDOW = (
    trainer_pb2.ForwardBackwardRequest,
    trainer_pb2.CustomForwardBackwardRequest,
    trainer_pb2.OptimStepRequest,
)
# What the server says where it could not do something now.
_MAY_PASS = (Reason.RESOURCE_EXHAUSTED, Reason.UNAVAILABLE, Reason.INTERNAL)
_ENDED = (
    ops.OPERATION_STATE_SUCCEEDED,
    ops.OPERATION_STATE_FAILED,
    ops.OPERATION_STATE_CANCELLED,
)


@dataclass(frozen=True, slots=True)
class Turn:
    """Consecutive sequence numbers, and the last failure that the caller knew of when it got them (0: none)."""

    sequences: range
    failures_seen: int

    def split(self, count: int) -> tuple[Turn, Turn]:
        """The first `count` numbers, and the rest."""
        first, rest = self.sequences[:count], self.sequences[count:]
        return Turn(first, self.failures_seen), Turn(rest, self.failures_seen)


async def create_session(
    connection: Connection, request: sessions_pb2.CreateSessionRequest
) -> TrainingSession:
    """Makes the session on the server, which may first have to load the model, and keeps it alive."""
    info = await connection.call("sessions.CreateSession", request)
    session = TrainingSession(connection, info)
    background_loop().create_task(_heartbeat(weakref.ref(session), connection, info.id))
    return session


class TrainingSession:
    """One session. `reserve`, `number`, `failure_delivered` and `warnings` may be used from any thread; coroutines run
    on the background loop.

    The order of operations is the order of `reserve` calls, whatever happens on the wire.

    warnings: what the server wants the caller to know of operations that have ended.
    """

    def __init__(self, connection: Connection, info: sessions_pb2.Session) -> None:
        self.connection = connection
        self.info = info
        self._lock = threading.Lock()
        self._next_sequence = 1
        self._failures_seen = 0
        self.warnings = ServerWarnings()
        self._submitting = asyncio.Semaphore(_MAX_SUBMITTING)
        # Numbers that the server may never have seen, because submitting them failed.
        self._unsettled: set[int] = set()

    @property
    def id(self) -> str:
        return self.info.id

    def reserve(self, count: int) -> Turn:
        """The next `count` sequence numbers. Each must be submitted or cancelled, or later ones wait for it."""
        with self._lock:
            start = self._next_sequence
            self._next_sequence += count
            return Turn(range(start, self._next_sequence), self._failures_seen)

    def number(self, requests: Sequence[TrainerRequest], turn: Turn) -> None:
        """Makes the requests this session's operations of these numbers."""
        for request, sequence in zip(requests, turn.sequences, strict=True):
            request.session = self.id
            request.sequence = sequence
            if turn.failures_seen and isinstance(request, _OF_THE_WINDOW):
                request.failures_seen_through = turn.failures_seen

    def failure_delivered(self, sequence: int) -> None:
        """Notes that the caller has seen the failure of this operation, and so knows of it in what it does next."""
        with self._lock:
            self._failures_seen = max(self._failures_seen, sequence)

    async def run(
        self, requests: Sequence[TrainerRequest], *, after: Awaitable[None] | None = None
    ) -> list[ops.Operation]:
        """Submits numbered requests, once `after` has come, and waits until all have ended.

        Cancelling it cancels those that have not started.

        Raises:
            PostTrainingError: the first failure, by sequence; its metadata names the operation. It, and warnings,
                name samples by their place among those of all `requests`.
            ConnectionLostError: the server could not be reached.
        """
        try:
            if after is not None:
                await after
            outcomes = await asyncio.gather(*map(self._run_one, requests), return_exceptions=True)
        except asyncio.CancelledError:
            sequences = [request.sequence for request in requests]
            self.give_up(sequences, cause="the caller cancelled it")
            raise
        operations: list[ops.Operation] = []
        failures: list[BaseException] = []
        for outcome, first in zip(outcomes, first_samples(requests), strict=True):
            if isinstance(outcome, BaseException):
                failures.append(renumbered_error(outcome, first))
            else:
                operations.append(outcome)
                self.warnings.note(renumbered(text, first) for text in outcome.warnings)
        if failures:
            raise failures[0]
        return operations

    async def cancel(self, sequences: Iterable[int], *, cause: str) -> None:
        """Uses up the numbers of operations that have not started, submitted or not."""
        for sequence in sequences:
            request = ops.CancelOperationRequest(
                name=operation_name(self.id, sequence), cause=cause
            )
            await self.connection.call("operations.CancelOperation", request)
            self._unsettled.discard(sequence)

    def give_up(self, sequences: Sequence[int], *, cause: str) -> None:
        """`cancel` in the background. Where the server is away, or full, the next submission tries again."""
        background_loop().create_task(self._give_up(sequences, cause))

    async def stop(self) -> None:
        """Ends the session on the server. What has not started is cancelled."""
        request = sessions_pb2.StopSessionRequest(id=self.id)
        await self.connection.call("sessions.StopSession", request)

    async def _run_one(self, request: TrainerRequest) -> ops.Operation:
        operation = await self._submit(request)
        while operation.state not in _ENDED:
            wait = ops.WaitOperationRequest(name=operation.name, timeout_s=_WAIT_S)
            operation = await self.connection.call(
                "operations.WaitOperation", wait, timeout_s=_WAIT_S + _WAIT_SLACK_S
            )
        if operation.state == ops.OPERATION_STATE_SUCCEEDED:
            return operation
        raise operation_error(operation.error, operation.name)

    async def _submit(self, request: TrainerRequest) -> ops.Operation:
        async with self._submitting:
            try:
                if self._unsettled:
                    await self.cancel(sorted(self._unsettled), cause="submitting it had failed")
                return await self.connection.call(_METHODS[type(request)], request)
            except ConnectionLostError:
                self._unsettled.add(request.sequence)
                raise
            except PostTrainingError as error:
                self.give_up([request.sequence], cause=error.message)
                raise

    async def _give_up(self, sequences: Sequence[int], cause: str) -> None:
        try:
            await self.cancel(sequences, cause=cause)
        except ConnectionLostError:
            self._unsettled.update(sequences)
        except PostTrainingError as error:
            if error.reason in _MAY_PASS:
                self._unsettled.update(sequences)
            logger.debug("cancelling operations %s of %s: %s", sequences, self.id, error)


async def _heartbeat(
    session: weakref.ref[TrainingSession], connection: Connection, session_id: str
) -> None:
    """Says that the client is alive until the session object is gone, or the server says that the session is."""
    request = sessions_pb2.HeartbeatSessionRequest(id=session_id)
    while True:
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
        if session() is None or connection.is_closed:
            return
        with contextlib.suppress(ConnectionLostError):
            try:
                await connection.call("sessions.HeartbeatSession", request)
            except PostTrainingError as error:
                if error.reason is Reason.UNAVAILABLE:
                    continue
                logger.debug("session %s: no more heartbeats: %s", session_id, error)
                return
