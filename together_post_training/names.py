"""Names of things: sessions, operations, snapshots, checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from together_post_training.errors import Reason, fail

CheckpointFolder = Literal["weights", "sampler_weights", "external_weights"]

MAX_SEQUENCE = 2**53
_SESSION = re.compile(r"[A-Za-z0-9_\-:]{1,128}")
_CHECKPOINT = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_\-.]{0,127}")
_PATH = re.compile(r"tinker://([^/]+)/([^/]+)/([^/]+)")
_BASE, _LIVE = "snapshots/base:", "snapshots/live:"
_OPERATION = re.compile(r"sessions/([^/]+)/operations/([1-9][0-9]{0,15})")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPath:
    """tinker://{session}/{weights|sampler_weights|external_weights}/{name}"""

    session: str
    folder: CheckpointFolder
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.session}/{self.folder}/{self.name}"


def parse_checkpoint_path(path: str) -> CheckpointPath:
    """Raises INVALID_PATH, saying what a path looks like."""
    match = _PATH.fullmatch(path)
    session, folder, name = match.groups() if match else ("", "", "")
    if folder in ("weights", "sampler_weights", "external_weights"):
        return CheckpointPath(
            session=check_session_id(session, reason=Reason.INVALID_PATH),
            folder=folder,
            name=check_checkpoint_name(name, reason=Reason.INVALID_PATH),
        )
    raise fail(
        Reason.INVALID_PATH,
        f"Invalid checkpoint path {path!r}: expected tinker://<session>/weights/<name> (a training checkpoint), "
        "tinker://<session>/sampler_weights/<name> (weights to sample from) or "
        "tinker://<session>/external_weights/<name> (weights to take elsewhere).",
        path=path,
    )


def check_checkpoint_name(name: str, *, reason: Reason = Reason.INVALID_NAME) -> str:
    """Returns the name; raises if it could not be one path segment on every file system."""
    if _CHECKPOINT.fullmatch(name) and not name.endswith("."):
        return name
    raise fail(
        reason,
        f"Invalid checkpoint name {name!r}: use 1 to 128 of letters, digits, '_', '-', '.', "
        "not starting or ending with '.'.",
        name=name,
    )


def check_session_id(session: str, *, reason: Reason = Reason.INVALID_NAME) -> str:
    if _SESSION.fullmatch(session):
        return session
    raise fail(
        reason,
        f"Invalid session id {session!r}: use 1 to 128 of letters, digits, '-', '_', ':'.",
        session=session,
    )


def check_holder(holder: str) -> str:
    if _SESSION.fullmatch(holder):
        return holder
    raise fail(
        Reason.INVALID_NAME,
        f"Invalid holder {holder!r}: use 1 to 128 of letters, digits, '-', '_', ':'.",
        holder=holder,
    )


def operation_name(session: str, sequence: int) -> str:
    return f"sessions/{session}/operations/{sequence}"


def parse_operation_name(name: str) -> tuple[str, int]:
    """(session, sequence); raises INVALID_NAME."""
    match = _OPERATION.fullmatch(name)
    if match and int(match[2]) <= MAX_SEQUENCE:
        return match[1], int(match[2])
    raise fail(
        Reason.INVALID_NAME,
        f"Invalid operation name {name!r}: expected sessions/<session>/operations/<sequence number from 1>.",
        name=name,
    )


def base_snapshot(digest: str) -> str:
    """The snapshot of a base model. It takes nothing, and is always there."""
    return f"{_BASE}{digest}"


def is_base_snapshot(snapshot: str) -> bool:
    return snapshot.startswith(_BASE)


def live_snapshot(session: str) -> str:
    """The snapshot that follows a session's live policy."""
    return f"{_LIVE}{session}"


def live_session(snapshot: str) -> str:
    """Whose live policy it follows; empty: it is pinned."""
    return snapshot.removeprefix(_LIVE) if snapshot.startswith(_LIVE) else ""
