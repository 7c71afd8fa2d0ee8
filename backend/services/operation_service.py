"""OperationService: reads, waits for and cancels operations."""

from __future__ import annotations

import grpc.aio

from backend.operations.intake import Intake
from backend.operations.registry import OperationRegistry
from backend.resources.sessions import Sessions
from backend.services.fields import invalid, optional, page
from backend.services.status import shorten
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.names import MAX_SEQUENCE, parse_operation_name
from together_post_training.v1 import operations_pb2 as pb
from together_post_training.v1 import operations_pb2_grpc, sessions_pb2

Context = grpc.aio.ServicerContext
MAX_WAIT_S = 60.0
_MAX_CAUSE_BYTES = 500


class OperationService(operations_pb2_grpc.OperationServiceServicer):
    def __init__(self, sessions: Sessions, registry: OperationRegistry, intake: Intake) -> None:
        self._sessions = sessions
        self._registry = registry
        self._intake = intake

    async def GetOperation(self, request: pb.GetOperationRequest, context: Context):
        key = parse_operation_name(request.name)
        await self._sessions.get(key[0])
        return await self._registry.get(key)

    async def WaitOperation(self, request: pb.WaitOperationRequest, context: Context):
        key = parse_operation_name(request.name)
        timeout_s = optional(request, "timeout_s", 30.0)
        if not 0 <= timeout_s <= MAX_WAIT_S:
            raise invalid(
                "timeout_s", timeout_s, f"0 to {MAX_WAIT_S:g}", "Ask again to wait longer."
            )
        shown = await self._sessions.get(key[0])
        if shown.state != sessions_pb2.SESSION_STATE_RUNNING and self._registry.live(key) is None:
            # It has ended, or will never be submitted.
            return await self._registry.get(key)
        operation = await self._registry.wait(key, timeout_s)
        self._sessions.running(key[0])  # Whoever waited is alive.
        return operation

    async def ListOperations(self, request: pb.ListOperationsRequest, context: Context):
        await self._sessions.get(request.session)
        size = page(request)
        before = _before(request.page_token)
        operations = await self._registry.list(request.session, before, size + 1)
        token = operations[size - 1].name.rpartition("/")[2] if len(operations) > size else ""
        return pb.ListOperationsResponse(operations=operations[:size], next_page_token=token)

    async def CancelOperation(self, request: pb.CancelOperationRequest, context: Context):
        session_id, sequence = parse_operation_name(request.name)
        session = await self._sessions.find(session_id)
        executor = self._sessions.resource_of(session).executor
        error = _cancelled(request.cause)
        if not session.sequencer.is_used(sequence):
            return await self._intake.use_up(
                session, executor, sequence, error, pb.OPERATION_STATE_CANCELLED
            )
        operation = self._registry.live((session_id, sequence))
        if operation is not None:
            await executor.cancel(operation, error)
        return await self._registry.get((session_id, sequence))


def _cancelled(cause: str) -> PostTrainingError:
    cause = shorten(cause, _MAX_CAUSE_BYTES)
    message = f"Cancelled by the caller: {cause}" if cause else "Cancelled by the caller."
    return fail(Reason.CANCELLED, message, cause=cause or "none given")


def _before(page_token: str) -> int:
    if not page_token:
        return MAX_SEQUENCE + 1
    if page_token.isdecimal():
        return int(page_token)
    raise invalid("page_token", page_token, "a next_page_token of this method")
