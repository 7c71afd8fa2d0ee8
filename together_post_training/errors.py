"""Everything that can go wrong, in one table: reason -> gRPC code -> HTTP status.

    PostTrainingError        carries reason, message, metadata; travels over the wire unchanged
    ConnectionLostError      the server cannot be reached (never sent by a server)

The server raises `PostTrainingError`; the client raises the same error again. `tinker_compat.errors` turns
it into the exception that Tinker's SDK raises for the HTTP status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

import grpc

DOMAIN = "together_post_training"


class Reason(StrEnum):
    """A stable name for each kind of failure."""

    # The request is wrong.
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    LENGTH_MISMATCH = "LENGTH_MISMATCH"
    MISSING_INPUT = "MISSING_INPUT"
    UNKNOWN_INPUT = "UNKNOWN_INPUT"
    WRONG_DTYPE = "WRONG_DTYPE"
    NOT_FINITE = "NOT_FINITE"
    UNKNOWN_LOSS = "UNKNOWN_LOSS"
    UNKNOWN_PARAMETER = "UNKNOWN_PARAMETER"
    TOKEN_OUT_OF_RANGE = "TOKEN_OUT_OF_RANGE"
    SEQUENCE_TOO_LONG = "SEQUENCE_TOO_LONG"
    EMPTY_INPUT = "EMPTY_INPUT"
    INVALID_PATH = "INVALID_PATH"
    INVALID_NAME = "INVALID_NAME"
    UNSUPPORTED_INPUT = "UNSUPPORTED_INPUT"
    WRONG_CHECKPOINT_KIND = "WRONG_CHECKPOINT_KIND"
    INCOMPATIBLE_CHECKPOINT = "INCOMPATIBLE_CHECKPOINT"
    # It names something that is not there, or is there already.
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    SESSION_NOT_FOUND = "SESSION_NOT_FOUND"
    OPERATION_NOT_FOUND = "OPERATION_NOT_FOUND"
    SNAPSHOT_NOT_FOUND = "SNAPSHOT_NOT_FOUND"
    SEQUENCE_RECORD_NOT_FOUND = "SEQUENCE_RECORD_NOT_FOUND"
    ROUTED_EXPERTS_NOT_FOUND = "ROUTED_EXPERTS_NOT_FOUND"
    CHECKPOINT_NOT_FOUND = "CHECKPOINT_NOT_FOUND"
    CHECKPOINT_EXISTS = "CHECKPOINT_EXISTS"
    ALREADY_PUBLIC = "ALREADY_PUBLIC"
    NOT_PUBLIC = "NOT_PUBLIC"
    SESSION_EXISTS = "SESSION_EXISTS"
    SEQUENCE_REUSED = "SEQUENCE_REUSED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    # It was accepted and could not be carried out.
    WINDOW_VOID = "WINDOW_VOID"
    NON_FINITE_LOSS = "NON_FINITE_LOSS"
    NON_FINITE_LOGITS = "NON_FINITE_LOGITS"
    SEQUENCE_GAP = "SEQUENCE_GAP"
    CANCELLED = "CANCELLED"
    SESSION_STOPPED = "SESSION_STOPPED"
    SESSION_LOST = "SESSION_LOST"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    # The server.
    UNIMPLEMENTED = "UNIMPLEMENTED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """What a reason is in gRPC and in HTTP, and whether it struck after the request was accepted."""

    code: grpc.StatusCode
    http_status: int
    after_acceptance: bool = False


_BAD = Mapped(code=grpc.StatusCode.INVALID_ARGUMENT, http_status=400)
_GONE = Mapped(code=grpc.StatusCode.NOT_FOUND, http_status=404)
_EXISTS = Mapped(code=grpc.StatusCode.ALREADY_EXISTS, http_status=409)
_FAILED = Mapped(code=grpc.StatusCode.FAILED_PRECONDITION, http_status=400, after_acceptance=True)

TABLE: Mapping[Reason, Mapped] = MappingProxyType(
    {
        Reason.INVALID_ARGUMENT: _BAD,
        Reason.LENGTH_MISMATCH: _BAD,
        Reason.MISSING_INPUT: _BAD,
        Reason.UNKNOWN_INPUT: _BAD,
        Reason.WRONG_DTYPE: _BAD,
        Reason.NOT_FINITE: _BAD,
        Reason.UNKNOWN_LOSS: _BAD,
        Reason.UNKNOWN_PARAMETER: _BAD,
        Reason.TOKEN_OUT_OF_RANGE: _BAD,
        Reason.SEQUENCE_TOO_LONG: _BAD,
        Reason.EMPTY_INPUT: _BAD,
        Reason.INVALID_PATH: _BAD,
        Reason.INVALID_NAME: _BAD,
        Reason.UNSUPPORTED_INPUT: _BAD,
        Reason.WRONG_CHECKPOINT_KIND: _BAD,
        Reason.INCOMPATIBLE_CHECKPOINT: _BAD,
        Reason.MODEL_NOT_FOUND: _GONE,
        Reason.SESSION_NOT_FOUND: _GONE,
        Reason.OPERATION_NOT_FOUND: _GONE,
        Reason.SNAPSHOT_NOT_FOUND: _GONE,
        Reason.SEQUENCE_RECORD_NOT_FOUND: _GONE,
        Reason.ROUTED_EXPERTS_NOT_FOUND: _GONE,
        Reason.CHECKPOINT_NOT_FOUND: _GONE,
        Reason.CHECKPOINT_EXISTS: _EXISTS,
        Reason.ALREADY_PUBLIC: _EXISTS,
        Reason.NOT_PUBLIC: Mapped(code=grpc.StatusCode.FAILED_PRECONDITION, http_status=409),
        Reason.SESSION_EXISTS: _EXISTS,
        Reason.SEQUENCE_REUSED: _EXISTS,
        Reason.UNAUTHENTICATED: Mapped(code=grpc.StatusCode.UNAUTHENTICATED, http_status=401),
        Reason.WINDOW_VOID: _FAILED,
        Reason.NON_FINITE_LOSS: _FAILED,
        Reason.NON_FINITE_LOGITS: _FAILED,
        Reason.SEQUENCE_GAP: _FAILED,
        Reason.CANCELLED: Mapped(
            code=grpc.StatusCode.CANCELLED, http_status=400, after_acceptance=True
        ),
        Reason.SESSION_STOPPED: _FAILED,
        Reason.SESSION_LOST: _FAILED,
        Reason.OUT_OF_MEMORY: Mapped(
            code=grpc.StatusCode.RESOURCE_EXHAUSTED, http_status=500, after_acceptance=True
        ),
        Reason.UNIMPLEMENTED: Mapped(code=grpc.StatusCode.UNIMPLEMENTED, http_status=400),
        Reason.RESOURCE_EXHAUSTED: Mapped(code=grpc.StatusCode.RESOURCE_EXHAUSTED, http_status=429),
        Reason.UNAVAILABLE: Mapped(code=grpc.StatusCode.UNAVAILABLE, http_status=503),
        Reason.INTERNAL: Mapped(
            code=grpc.StatusCode.INTERNAL, http_status=500, after_acceptance=True
        ),
    }
)


@dataclass(eq=False)
class PostTrainingError(Exception):
    """A failure with a stable reason.

    `message` says what was wrong (with the value), what is accepted and what to do; `metadata` holds every
    variable part of it. `retry_after_s`: the same request will be welcome so many seconds later.
    """

    reason: Reason
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None

    def __post_init__(self) -> None:
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple:
        return type(self), (self.reason, self.message, dict(self.metadata), self.retry_after_s)

    @property
    def code(self) -> grpc.StatusCode:
        return TABLE[self.reason].code

    @property
    def http_status(self) -> int:
        return TABLE[self.reason].http_status


class ConnectionLostError(Exception):
    """The server cannot be reached. The message names the address and how long was tried."""


def fail(reason: Reason, message: str, **metadata: object) -> PostTrainingError:
    """Builds the error; `raise fail(...)` keeps call sites on one line."""
    return PostTrainingError(reason, message, {k: str(v) for k, v in metadata.items()})
