"""Failures off the wire: gRPC statuses and failed operations, back into PostTrainingError."""

from __future__ import annotations

from dataclasses import dataclass, replace

import grpc
from google.rpc import error_details_pb2, status_pb2

from together_post_training.errors import DOMAIN, PostTrainingError, Reason
from together_post_training.v1 import errors_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
# What gRPC itself reports when a connection breaks under a call or a busy server drops one.
_TRANSPORT = (*_TRANSIENT, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
_BROKEN_STREAM = ("RST_STREAM", "Stream removed", "GOAWAY", "Connection reset")
_TOO_LARGE = "larger than max"
_BY_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: Reason.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED: Reason.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED: Reason.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE: Reason.UNAVAILABLE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed attempt.

    `is_transient`: worth another attempt, after `told_s` seconds if the server said so. `is_connection`: the
    server did not answer at all. `is_full`: it has no room for the call now, and said when to come again.
    """

    error: PostTrainingError
    is_transient: bool
    is_connection: bool = False
    told_s: float | None = None

    @property
    def is_full(self) -> bool:
        is_exhausted = self.error.reason is Reason.RESOURCE_EXHAUSTED
        return self.is_transient and is_exhausted and self.told_s is not None


def read_failure(error: grpc.aio.AioRpcError) -> Failure:
    """What an attempt's status says."""
    ours, told_s = _read_details(error)
    if ours is not None:
        # The same request would need the same memory.
        again = error.code() in _TRANSIENT and ours.reason is not Reason.OUT_OF_MEMORY
        return Failure(error=ours, is_transient=again, told_s=told_s)
    return replace(_read_transport(error), told_s=told_s)


def operation_error(error: errors_pb2.Error, operation: str) -> PostTrainingError:
    """Of a failed operation; its name is added to the metadata."""
    metadata = {**error.metadata, "operation": operation}
    return PostTrainingError(_reason(error.reason), error.message, metadata)


def _read_transport(error: grpc.aio.AioRpcError) -> Failure:
    """A status that gRPC made itself."""
    code, details = error.code(), error.details() or ""
    reason = _BY_CODE.get(code, Reason.INTERNAL)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:
        message = f"A message is too large to send: {details}. Split the data into several calls."
        return Failure(error=PostTrainingError(reason, message), is_transient=False)
    is_transient = code in _TRANSPORT or any(sign in details for sign in _BROKEN_STREAM)
    return Failure(
        error=PostTrainingError(reason, f"{code.name}: {details}"),
        is_transient=is_transient,
        is_connection=is_transient and code is not grpc.StatusCode.RESOURCE_EXHAUSTED,
    )


def _read_details(error: grpc.aio.AioRpcError) -> tuple[PostTrainingError | None, float | None]:
    """(our error, retry delay), each None if the status does not carry it."""
    status = status_pb2.Status()
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            status.ParseFromString(value)
    ours: PostTrainingError | None = None
    told_s: float | None = None
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            ours = PostTrainingError(_reason(info.reason), status.message, dict(info.metadata))
        elif detail.Unpack(retry):
            told_s = retry.retry_delay.ToTimedelta().total_seconds()
    return ours, told_s


def _reason(name: str) -> Reason:
    """A server newer than this client may name reasons that it does not know."""
    try:
        return Reason(name)
    except ValueError:
        return Reason.INTERNAL
