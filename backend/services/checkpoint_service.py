"""CheckpointService: checkpoints on disk."""

from __future__ import annotations

import asyncio

import grpc.aio

from backend.checkpoints.manifest import Manifest
from backend.checkpoints.store import CheckpointStore
from backend.operations.ended import timestamp
from backend.resources.new_session import fill_configuration
from backend.services.fields import page, ttl_s
from backend.services.paging import paged
from together_post_training.errors import Reason, fail
from together_post_training.names import check_session_id, parse_checkpoint_path
from together_post_training.v1 import checkpoints_pb2 as pb
from together_post_training.v1 import checkpoints_pb2_grpc, trainer_pb2

Context = grpc.aio.ServicerContext

_KINDS = {
    "training": trainer_pb2.CHECKPOINT_KIND_TRAINING,
    "inference": trainer_pb2.CHECKPOINT_KIND_INFERENCE,
    "external": trainer_pb2.CHECKPOINT_KIND_EXTERNAL,
}


class CheckpointService(checkpoints_pb2_grpc.CheckpointServiceServicer):
    def __init__(self, checkpoints: CheckpointStore) -> None:
        self._checkpoints = checkpoints

    async def GetCheckpoint(self, request: pb.GetCheckpointRequest, context: Context):
        path = parse_checkpoint_path(request.path)
        manifest = await asyncio.to_thread(self._checkpoints.get, path)
        message = checkpoint_message(manifest)
        for file in manifest.files:
            message.files.add(name=file.name, size_bytes=file.size_bytes, sha256=file.sha256)
        return message

    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Context):
        session = check_session_id(request.session) if request.session else None
        size = page(request)
        found = await asyncio.to_thread(self._checkpoints.list, session)
        shown, token = paged(found, _newest_first, size, request.page_token)
        return pb.ListCheckpointsResponse(
            checkpoints=[checkpoint_message(manifest) for manifest in shown], next_page_token=token
        )

    async def DeleteCheckpoint(self, request: pb.DeleteCheckpointRequest, context: Context):
        path = parse_checkpoint_path(request.path)
        await asyncio.to_thread(self._checkpoints.delete, path)
        return pb.DeleteCheckpointResponse()

    async def SetCheckpointTtl(self, request: pb.SetCheckpointTtlRequest, context: Context):
        path = parse_checkpoint_path(request.path)
        return checkpoint_message(
            await asyncio.to_thread(self._checkpoints.set_ttl, path, ttl_s(request))
        )

    async def PublishCheckpoint(self, request: pb.PublishCheckpointRequest, context: Context):
        path = parse_checkpoint_path(request.path)
        return checkpoint_message(await asyncio.to_thread(self._checkpoints.publish, path))

    async def UnpublishCheckpoint(self, request: pb.UnpublishCheckpointRequest, context: Context):
        path = parse_checkpoint_path(request.path)
        return checkpoint_message(await asyncio.to_thread(self._checkpoints.unpublish, path))

    async def CopyCheckpoint(self, request: pb.CopyCheckpointRequest, context: Context):
        path, session = parse_checkpoint_path(request.path), check_session_id(request.session)
        return checkpoint_message(
            await asyncio.to_thread(self._checkpoints.copy, path, session, ttl_s(request))
        )

    async def DownloadCheckpoint(self, request: pb.DownloadCheckpointRequest, context: Context):
        path = parse_checkpoint_path(request.path)
        _check_offset(request)
        pieces = self._checkpoints.pieces(path, request.filename, request.offset)
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield pb.DownloadCheckpointResponse(
                    filename=piece.filename,
                    offset=piece.offset,
                    data=piece.data,
                    size_bytes=piece.size_bytes,
                )
        finally:
            pieces.close()


def _check_offset(request: pb.DownloadCheckpointRequest) -> None:
    if request.offset and not request.filename:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"offset is {request.offset}, and no filename says of which file: set filename, or leave offset out.",
            parameter="offset",
            value=request.offset,
        )


def _newest_first(manifest: Manifest) -> tuple[float, str]:
    return -manifest.create_time_s, str(manifest.path)


def checkpoint_message(manifest: Manifest) -> pb.Checkpoint:
    message = pb.Checkpoint(
        path=str(manifest.path),
        kind=_KINDS[manifest.kind],
        session=manifest.session,
        base_model=manifest.base_model,
        policy_version=manifest.policy_version,
        has_optimizer=manifest.has_optimizer,
        size_bytes=manifest.size_bytes,
        create_time=timestamp(manifest.create_time_s),
        user_metadata=manifest.user_metadata,
        is_public=manifest.is_public,
        copied_from=manifest.copied_from,
    )
    fill_configuration(message, manifest.weights, manifest.optimizer)
    if manifest.expire_time_s is not None:
        message.expire_time.CopyFrom(timestamp(manifest.expire_time_s))
    return message
