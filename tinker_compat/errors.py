"""Failures as Tinker's own exceptions.

    rejected before it was accepted     the APIStatusError subclass of the reason's HTTP status
    failed after it was accepted        RequestFailedError, category user or server
    server not reachable                APIConnectionError

Scripts read `status_code`, `message`, `body`, `response` and `request`, so these carry an httpx request and
response that describe the call, although none was made.
"""

from __future__ import annotations

from typing import NoReturn

import httpx
import tinker
from tinker import types

from together_post_training.errors import (
    TABLE,
    ConnectionLostError,
    PostTrainingError,
    Reason,
    fail,
)

_BY_STATUS: dict[int, type[tinker.APIStatusError]] = {
    400: tinker.BadRequestError,
    401: tinker.AuthenticationError,
    403: tinker.PermissionDeniedError,
    404: tinker.NotFoundError,
    409: tinker.ConflictError,
    422: tinker.UnprocessableEntityError,
    429: tinker.RateLimitError,
}
# Accepted work that failed for no fault of the caller's.
_SERVER_FAULTS = (
    Reason.INTERNAL,
    Reason.OUT_OF_MEMORY,
    Reason.SESSION_LOST,
    Reason.UNAVAILABLE,
)
_URL = "grpc://together-post-training"


def to_tinker(error: PostTrainingError) -> tinker.APIStatusError | tinker.RequestFailedError:
    """The exception that Tinker's SDK would raise; its text is the error's message."""
    if TABLE[error.reason].after_acceptance:
        return _request_failed(error)
    return to_status_error(error)


def to_status_error(error: PostTrainingError) -> tinker.APIStatusError:
    """The same for calls that are answered at once, of which none is accepted to fail later."""
    status = error.http_status
    request = httpx.Request("POST", _URL)
    body = {
        "reason": error.reason.value,
        "message": error.message,
        "metadata": dict(error.metadata),
    }
    response = httpx.Response(status, json=body, request=request)
    kind = _BY_STATUS.get(status, tinker.InternalServerError)
    return kind(error.message, response=response, body=body)


def to_connection_error(error: ConnectionLostError) -> tinker.APIConnectionError:
    return tinker.APIConnectionError(request=httpx.Request("POST", _URL), message=str(error))


def refuse(message: str) -> NoReturn:
    """For what this service does not do: raises what it would answer, BadRequestError, at once."""
    raise to_tinker(fail(Reason.UNIMPLEMENTED, message))


def _request_failed(error: PostTrainingError) -> tinker.RequestFailedError:
    categories = types.RequestErrorCategory
    category = categories.Server if error.reason in _SERVER_FAULTS else categories.User
    return tinker.RequestFailedError(
        error.message, request_id=error.metadata.get("operation", ""), category=category
    )
