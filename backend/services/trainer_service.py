"""TrainerService: every method submits one operation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import grpc.aio
from google.protobuf.message import Message

from backend.operations.intake import Intake
from backend.operations.work import Work
from backend.resources.sample_records import SampleRecords
from backend.resources.sessions import Sessions
from backend.services import trainer_requests as parse
from backend.services.status import request_bytes
from backend.trainer.base import ADAMW, ModelInfo
from together_post_training.v1 import operations_pb2 as pb
from together_post_training.v1 import trainer_pb2, trainer_pb2_grpc

R = TypeVar("R", bound=Message)
Context = grpc.aio.ServicerContext


class TrainerService(trainer_pb2_grpc.TrainerServiceServicer):
    def __init__(self, sessions: Sessions, intake: Intake, records: SampleRecords) -> None:
        self._sessions = sessions
        self._intake = intake
        self._pass_work = functools.partial(parse.pass_work, records=records)
        self._custom_work = functools.partial(parse.custom_work, records=records)

    async def Forward(self, request: trainer_pb2.ForwardRequest, context: Context):
        return await self._submit(pb.OPERATION_KIND_FORWARD, request, self._pass_work)

    async def ForwardBackward(self, request: trainer_pb2.ForwardBackwardRequest, context: Context):
        return await self._submit(pb.OPERATION_KIND_FORWARD_BACKWARD, request, self._pass_work)

    async def CustomForwardBackward(
        self, request: trainer_pb2.CustomForwardBackwardRequest, context: Context
    ):
        kind = pb.OPERATION_KIND_CUSTOM_FORWARD_BACKWARD
        return await self._submit(kind, request, self._custom_work)

    async def OptimStep(self, request: trainer_pb2.OptimStepRequest, context: Context):
        kind = pb.OPERATION_KIND_OPTIM_STEP
        session = self._sessions.running(request.session)
        # Without a session nothing is decoded.
        optimizer = ADAMW if session is None else session.optimizer
        return await self._submit(kind, request, lambda r, _: parse.optim_step_work(r, optimizer))

    async def WeightsSync(self, request: trainer_pb2.WeightsSyncRequest, context: Context):
        kind = pb.OPERATION_KIND_WEIGHTS_SYNC
        return await self._submit(kind, request, lambda r, _: parse.weights_sync_work(r))

    async def SaveCheckpoint(self, request: trainer_pb2.SaveCheckpointRequest, context: Context):
        kind = pb.OPERATION_KIND_SAVE_CHECKPOINT
        return await self._submit(kind, request, lambda r, _: parse.save_checkpoint_work(r))

    async def LoadCheckpoint(self, request: trainer_pb2.LoadCheckpointRequest, context: Context):
        kind = pb.OPERATION_KIND_LOAD_CHECKPOINT
        return await self._submit(kind, request, lambda r, _: parse.load_checkpoint_work(r))

    async def _submit(
        self, kind: pb.OperationKind, request: R, decode: Callable[[R, ModelInfo], Work]
    ) -> pb.Operation:
        session = self._sessions.running(request.session)  # pyright: ignore[reportAttributeAccessIssue]
        if session is None:
            return await self._recall(request)
        resource = self._sessions.resource_of(session)
        return await self._intake.submit(
            session,
            resource.executor,
            kind,
            request,
            request_bytes.get(),
            lambda: decode(request, resource.model),
        )

    async def _recall(self, request: Message) -> pb.Operation:
        """A retry gets its answer also after the session has ended."""
        operation = await self._intake.recall(request, request_bytes.get())
        if operation is None:
            await self._sessions.find(request.session)  # pyright: ignore[reportAttributeAccessIssue]
            raise AssertionError("a session that is not in memory takes no operations")
        return operation
