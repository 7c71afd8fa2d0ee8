"""GeneratorService: sampling and scoring from pinned weights. Hanging up cancels."""

from __future__ import annotations

import asyncio
import os
import uuid
from dataclasses import replace
from typing import TypeVar

import grpc.aio
import numpy as np
from google.protobuf.message import Message

from backend.generator.admission import Admission, Admitted
from backend.generator.base import SampleCall, SampleResult
from backend.resources.expert_records import ExpertRecord, expert_records
from backend.resources.live import Use
from backend.resources.resource import Resource
from backend.resources.sample_records import SampleRecords
from backend.resources.sequence_records import SequenceRecord
from backend.resources.sessions import Sessions
from backend.resources.snapshots import Snapshots
from backend.services import wire
from backend.services.fields import page
from backend.services.paging import paged
from backend.services.policy_segments import fill_segments
from backend.services.sample_requests import sample_call, score_call
from backend.services.status import request_bytes
from backend.trainer.base import ModelInfo
from together_post_training import tensors
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.names import (
    check_holder,
    check_session_id,
    live_snapshot,
    parse_checkpoint_path,
)
from together_post_training.v1 import generator_pb2 as pb
from together_post_training.v1 import generator_pb2_grpc

Context = grpc.aio.ServicerContext
Response = TypeVar("Response", bound=Message)


class GeneratorService(generator_pb2_grpc.GeneratorServiceServicer):
    def __init__(
        self,
        snapshots: Snapshots,
        sessions: Sessions,
        records: SampleRecords,
        admission: Admission,
    ) -> None:
        self._snapshots = snapshots
        self._sessions = sessions
        self._records = records
        self._admission = admission

    async def OpenSnapshot(self, request: pb.OpenSnapshotRequest, context: Context):
        match request.WhichOneof("source"):
            case "base_model":
                return await self._snapshots.open_base(request.base_model)
            case "path":
                return await self._snapshots.open_checkpoint(parse_checkpoint_path(request.path))
            case "live_session":
                return await self._open_live(request.live_session)
            case _:
                raise fail(
                    Reason.INVALID_ARGUMENT,
                    "Nothing to open: set base_model, path or live_session.",
                )

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Context):
        return self._snapshots.get(request.name)

    async def ListSnapshots(self, request: pb.ListSnapshotsRequest, context: Context):
        found = self._snapshots.all(
            holder=check_holder(request.holder) if request.holder else "",
            session=check_session_id(request.session) if request.session else "",
        )
        shown, token = paged(found, _by_name, page(request), request.page_token)
        return pb.ListSnapshotsResponse(snapshots=shown, next_page_token=token)

    async def HoldSnapshots(self, request: pb.HoldSnapshotsRequest, context: Context):
        missing = self._snapshots.hold(check_holder(request.holder), request.snapshots)
        return pb.HoldSnapshotsResponse(missing=missing, lease_s=self._snapshots.lease_s)

    async def Sample(self, request: pb.SampleRequest, context: Context):
        admitted = self._admit(request.snapshot, context)
        resource = await self._snapshots.resource(request.snapshot)
        call = sample_call(request, resource.model, None, _fresh_seed())
        result, use = await self._run(request.snapshot, resource, call, admitted)
        ids = [uuid.uuid4().hex for _ in result.sequences]
        if request.record_stability_info:
            self._records.sequences.add(_records(call, result, ids))
        response = wire.sample_response(request, result, ids)
        fill_segments(response, result.sequences, use)
        if request.return_routed_experts:
            await self._keep_experts(resource.model, call, result, response)
        return _held(admitted, response)

    async def ComputeLogprobs(self, request: pb.ComputeLogprobsRequest, context: Context):
        admitted = self._admit(request.snapshot, context)
        resource = await self._snapshots.resource(request.snapshot)
        call = score_call(request, resource.model, None)
        result, _ = await self._run(request.snapshot, resource, call, admitted)
        assert result.prompt_logprobs is not None
        scores = tensors.encode(result.prompt_logprobs)
        response = pb.ComputeLogprobsResponse(logprobs=scores, warnings=result.warnings)
        return _held(admitted, response)

    def _admit(self, snapshot: str, context: Context) -> Admitted:
        """Until the answer has left, or the caller. Raises SNAPSHOT_NOT_FOUND, RESOURCE_EXHAUSTED."""
        flow = _flow(self._snapshots.get(snapshot), context)
        admitted = self._admission.enter(flow, len(request_bytes.get()))
        # The stubs want an object of a class of their own.
        context.add_done_callback(lambda _: admitted.leave())  # pyright: ignore[reportArgumentType]
        return admitted

    async def _run(
        self, snapshot: str, resource: Resource, call: SampleCall, admitted: Admitted
    ) -> tuple[SampleResult, Use]:
        """`call`: of no snapshot yet, which is only kept in memory from when it is the call's turn."""
        with self._snapshots.used(snapshot):
            async with (
                resource.turns.turn(admitted.flow, _cost(call)),
                self._snapshots.use(snapshot, follow=call.max_tokens > 0) as use,
            ):
                # Nothing is waited for in between: the policy that the call follows may change at any time.
                begun = replace(call, snapshot=use.engine_name, follows=use.follows)
                return await resource.generator.sample(begun), use

    async def _keep_experts(
        self, model: ModelInfo, call: SampleCall, result: SampleResult, response: pb.SampleResponse
    ) -> None:
        """Under keys that the response tells; a dense model has none to keep."""
        if model.experts is None:
            return
        # In a thread, because they may be hundreds of megabytes.
        records = await asyncio.to_thread(expert_records, model.name, call, result)
        kept: dict[str, ExpertRecord] = {}
        for sequence, record in zip(response.sequences, records, strict=True):
            if record is not None:
                sequence.routed_experts_key = uuid.uuid4().hex
                kept[sequence.routed_experts_key] = record
        self._records.experts.add(kept)
        if len(kept) < len(records):
            response.warnings.append(
                f"return_routed_experts: this generator cannot tell which experts of {model.architecture} tokens went "
                "through. Sequences without a routed_experts_key train as the router chooses then."
            )

    async def _open_live(self, session: str) -> pb.Snapshot:
        try:
            return self._snapshots.get(live_snapshot(session))
        except PostTrainingError:
            await self._sessions.find(session)  # There may be no such session any more.
            raise


def _by_name(snapshot: pb.Snapshot) -> tuple[float, str]:
    return 0.0, snapshot.name


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
