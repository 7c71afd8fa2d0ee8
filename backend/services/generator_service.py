"""GeneratorService: sampling and scoring from pinned weights. Hanging up cancels."""

from __future__ import annotations

import os
import uuid

import grpc.aio
import numpy as np

from backend.generator.base import SampleCall, SampleResult
from backend.resources.sequence_records import SequenceRecord, SequenceRecords
from backend.resources.snapshots import Snapshots
from backend.services import wire
from backend.services.sample_requests import sample_call, score_call
from together_post_training import tensors
from together_post_training.errors import Reason, fail
from together_post_training.names import parse_checkpoint_path
from together_post_training.v1 import generator_pb2 as pb
from together_post_training.v1 import generator_pb2_grpc

Context = grpc.aio.ServicerContext


class GeneratorService(generator_pb2_grpc.GeneratorServiceServicer):
    def __init__(self, snapshots: Snapshots, records: SequenceRecords) -> None:
        self._snapshots = snapshots
        self._records = records

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
        async with self._snapshots.use(request.snapshot) as (resource, engine_name):
            call = sample_call(request, resource.model, engine_name, _fresh_seed())
            result = await resource.generator.sample(call)
        ids = [uuid.uuid4().hex for _ in result.sequences]
        if request.record_stability_info:
            self._records.add(_records(call, result, ids))
        version = self._snapshots.get(request.snapshot).policy_version
        return wire.sample_response(result, version, ids)

    async def ComputeLogprobs(self, request: pb.ComputeLogprobsRequest, context: Context):
        async with self._snapshots.use(request.snapshot) as (resource, engine_name):
            result = await resource.generator.sample(
                score_call(request, resource.model, engine_name)
            )
        assert result.prompt_logprobs is not None
        return pb.ComputeLogprobsResponse(logprobs=tensors.encode(result.prompt_logprobs))


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
