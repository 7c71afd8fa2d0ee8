"""GeneratorService: sampling and scoring from pinned weights. Hanging up cancels."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from typing import TypeVar

import grpc.aio
import numpy as np
from google.protobuf.message import Message

from backend.generator.admission import Admission, Admitted
from backend.generator.base import SampleCall, SampleResult
from backend.resources.resource import Resource
from backend.resources.sequence_records import SequenceRecord, SequenceRecords
from backend.resources.snapshots import Snapshots
from backend.services import wire
from backend.services.sample_requests import sample_call, score_call
from backend.services.status import request_bytes
from together_post_training import tensors
from together_post_training.errors import Reason, fail
from together_post_training.names import parse_checkpoint_path
from together_post_training.v1 import generator_pb2 as pb
from together_post_training.v1 import generator_pb2_grpc

Context = grpc.aio.ServicerContext
Response = TypeVar("Response", bound=Message)


class GeneratorService(generator_pb2_grpc.GeneratorServiceServicer):
    def __init__(
        self, snapshots: Snapshots, records: SequenceRecords, admission: Admission
    ) -> None:
        self._snapshots = snapshots
        self._records = records
        self._admission = admission

    async def OpenSnapshot(self, request: pb.OpenSnapshotRequest, context: Context):
        match request.WhichOneof("source"):
            case "base_model":
                return await self._snapshots.open_base(request.base_model)
            case "path":
                return await self._snapshots.open_checkpoint(parse_checkpoint_path(request.path))
            case _:
                raise fail(Reason.INVALID_ARGUMENT, "Nothing to open: set base_model or path.")

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Context):
        return self._snapshots.get(request.name)

    async def Sample(self, request: pb.SampleRequest, context: Context):
        admitted = self._admit(request.snapshot, context)
        resource = await self._snapshots.resource(request.snapshot)
        call = sample_call(request, resource.model, None, _fresh_seed())
        result = await self._run(request.snapshot, resource, call, admitted)
        ids = [uuid.uuid4().hex for _ in result.sequences]
        if request.record_stability_info:
            self._records.add(_records(call, result, ids))
        version = self._snapshots.get(request.snapshot).policy_version
        return _held(admitted, wire.sample_response(result, version, ids))

    async def ComputeLogprobs(self, request: pb.ComputeLogprobsRequest, context: Context):
        admitted = self._admit(request.snapshot, context)
        resource = await self._snapshots.resource(request.snapshot)
        call = score_call(request, resource.model, None)
        result = await self._run(request.snapshot, resource, call, admitted)
        assert result.prompt_logprobs is not None
        scores = tensors.encode(result.prompt_logprobs)
        return _held(admitted, pb.ComputeLogprobsResponse(logprobs=scores))

    def _admit(self, snapshot: str, context: Context) -> Admitted:
        """Until the answer has left, or the caller. Raises SNAPSHOT_NOT_FOUND, RESOURCE_EXHAUSTED."""
        flow = _flow(self._snapshots.get(snapshot), context)
        admitted = self._admission.enter(flow, len(request_bytes.get()))
        # The stubs want an object of a class of their own.
        context.add_done_callback(lambda _: admitted.leave())  # pyright: ignore[reportArgumentType]
        return admitted

    async def _run(
        self, snapshot: str, resource: Resource, call: SampleCall, admitted: Admitted
    ) -> SampleResult:
        """`call`: of no snapshot yet, which is only kept in memory from when it is the call's turn."""
        async with (
            resource.turns.turn(admitted.flow, _cost(call)),
            self._snapshots.use(snapshot) as (_, engine_name),
        ):
            return await resource.generator.sample(replace(call, snapshot=engine_name))


def _flow(snapshot: pb.Snapshot, context: Context) -> str:
    """Who gets equal shares: sessions; and, of base models and checkpoints, which all may use, connections."""
    if snapshot.session and not snapshot.path:
        return snapshot.session
    return context.peer()


def _cost(call: SampleCall) -> int:
    """Tokens, at most."""
    return len(call.prompt) + call.num_samples * call.max_tokens


def _held(admitted: Admitted, response: Response) -> Response:
    """Callers that do not read leave their answers here."""
    admitted.hold(response.ByteSize())
    return response


def _records(call: SampleCall, result: SampleResult, ids: list[str]) -> dict[str, SequenceRecord]:
    """Copies: an engine's arrays may be parts of larger ones."""
    prompt = np.array(call.prompt, np.int32)
    return {
        id_: SequenceRecord(
            prompt=prompt,
            tokens=np.array(sequence.tokens, np.int32),
            logprobs=np.array(sequence.logprobs, np.float32),
        )
        for id_, sequence in zip(ids, result.sequences, strict=True)
    }


def _fresh_seed() -> int:
    return int.from_bytes(os.urandom(7))
