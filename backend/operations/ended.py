"""The end of an operation, as its message shows it."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp

from together_post_training.errors import PostTrainingError
from together_post_training.v1 import errors_pb2
from together_post_training.v1 import operations_pb2 as pb

ENDED = (pb.OPERATION_STATE_SUCCEEDED, pb.OPERATION_STATE_FAILED, pb.OPERATION_STATE_CANCELLED)


def is_ended(operation: pb.Operation) -> bool:
    return operation.state in ENDED


def timestamp(seconds: float) -> Timestamp:
    """`seconds` since 1970."""
    stamp = Timestamp()
    stamp.FromNanoseconds(round(seconds * 1e9))
    return stamp


def error_message(error: PostTrainingError) -> errors_pb2.Error:
    return errors_pb2.Error(
        code=error.code.value[0],
        reason=error.reason,
        message=error.message,
        metadata=dict(error.metadata),
    )


def end(operation: pb.Operation, as_: pb.Operation, now: float) -> None:
    """Gives it the state and error of another, and the time."""
    operation.state = as_.state
    operation.error.CopyFrom(as_.error)
    operation.end_time.CopyFrom(timestamp(now))


def without_result(operation: pb.Operation) -> pb.Operation:
    """A copy of everything but the result, which may be large."""
    header = pb.Operation(name=operation.name, kind=operation.kind, state=operation.state)
    header.warnings.extend(operation.warnings)
    for field in ("create_time", "start_time", "end_time", "error"):
        if operation.HasField(field):
            getattr(header, field).CopyFrom(getattr(operation, field))
    return header


def contiguous(ascending: Iterable[int]) -> int:
    """The largest n such that 1 to n are all there."""
    last = 0
    for number in ascending:
        if number != last + 1:
            break
        last = number
    return last
