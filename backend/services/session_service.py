"""SessionService: sets of trainable weights."""

from __future__ import annotations

import hashlib
import os
from typing import Literal

import grpc.aio

from backend.resources.new_session import NewSession
from backend.resources.sessions import Sessions
from backend.services.fields import check_metadata, invalid, optional, page
from backend.services.paging import paged
from backend.trainer.base import (
    ALL_LINEAR,
    FAMILY_DEFAULT,
    FullConfig,
    LoraConfig,
    OptimizerConfig,
    WeightsConfig,
)
from together_post_training.errors import Reason, fail
from together_post_training.names import check_session_id, parse_checkpoint_path
from together_post_training.v1 import sessions_pb2 as pb
from together_post_training.v1 import sessions_pb2_grpc

Context = grpc.aio.ServicerContext
_MAX_DISPLAY_NAME = 256
_WORDS = (ALL_LINEAR, FAMILY_DEFAULT)
_SCALINGS: dict[int, Literal["match_adam", "original"]] = {
    pb.MUON_SCALING_STRATEGY_UNSPECIFIED: "match_adam",
    pb.MUON_SCALING_STRATEGY_MATCH_ADAM: "match_adam",
    pb.MUON_SCALING_STRATEGY_ORIGINAL: "original",
}


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
        weights=_weights(request),
        optimizer=_optimizer(request),
        resume_from=parse_checkpoint_path(request.resume_from) if request.resume_from else None,
        load_optimizer=request.load_optimizer,
        user_metadata=check_metadata(dict(request.user_metadata)),
        display_name=request.display_name,
    )


def _weights(request: pb.CreateSessionRequest) -> WeightsConfig | None:
    """With a fresh seed where none was given. None: the checkpoint's."""
    given = [name for name in ("lora", "full_weights") if request.HasField(name)]
    if request.resume_from:
        if given:
            raise fail(
                Reason.INVALID_ARGUMENT,
                f"Both {given[0]} and resume_from are set: a resumed session has its checkpoint's configuration. "
                f"Leave {given[0]} out.",
            )
        return None
    if request.load_optimizer:
        raise fail(
            Reason.INVALID_ARGUMENT,
            "load_optimizer needs resume_from: name the checkpoint to load it from.",
        )
    if len(given) == 2:
        raise fail(
            Reason.INVALID_ARGUMENT,
            "Both lora and full_weights are set: a session trains one of them.",
        )
    return FullConfig() if request.HasField("full_weights") else _lora(request.lora)


def _lora(lora: pb.LoraConfig) -> LoraConfig:
    names = _target_modules(lora)
    return LoraConfig(
        rank=optional(lora, "rank", 32),
        alpha=optional(lora, "alpha", 64.0),
        seed=optional(lora, "seed", int.from_bytes(os.urandom(4))),
        train_attn=optional(lora, "train_attn", True),
        train_mlp=optional(lora, "train_mlp", True),
        train_unembed=optional(lora, "train_unembed", not names or names[0] in _WORDS),
        target_modules=names,
        dropout=optional(lora, "dropout", 0.0),
    )


def _target_modules(lora: pb.LoraConfig) -> tuple[str, ...]:
    has_flags = lora.HasField("train_attn") or lora.HasField("train_mlp")
    if lora.target_modules and has_flags:
        raise fail(
            Reason.INVALID_ARGUMENT,
            "target_modules says which modules are trained: leave train_attn and train_mlp out beside it.",
        )
    if any(name in _WORDS for name in lora.target_modules) and len(lora.target_modules) > 1:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"target_modules {list(lora.target_modules)}: {' and '.join(_WORDS)} stand alone.",
        )
    if lora.target_modules or has_flags:
        return tuple(lora.target_modules)
    return (FAMILY_DEFAULT,)


def _optimizer(request: pb.CreateSessionRequest) -> OptimizerConfig | None:
    """None: the default, or the checkpoint's."""
    family = request.optimizer.WhichOneof("family")
    if family is None:
        return None
    if request.load_optimizer:
        raise fail(
            Reason.INVALID_ARGUMENT,
            "Both optimizer and load_optimizer are set: with its state the checkpoint brings its optimiser.",
        )
    if family != "muon":
        return OptimizerConfig(family=family)
    scaling = request.optimizer.muon.scaling_strategy
    if scaling not in _SCALINGS:
        raise invalid("scaling_strategy", scaling, "MUON_SCALING_STRATEGY_MATCH_ADAM or _ORIGINAL")
    return OptimizerConfig(family="muon", muon_scaling=_SCALINGS[scaling])
