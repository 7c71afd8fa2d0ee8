"""What the server's messages say, under the names that programs read: those of Tinker's listings, and more.

Pure. Every field is a key of `--format json`: keys are added, never renamed or taken away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from together_post_training.names import parse_checkpoint_path
from together_post_training.v1 import catalog_pb2, checkpoints_pb2, sessions_pb2, trainer_pb2

CheckpointType = Literal["training", "sampler", "external"]

_TYPES: dict[int, CheckpointType] = {
    trainer_pb2.CHECKPOINT_KIND_TRAINING: "training",
    trainer_pb2.CHECKPOINT_KIND_INFERENCE: "sampler",
    trainer_pb2.CHECKPOINT_KIND_EXTERNAL: "external",
}
_TRAIN = ":train:"
# There are no accounts: whoever reaches the server is its owner. As RestClient names it.
_OWNER = "urn:together-post-training:user:owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    checkpoint_id: str
    checkpoint_type: CheckpointType | None
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: dict[str, str]
    expires_at: datetime | None
    training_run_id: str
    base_model: str
    is_lora: bool
    lora_rank: int | None
    policy_version: int
    has_optimizer: bool
    copied_from: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Tinker's training run; the service calls it a session.

    state: None: the server has only its checkpoints, which were copied or imported, or have outlived it.
    last_checkpoint, last_sampler_checkpoint: the newest of their kind.
    """

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    lora_rank: int | None
    corrupted: bool
    last_request_time: datetime
    user_metadata: dict[str, str]
    state: str | None
    policy_version: int
    created_at: datetime
    display_name: str
    resumed_from: str | None
    last_checkpoint: Checkpoint | None
    last_sampler_checkpoint: Checkpoint | None

    @property
    def session_id(self) -> str:
        """Of the client that made it: Tinker's clients number their runs. Others have the run's own name."""
        return self.training_run_id.partition(_TRAIN)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What one client made."""

    session_id: str
    training_run_ids: list[str]
    base_models: list[str]
    created_at: datetime
    last_request_time: datetime
    display_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    model_name: str
    max_context_length: int | None
    trainable: bool
    sampleable: bool
    loaded: bool
    architecture: str
    vocab_size: int | None


def checkpoint(message: checkpoints_pb2.Checkpoint) -> Checkpoint:
    path = parse_checkpoint_path(message.path)
    return Checkpoint(
        checkpoint_id=f"{path.folder}/{path.name}",
        checkpoint_type=_TYPES.get(message.kind),
        time=_time(message.create_time),
        tinker_path=message.path,
        size_bytes=message.size_bytes,
        public=message.is_public,
        user_metadata=dict(message.user_metadata),
        expires_at=_time(message.expire_time) if message.HasField("expire_time") else None,
        training_run_id=path.session,
        base_model=message.base_model,
        is_lora=message.HasField("lora"),
        lora_rank=_rank(message),
        policy_version=message.policy_version,
        has_optimizer=message.has_optimizer,
        copied_from=message.copied_from or None,
    )


def files(message: checkpoints_pb2.Checkpoint) -> list[File]:
    """Only of a message from GetCheckpoint."""
    return [File(name=f.name, size_bytes=f.size_bytes, sha256=f.sha256) for f in message.files]


def runs(
    sessions: Iterable[sessions_pb2.Session], checkpoints: Sequence[checkpoints_pb2.Checkpoint]
) -> list[Run]:
    """Newest first; also those that only their checkpoints tell of. `checkpoints`: newest first."""
    saved: dict[str, list[checkpoints_pb2.Checkpoint]] = {}
    for message in checkpoints:
        saved.setdefault(message.session, []).append(message)
    found = [_run(session, saved.pop(session.id, [])) for session in sessions]
    found += [_run(None, messages) for messages in saved.values()]
    return sorted(found, key=lambda run: run.created_at, reverse=True)


def _run(
    session: sessions_pb2.Session | None, checkpoints: Sequence[checkpoints_pb2.Checkpoint]
) -> Run:
    shown = checkpoints[0] if session is None else session
    is_lost = session is not None and session.state == sessions_pb2.SESSION_STATE_LOST
    return Run(
        training_run_id=checkpoints[0].session if session is None else session.id,
        base_model=shown.base_model,
        model_owner=_OWNER,
        is_lora=shown.HasField("lora"),
        lora_rank=_rank(shown),
        corrupted=is_lost,
        last_request_time=_time(
            shown.create_time if session is None else session.last_request_time
        ),
        user_metadata=dict(shown.user_metadata),
        state=None if session is None else _state(session),
        policy_version=shown.policy_version,
        created_at=_time(checkpoints[-1].create_time if session is None else session.create_time),
        display_name="" if session is None else session.display_name,
        resumed_from=None if session is None else session.resumed_from or None,
        last_checkpoint=_newest(checkpoints, trainer_pb2.CHECKPOINT_KIND_TRAINING),
        last_sampler_checkpoint=_newest(checkpoints, trainer_pb2.CHECKPOINT_KIND_INFERENCE),
    )


def _state(session: sessions_pb2.Session) -> str:
    return sessions_pb2.SessionState.Name(session.state).removeprefix("SESSION_STATE_").lower()


def _newest(
    checkpoints: Sequence[checkpoints_pb2.Checkpoint], kind: trainer_pb2.CheckpointKind
) -> Checkpoint | None:
    return next((checkpoint(each) for each in checkpoints if each.kind == kind), None)


def sessions(runs: list[Run]) -> list[Session]:
    """By client, those that were heard of last first."""
    by_id: dict[str, list[Run]] = {}
    for made in sorted(runs, key=lambda run: run.created_at):
        by_id.setdefault(made.session_id, []).append(made)
    found = [_session(name, made) for name, made in by_id.items()]
    return sorted(found, key=lambda session: session.last_request_time, reverse=True)


def _session(name: str, runs: list[Run]) -> Session:
    return Session(
        session_id=name,
        training_run_ids=[run.training_run_id for run in runs],
        base_models=sorted({run.base_model for run in runs}),
        created_at=runs[0].created_at,
        last_request_time=max(run.last_request_time for run in runs),
        display_name=next((run.display_name for run in runs if run.display_name), ""),
    )


def model(message: catalog_pb2.Model) -> Model:
    has_length = message.HasField("max_context_length")
    return Model(
        model_name=message.name,
        max_context_length=message.max_context_length if has_length else None,
        trainable=message.trainable,
        sampleable=message.sampleable,
        loaded=message.loaded,
        architecture=message.architecture,
        vocab_size=message.vocab_size if message.HasField("vocab_size") else None,
    )


def lora(record: Checkpoint | Run) -> str:
    return f"Rank {record.lora_rank}" if record.is_lora else "No"


def _rank(message: checkpoints_pb2.Checkpoint | sessions_pb2.Session) -> int | None:
    return message.lora.rank if message.HasField("lora") else None


def _time(timestamp: Any) -> datetime:
    return timestamp.ToDatetime(UTC)
