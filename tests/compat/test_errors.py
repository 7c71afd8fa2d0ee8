"""Every failure has its Tinker exception."""

from __future__ import annotations

import pickle

import httpx
import pytest
import tinker
from tinker import types

from tinker_compat.errors import refuse, to_connection_error, to_tinker
from together_post_training.errors import TABLE, ConnectionLostError, Reason, fail

BY_STATUS = {
    400: tinker.BadRequestError,
    401: tinker.AuthenticationError,
    404: tinker.NotFoundError,
    409: tinker.ConflictError,
    429: tinker.RateLimitError,
    503: tinker.InternalServerError,
}
SERVER_FAULTS = {Reason.INTERNAL, Reason.OUT_OF_MEMORY, Reason.SESSION_LOST}


@pytest.mark.parametrize("reason", list(Reason))
def test_error_becomes_the_exception_of_its_status_or_a_failed_request(reason):
    error = to_tinker(
        fail(reason, "what, accepted, do", key="v", operation="sessions/s/operations/1")
    )
    mapped = TABLE[reason]
    assert str(error) == "what, accepted, do"
    if isinstance(error, tinker.RequestFailedError):
        assert mapped.after_acceptance
        assert error.request_id == "sessions/s/operations/1"
        category = "Server" if reason in SERVER_FAULTS else "User"
        assert error.category is types.RequestErrorCategory[category]
        return
    assert not mapped.after_acceptance
    assert type(error) is BY_STATUS[mapped.http_status]
    assert error.status_code == error.response.status_code == mapped.http_status
    assert error.message == "what, accepted, do"
    assert error.body == error.response.json()
    assert isinstance(error.body, dict)
    assert (error.body["reason"], error.body["metadata"]["key"]) == (reason, "v")
    assert isinstance(error.request, httpx.Request)


@pytest.mark.parametrize("reason", list(Reason))
def test_error_survives_pickling(reason):
    error = to_tinker(fail(reason, "message", key="v"))
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy).keys()) == (
        type(error),
        "message",
        vars(error).keys(),
    )


def test_a_lost_connection_is_an_api_connection_error():
    error = to_connection_error(ConnectionLostError("Cannot reach grpc://h:1"))
    assert type(error) is tinker.APIConnectionError
    assert str(error) == error.message == "Cannot reach grpc://h:1"
    assert isinstance(error, tinker.APIError)


def test_what_is_not_supported_is_a_bad_request():
    with pytest.raises(tinker.BadRequestError, match="not here") as refused:
        refuse("not here")
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["reason"] == "UNIMPLEMENTED"
