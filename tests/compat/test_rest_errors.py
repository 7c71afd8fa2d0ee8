"""Every way in which a call of RestClient fails: the exception's class, and what scripts read from it."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import tinker as genuine
from tinker import types

import tinker_compat as tinker
from tests.compat.conftest import MODEL
from tinker_compat.errors import to_tinker
from tinker_compat.rest_client import RestClient
from together_post_training.errors import PostTrainingError, Reason, fail

RUN = "00000000-0000-0000-0000-000000000000:train:0"
PATH = f"tinker://{RUN}/weights/none"


@pytest.fixture
def rest(address: str) -> RestClient:
    return RestClient(base_url=address)


def check(error: genuine.APIStatusError, status: int, *words: str) -> None:
    """What Tinker's own errors have."""
    assert error.status_code == error.response.status_code == status
    assert isinstance(error.response, httpx.Response)
    assert isinstance(error.request, httpx.Request)
    assert error.response.request is error.request
    assert isinstance(error.body, dict)
    assert error.body == error.response.json()
    assert error.body["message"] == error.message == str(error)
    for word in words:
        assert word in error.message
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.status_code, copy.message) == (type(error), status, error.message)


Call = Callable[[RestClient], Any]
NOT_FOUND: dict[str, tuple[Call, str]] = {
    "run": (lambda r: r.get_training_run(RUN), RUN),
    "run of a path": (lambda r: r.get_training_run_by_tinker_path(PATH), RUN),
    "checkpoints of a run": (lambda r: r.list_checkpoints(RUN), RUN),
    "session": (lambda r: r.get_session("nobody"), "nobody"),
    "sampler": (lambda r: r.get_sampler("snapshots/none"), "snapshots/none"),
    "weights info": (lambda r: r.get_weights_info_by_tinker_path(PATH), PATH),
    "delete by id": (lambda r: r.delete_checkpoint(RUN, "weights/none"), PATH),
    "delete": (lambda r: r.delete_checkpoint_from_tinker_path(PATH), PATH),
    "publish": (lambda r: r.publish_checkpoint_from_tinker_path(PATH), PATH),
    "unpublish": (lambda r: r.unpublish_checkpoint_from_tinker_path(PATH), PATH),
    "ttl": (lambda r: r.set_checkpoint_ttl_from_tinker_path(PATH, None), PATH),
    "archive by id": (lambda r: r.get_checkpoint_archive_url(RUN, "weights/none"), PATH),
    "archive": (lambda r: r.get_checkpoint_archive_url_from_tinker_path(PATH), PATH),
    "external": (
        lambda r: r.get_external_weights_urls(PATH.replace("/weights", "/external_weights")),
        "external_weights/none",
    ),
}


@pytest.mark.parametrize("case", NOT_FOUND)
def test_what_is_not_there_is_not_found(rest, case):
    call, word = NOT_FOUND[case]
    with pytest.raises(tinker.NotFoundError) as refused:
        call(rest).result()
    check(refused.value, 404, word)


def test_a_copy_of_what_is_not_there_is_not_found(service):
    with pytest.raises(tinker.NotFoundError) as refused:
        service.copy_weights(PATH).result()
    check(refused.value, 404, PATH)


@pytest.mark.parametrize("nothing", ["", None])
def test_no_id_is_nobodys_and_not_everybodys(service, rest, client, nothing):
    client.save_state("a").result()
    sampler = client.save_weights_and_get_sampling_client().result()
    for call in (rest.get_training_run, rest.list_checkpoints, rest.get_session):
        with pytest.raises(tinker.NotFoundError):
            call(nothing).result()
    assert sampler.get_base_model() == MODEL


