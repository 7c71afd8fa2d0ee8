"""Reading single fields: absent is absent, 0 is 0, and what is out of range is refused with its value."""

from __future__ import annotations

import math
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from together_post_training.errors import PostTrainingError, Reason, fail

T = TypeVar("T", int, float, bool)

MAX_METADATA_BYTES = 16 * 1024
_TEN_YEARS_S = 10 * 366 * 24 * 3600


def optional(message: Message, field: str, default: T) -> T:
    return getattr(message, field) if message.HasField(field) else default


def invalid(what: str, value: object, accepted: str, hint: str = "") -> PostTrainingError:
    return fail(
        Reason.INVALID_ARGUMENT,
        f"{what} is {value}: it must be {accepted}.{hint and ' ' + hint}",
        parameter=what,
        value=value,
    )


def check_finite(what: str, value: float, *, low: float, accepted: str) -> float:
    """Raises INVALID_ARGUMENT for NaN, infinities and values below `low`."""
    if not (math.isfinite(value) and value >= low):
        raise invalid(what, value, accepted)
    return value


def check_count(what: str, value: int, *, low: int, high: int) -> int:
    if not low <= value <= high:
        raise invalid(what, value, f"{low} to {high}")
    return value


def check_metadata(metadata: dict[str, str]) -> dict[str, str]:
    """User metadata is small: it is kept with every checkpoint and session."""
    size = sum(len(k.encode()) + len(v.encode()) for k, v in metadata.items())
    if size > MAX_METADATA_BYTES:
        raise invalid("user_metadata", f"{size} bytes long", f"at most {MAX_METADATA_BYTES} bytes")
    return metadata


def ttl_s(request: Message) -> float | None:
    """How long a checkpoint is kept. None: until it is deleted."""
    if not request.HasField("ttl"):
        return None
    ttl: Duration = getattr(request, "ttl")  # noqa: B009, for the type checker.
    seconds = ttl.seconds + ttl.nanos / 1e9
    if not 0 < seconds <= _TEN_YEARS_S:
        raise invalid(
            "ttl", f"{seconds:g} s", "more than 0 and at most ten years", "Leave it out to keep it."
        )
    return seconds


def page(request: Message) -> int:
    """The page size: default 100, at most 1000."""
    return check_count("page_size", optional(request, "page_size", 100), low=1, high=1000)
