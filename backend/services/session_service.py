"""SessionService: sets of trainable weights."""

from __future__ import annotations

import hashlib
import os

import grpc.aio

from backend.resources.new_session import NewSession
from backend.resources.sessions import Sessions
from backend.services.fields import check_metadata, invalid, optional, page
from backend.services.paging import paged
from backend.trainer.base import LoraConfig
from together_post_training.errors import Reason, fail
from together_post_training.names import check_session_id, parse_checkpoint_path
from together_post_training.v1 import sessions_pb2 as pb
from together_post_training.v1 import sessions_pb2_grpc

Context = grpc.aio.ServicerContext
_MAX_DISPLAY_NAME = 256


class SessionService(sessions_pb2_grpc.SessionServiceServicer):
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Context):
        digest = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        return await self._sessions.create(new_session(request), digest)

    async def GetSession(self, request: pb.GetSessionRequest, context: Context):
        return await self._sessions.get(request.id)

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Context):
        sessions = await self._sessions.list()
        shown, token = paged(sessions, _newest_first, page(request), request.page_token)
        return pb.ListSessionsResponse(sessions=shown, next_page_token=token)

    async def HeartbeatSession(self, request: pb.HeartbeatSessionRequest, context: Context):
        await self._sessions.find(request.id)
        return pb.HeartbeatSessionResponse()

    async def StopSession(self, request: pb.StopSessionRequest, context: Context):
        return await self._sessions.stop(request.id)


def _newest_first(session: pb.Session) -> tuple[float, str]:
    return -session.create_time.ToNanoseconds(), session.id


def new_session(request: pb.CreateSessionRequest) -> NewSession:
    """Raises what is wrong with the request itself."""
    if request.id:
        check_session_id(request.id)
    if len(request.display_name) > _MAX_DISPLAY_NAME:
        raise invalid(
            "display_name",
            f"{len(request.display_name)} characters long",
            f"at most {_MAX_DISPLAY_NAME}",
        )
    return NewSession(
        id=request.id,
        base_model=request.base_model,
        lora=_lora(request),
        resume_from=parse_checkpoint_path(request.resume_from) if request.resume_from else None,
        load_optimizer=request.load_optimizer,
        user_metadata=check_metadata(dict(request.user_metadata)),
        display_name=request.display_name,
    )


def _lora(request: pb.CreateSessionRequest) -> LoraConfig | None:
    """With a fresh seed where none was given. None: the checkpoint's."""
    if request.resume_from:
        if request.HasField("lora"):
            raise fail(
                Reason.INVALID_ARGUMENT,
                "Both lora and resume_from are set: a resumed session has its checkpoint's LoRA configuration. "
                "Leave lora out.",
            )
        return None
    if request.load_optimizer:
        raise fail(
            Reason.INVALID_ARGUMENT,
            "load_optimizer needs resume_from: name the checkpoint to load it from.",
        )
    lora = request.lora
    if optional(lora, "dropout", 0.0) != 0:
        raise fail(
            Reason.UNIMPLEMENTED,
            f"LoRA dropout {lora.dropout}: this server trains without dropout. Set it to 0 or leave it out.",
            dropout=lora.dropout,
        )
    return LoraConfig(
        rank=optional(lora, "rank", 32),
        alpha=optional(lora, "alpha", 64.0),
        seed=optional(lora, "seed", int.from_bytes(os.urandom(4))),
        train_attn=optional(lora, "train_attn", True),
        train_mlp=optional(lora, "train_mlp", True),
        train_unembed=optional(lora, "train_unembed", True),
    )