ANY: Any = "all"
MANY: Any = "many"
BAD: dict[str, tuple[Call, str]] = {
    "checkpoint id": (lambda r: r.delete_checkpoint(RUN, "0001"), "/0001"),
    "archive's checkpoint id": (lambda r: r.get_checkpoint_archive_url(RUN, "0001"), "/0001"),
    "weights info's path": (lambda r: r.get_weights_info_by_tinker_path("a/b"), "'a/b'"),
    "negative limit": (lambda r: r.list_training_runs(limit=-1), "limit is -1"),
    "negative offset": (lambda r: r.list_user_checkpoints(offset=-1), "offset is -1"),
    "limit of sessions": (lambda r: r.list_sessions(MANY), "limit is 'many'"),
    "scope": (lambda r: r.list_training_runs(access_scope=ANY), "access_scope is 'all'"),
    "scope of a run": (lambda r: r.get_training_run(RUN, ANY), "access_scope is 'all'"),
    "scope of a session": (lambda r: r.get_session("s", ANY), "access_scope is 'all'"),
    "session id": (lambda r: r.get_session("a b"), "'a b'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_no_server_could_take_is_a_bad_request(rest, case):
    call, word = BAD[case]
    with pytest.raises(tinker.BadRequestError) as refused:
        call(rest).result()
    check(refused.value, 400, word)


@pytest.mark.parametrize("ttl_seconds", [0, -1, 10**12])
def test_times_to_live_out_of_range_are_bad_requests(service, rest, client, ttl_seconds):
    path = client.save_state("a").result().path
    for future in (
        rest.set_checkpoint_ttl_from_tinker_path(path, ttl_seconds),
        service.copy_weights(path, ttl_seconds=ttl_seconds),
    ):
        with pytest.raises(tinker.BadRequestError) as refused:
            future.result()
        check(refused.value, 400, "ttl", "at most ten years")
    assert rest.list_checkpoints(client.model_id).result().checkpoints[0].expires_at is None


def test_publishing_twice_and_unpublishing_what_is_private_are_conflicts(rest, client):
    path = client.save_state("a").result().path
    with pytest.raises(tinker.ConflictError) as private:
        rest.unpublish_checkpoint_from_tinker_path(path).result()
    check(private.value, 409, path)
    rest.publish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.ConflictError) as public:
        rest.publish_checkpoint_from_tinker_path(path).result()
    check(public.value, 409, path)


PATHS: dict[str, Callable[[RestClient, str], Any]] = {
    "run": lambda r, p: r.get_training_run_by_tinker_path(p),
    "delete": lambda r, p: r.delete_checkpoint_from_tinker_path(p),
    "publish": lambda r, p: r.publish_checkpoint_from_tinker_path(p),
    "unpublish": lambda r, p: r.unpublish_checkpoint_from_tinker_path(p),
    "ttl": lambda r, p: r.set_checkpoint_ttl_from_tinker_path(p, 3600),
    "archive": lambda r, p: r.get_checkpoint_archive_url_from_tinker_path(p),
    "external": lambda r, p: r.get_external_weights_urls(p),
}


@pytest.mark.parametrize("case", PATHS)
@pytest.mark.parametrize("path", ["weights/a", "tinker://run/a", "tinker://run/other/a"])
def test_what_is_no_path_is_a_value_error_at_the_call(rest, case, path):
    with pytest.raises(ValueError, match=r"^Invalid tinker path: ") as refused:
        PATHS[case](rest, path)
    assert path in str(refused.value)
    assert not isinstance(refused.value, genuine.TinkerError)


def test_external_links_of_other_checkpoints_are_a_value_error_at_the_call(rest):
    for path in (PATH, PATH.replace("/weights", "/sampler_weights")):
        with pytest.raises(ValueError, match=r"^get_external_weights_urls takes"):
            rest.get_external_weights_urls(path)


def test_twins_raise_what_the_future_raises(rest):
    async def raised(call: Any) -> type[BaseException]:
        try:
            await call
        except Exception as error:
            return type(error)
        raise AssertionError("nothing was raised")

    assert asyncio.run(raised(rest.get_training_run_async(RUN))) is genuine.NotFoundError
    assert asyncio.run(raised(rest.delete_checkpoint_async(RUN, "weights/a"))) is (
        genuine.NotFoundError
    )
    assert asyncio.run(raised(rest.delete_checkpoint_from_tinker_path_async("x"))) is ValueError


REFUSED: dict[str, Call] = {
    "assign_session_project": lambda r: r.assign_session_project("s", "p"),
    "export_session_trace": lambda r: r.export_session_trace("s"),
    "get_audit_log": lambda r: r.get_audit_log(),
    "get_billing_usage": lambda r: r.get_billing_usage("2026-01-01", "2026-02-01"),
}
REFUSED_TWINS: dict[str, Call] = {
    "assign_session_project": lambda r: r.assign_session_project_async("s", "p"),
    "export_session_trace": lambda r: r.export_session_trace_async("s"),
    "get_audit_log": lambda r: r.get_audit_log_async("checkpoints"),
    "get_billing_usage": lambda r: r.get_billing_usage_async("2026-01-01", "2026-02-01"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_nothing_behind_it_is_refused_by_name(rest, name):
    with pytest.raises(tinker.BadRequestError, match=f"^{name} is not supported: ") as refused:
        REFUSED[name](rest)
    check(refused.value, 400, name)
    with pytest.raises(tinker.BadRequestError, match=f"^{name} is not supported: "):
        asyncio.run(REFUSED_TWINS[name](rest))


def test_searching_for_how_clients_ended_is_refused(rest):
    if not hasattr(types, "SessionSearchRequest"):
        with pytest.raises(tinker.BadRequestError, match="install a newer tinker package"):
            rest.search_sessions(object())
        return
    request = types.SessionSearchRequest(statuses=[types.ClientFinishedSessionStatusQuery()])
    with pytest.warns(genuine.ExperimentalWarning):
        future = rest.search_sessions(request)
    with pytest.raises(tinker.BadRequestError) as refused:
        future.result()
    check(refused.value, 400, "client_finished")


def test_a_closed_client_takes_no_calls(address):
    service = tinker.ServiceClient(base_url=address)
    rest = service.create_rest_client()
    service.close("success").result()
    for call in (rest.whoami, rest.list_sessions, rest.list_user_checkpoints):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_server_that_is_away_is_a_connection_error(monkeypatch):
    monkeypatch.setenv("TOGETHER_POST_TRAINING_CONNECT_TIMEOUT", "0.3")
    future = RestClient(base_url="127.0.0.1:1").list_training_runs()
    with pytest.raises(tinker.APIConnectionError, match="Cannot reach") as refused:
        future.result(20)
    assert isinstance(refused.value.request, httpx.Request)


def test_a_wrong_address_or_key_is_said_at_once():
    with pytest.raises(ValueError, match="is a web address"):
        RestClient(base_url="https://example.com")
    with pytest.raises(tinker.TinkerError, match="api_key"):
        RestClient(base_url="h:1", api_key="a\nb")


def test_a_name_that_is_taken_is_a_conflict_at_once(service, rest):
    client = service.create_lora_training_client(MODEL, rank=4).result()
    client.save_weights_external("a").result()
    with pytest.raises((tinker.ConflictError, tinker.RequestFailedError)) as refused:
        client.save_weights_external("a").result()
    assert isinstance(refused.value, genuine.ConflictError)
    check(refused.value, 409, "'a'")


def test_a_server_that_fails_has_a_status_too(fake):
    fake.inject("GetSession", error=fail(Reason.INTERNAL, "The server failed (OSError)."))
    with pytest.raises(tinker.InternalServerError) as refused:
        RestClient(base_url=fake.address).get_training_run(RUN).result()
    check(refused.value, 500, "OSError")


def test_errors_on_the_wire_become_these_alone(rest):
    """Nothing of this service's own comes through."""
    with pytest.raises(tinker.NotFoundError) as refused:
        rest.get_training_run(RUN).result()
    cause = refused.value.__cause__
    assert isinstance(cause, PostTrainingError)
    assert type(to_tinker(cause)) is genuine.NotFoundError
