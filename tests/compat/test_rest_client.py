"""RestClient against the real server, as scripts use it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import io
import json
import os
import subprocess
import sys
import tarfile
import time
import urllib.request
import uuid
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from tinker import types

import tinker_compat as tinker
from tests.compat.conftest import MODEL, running_server
from tests.compat.data import datum
from tinker_compat.rest_client import RestClient

REPOSITORY = Path(__file__).parents[2]
needs_search = pytest.mark.skipif(
    not hasattr(types, "SessionSearchRequest"), reason="this tinker has no search"
)


@pytest.fixture
def rest(service: tinker.ServiceClient) -> RestClient:
    return service.create_rest_client()


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that no other test file uses: what it lists is ours."""
    with running_server(tmp_path_factory.mktemp("lone") / "store") as running:
        yield running


def now() -> datetime:
    return datetime.now(UTC)


def test_one_made_directly_needs_no_service_client(address, client):
    rest = RestClient(base_url=address, api_key="any")
    assert rest.get_training_run(client.model_id).result().base_model == MODEL
    assert RestClient(base_url=address, api_key="any").holder is rest.holder
    assert RestClient(base_url=address, api_key="other").holder is not rest.holder


def test_one_made_directly_goes_on_after_its_shared_connection_was_closed(address, client):
    rest = RestClient(base_url=address, api_key="closed")
    rest.holder.close().result()
    again = RestClient(base_url=address, api_key="closed")
    assert again.get_training_run(client.model_id).result().training_run_id == client.model_id


def test_a_holder_comes_with_its_own_address(service):
    with pytest.raises(ValueError, match="not both"):
        RestClient(service.holder, api_key="k")


def test_futures_are_waited_for_or_awaited_and_twins_return_the_result(rest, client):
    future = rest.get_training_run(client.model_id)
    assert isinstance(future, concurrent.futures.Future)
    assert isinstance(future, tinker.APIFuture)
    run = future.result()

    async def read() -> list[Any]:
        return [
            await rest.get_training_run(client.model_id),
            await rest.get_training_run_async(client.model_id),
        ]

    assert asyncio.run(read()) == [run, run]


def test_methods_can_be_replaced_on_the_class(rest, monkeypatch):
    monkeypatch.setattr(RestClient, "whoami", lambda self: "patched")
    assert rest.whoami() == "patched"
    for name in ("get_training_run", "list_checkpoints_async", "get_checkpoint_archive_url"):
        assert inspect.isfunction(vars(RestClient)[name])


def test_a_run_is_found_by_the_clients_model_id_and_by_its_checkpoints(service, rest):
    before = now()
    client = service.create_lora_training_client(
        MODEL, rank=4, user_metadata={"renderer_name": "role_colon"}
    ).result()
    state = client.save_state("s", user_metadata={"step": "1"}).result().path
    weights = client.save_weights_for_sampler("w").result().path
    run = rest.get_training_run(client.model_id).result()
    assert run.training_run_id == client.model_id
    assert (run.base_model, run.is_lora, run.lora_rank) == (MODEL, True, 4)
    assert (run.corrupted, bool(run.model_owner)) == (False, True)
    assert before - timedelta(seconds=1) < run.last_request_time < now() + timedelta(seconds=1)
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == state
    assert run.last_sampler_checkpoint is not None
    assert run.last_sampler_checkpoint.tinker_path == weights
    for path in (state, weights):
        found = rest.get_training_run_by_tinker_path(path, access_scope="accessible").result()
        # The run's metadata, not the checkpoint's: what the cookbook asks for.
        assert found.user_metadata == {"renderer_name": "role_colon"}
        assert found.training_run_id == client.model_id


def test_looking_at_a_run_is_no_request_to_it(rest, client):
    first, second = (rest.get_training_run(client.model_id).result() for _ in range(2))
    assert first.last_request_time == second.last_request_time
    client.forward([datum([3], target_tokens=[9])], "cross_entropy").result()
    third = rest.get_training_run(client.model_id).result()
    assert third.last_request_time > first.last_request_time


def test_runs_are_listed_page_by_page_newest_first(lone):
    service = tinker.ServiceClient(base_url=lone)
    rest = service.create_rest_client()
    start = rest.list_training_runs().result().cursor.total_count
    made = [service.create_lora_training_client(MODEL, rank=4).result().model_id for _ in range(3)]
    first = rest.list_training_runs(limit=2).result()
    second = rest.list_training_runs(limit=2, offset=2, access_scope="accessible").result()
    ids = [run.training_run_id for run in [*first.training_runs, *second.training_runs]]
    assert ids[:3] == made[::-1]
    assert first.cursor == types.Cursor(offset=0, limit=2, total_count=start + 3)
    beyond = rest.list_training_runs(offset=1000).result()
    assert (beyond.training_runs, beyond.cursor.total_count) == ([], start + 3)
    with pytest.warns(UserWarning, match="project_id='p' is ignored"):
        assert rest.list_training_runs(project_id="p").result().cursor.total_count == start + 3


def test_checkpoints_are_listed_by_run_and_all_together(lone):
    service = tinker.ServiceClient(base_url=lone)
    rest = service.create_rest_client()
    start = rest.list_user_checkpoints().result().cursor.total_count  # pyright: ignore[reportOptionalMemberAccess]
    a, b = (service.create_lora_training_client(MODEL, rank=4).result() for _ in "ab")
    paths = [a.save_state("1", ttl_seconds=7200).result().path]
    paths += [a.save_weights_for_sampler("2").result().path, b.save_state("1").result().path]
    listed = rest.list_checkpoints(a.model_id).result()
    assert listed.cursor is None
    assert [c.tinker_path for c in listed.checkpoints] == [paths[1], paths[0]]
    second, first = listed.checkpoints
    assert (first.checkpoint_id, first.checkpoint_type) == ("weights/1", "training")
    assert (second.checkpoint_id, second.checkpoint_type) == ("sampler_weights/2", "sampler")
    assert first.expires_at is not None
    assert timedelta(hours=1) < first.expires_at - first.time < timedelta(hours=3)
    assert second.expires_at is None
    assert (first.size_bytes or 0) > (second.size_bytes or 0) > 0
    page = rest.list_user_checkpoints(limit=2).result()
    assert [c.tinker_path for c in page.checkpoints] == [paths[2], paths[1]]
    assert page.cursor == types.Cursor(offset=0, limit=2, total_count=start + 3)
    rest_of = rest.list_user_checkpoints(offset=2).result().checkpoints
    assert rest_of[0].tinker_path == paths[0]


def test_a_run_without_checkpoints_has_an_empty_list(rest, client):
    assert rest.list_checkpoints(client.model_id).result().checkpoints == []


def test_checkpoints_are_deleted_by_id_or_path(rest, client):
    paths = [client.save_state(name).result().path for name in "abc"]
    rest.delete_checkpoint(client.model_id, "weights/a").result()
    rest.delete_checkpoint_from_tinker_path(paths[1]).result()
    left = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [c.tinker_path for c in left] == [paths[2]]
    assert asyncio.run(rest.delete_checkpoint_from_tinker_path_async(paths[2])) is None
    assert rest.list_checkpoints(client.model_id).result().checkpoints == []


def test_publishing_shows_in_the_list(rest, client):
    path = client.save_state("a").result().path
    assert rest.publish_checkpoint_from_tinker_path(path).result() is None
    assert rest.list_checkpoints(client.model_id).result().checkpoints[0].public
    assert rest.unpublish_checkpoint_from_tinker_path(path).result() is None
    assert not rest.list_checkpoints(client.model_id).result().checkpoints[0].public


def test_a_time_to_live_counts_from_now_and_none_takes_it_away(rest, client):
    path = client.save_state("a").result().path

    def expires_at() -> datetime | None:
        return rest.list_checkpoints(client.model_id).result().checkpoints[0].expires_at

    assert rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result() is None
    end = expires_at()
    assert end is not None
    assert abs(end - now() - timedelta(hours=1)) < timedelta(minutes=1)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert expires_at() is None


def test_weights_info_is_what_a_client_for_them_needs(service, rest):
    client = service.create_lora_training_client(MODEL, rank=2, train_mlp=False).result()
    path = client.save_state("a").result().path
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == (MODEL, True, 2)
    assert (info.train_mlp, info.train_attn, info.train_unembed) == (False, True, True)


def test_a_copy_is_a_run_of_its_own_that_outlives_its_source(service, rest):
    client = service.create_lora_training_client(MODEL, rank=4).result()
    client.forward_backward([datum([3], target_tokens=[9])], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    path = client.save_state("a").result().path
    copy = service.copy_weights(path, ttl_seconds=3600).result()
    run_id = copy.split("/")[2]
    assert copy == f"tinker://{run_id}/weights/a"
    assert run_id != client.model_id
    assert run_id.startswith(f"{service.holder.get_session_id()}:train:")
    rest.delete_checkpoint_from_tinker_path(path).result()
    run = rest.get_training_run_by_tinker_path(copy).result()
    assert (run.training_run_id, run.base_model, run.lora_rank) == (run_id, MODEL, 4)
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.expires_at is not None
    resumed = service.create_training_client_from_state_with_optimizer(copy).result()
    one = [datum([3], target_tokens=[9])]
    losses = [c.forward(one, "cross_entropy").result().metrics for c in (client, resumed)]
    assert losses[0]["loss:sum"] == pytest.approx(losses[1]["loss:sum"], abs=1e-6)


def test_a_copy_into_a_project_names_one_and_warns_that_there_are_none(rest, client, monkeypatch):
    path = client.save_state("a").result().path
    monkeypatch.delenv("TINKER_PROJECT_ID", raising=False)
    with pytest.raises(ValueError, match=r"^Provide destination_project_id or set TINKER_"):
        rest.copy_weights(path)
    with pytest.warns(UserWarning, match="destination_project_id='p' is ignored"):
        first = rest.copy_weights(path, "p").result()
    monkeypatch.setenv("TINKER_PROJECT_ID", "env")
    with pytest.warns(UserWarning, match="destination_project_id='env' is ignored"):
        second = asyncio.run(rest.copy_weights_async(path))
    assert len({path, first, second}) == 3


def test_a_session_is_a_service_client_with_its_runs_and_samplers(lone):
    service = tinker.ServiceClient({"team": "x"}, base_url=lone, display_name="Nightly")
    rest = service.create_rest_client()
    session_id = service.holder.get_session_id()
    empty = rest.get_session(session_id).result()
    assert (empty.training_run_ids, empty.sampler_ids) == ([], [])
    clients = [service.create_lora_training_client(MODEL, rank=4).result() for _ in range(2)]
    sampler = clients[0].save_weights_and_get_sampling_client().result()
    named = clients[1].save_weights_for_sampler("w").result().path
    opened = service.create_sampling_client(named).result()
    found = rest.get_session(session_id).result()
    assert found.training_run_ids == [client.model_id for client in clients]
    ids = [sampler._sampling_session_id, opened._sampling_session_id]
    assert found.sampler_ids == sorted(ids)
    if "display_name" in type(found).model_fields:
        assert (found.display_name, found.user_metadata) == ("Nightly", {"team": "x"})
    # As somebody else sees it, once the server has heard of what is held.
    other = RestClient(base_url=lone, api_key="other")
    assert other.get_session(session_id).result().training_run_ids == found.training_run_ids
    shown = [other.get_sampler(id_).result() for id_ in ids]
    assert [(s.sampler_id, s.base_model, s.model_path) for s in shown] == [
        (ids[0], MODEL, None),
        (ids[1], MODEL, named),
    ]


def test_a_session_without_runs_has_the_samplers_that_it_holds(lone):
    """As anybody sees it, by the id under which its client tells the server what it holds."""
    maker = tinker.ServiceClient(base_url=lone)
    client = maker.create_lora_training_client(MODEL, rank=4).result()
    path = client.save_weights_for_sampler("w").result().path
    holder = tinker.ServiceClient(base_url=lone)
    sampler = holder.create_sampling_client(path).result()
    other = RestClient(base_url=lone, api_key="other")
    session_id, deadline = holder.holder.get_session_id(), time.monotonic() + 10
    while True:
        try:
            found = other.get_session(session_id).result()
            break
        except tinker.NotFoundError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert (found.training_run_ids, found.sampler_ids) == ([], [sampler._sampling_session_id])


def test_sessions_are_listed_newest_first_page_by_page(lone):
    services = [tinker.ServiceClient(base_url=lone) for _ in range(3)]
    for service in services:
        service.create_lora_training_client(MODEL, rank=4).result()
    ids = [service.holder.get_session_id() for service in services]
    rest = services[0].create_rest_client()
    assert rest.list_sessions(limit=3).result().sessions == ids[::-1]
    assert rest.list_sessions(limit=1, offset=1).result().sessions == [ids[1]]
    assert asyncio.run(rest.list_sessions_async(2, 1)).sessions == ids[1::-1]


@needs_search
def test_search_finds_sessions_and_says_that_it_is_experimental(lone):
    name = f"Search {uuid.uuid4()}"
    service = tinker.ServiceClient({"team": "s"}, base_url=lone, display_name=name)
    client = service.create_lora_training_client(MODEL, rank=4).result()
    client.save_state("a").result()
    rest = service.create_rest_client()
    request = types.SessionSearchRequest(display_name=name.upper(), user_metadata={"team": "s"})
    with pytest.warns(tinker.ExperimentalWarning, match="search_sessions is experimental"):
        page = rest.search_sessions(request).result()
    (summary,) = page.sessions
    assert summary.session_id == service.holder.get_session_id()
    assert (summary.checkpoints_count, summary.status.type) == (1, "active")
    request = request.model_copy(update={"project_ids": ["p"]})
    ignored = pytest.warns(UserWarning, match=r"project_ids=\['p'\] is ignored")
    with pytest.warns(tinker.ExperimentalWarning), ignored:
        page = rest.search_sessions(request).result()
    assert len(page.sessions) == 1


def test_the_server_knows_who_asks_without_inventing_anybody(rest):
    me = rest.whoami().result()
    assert (me.user_urn, me.email) == ("urn:together-post-training:user:owner", None)
    assert me.org_urn.startswith("urn:together-post-training:organization:")


def test_capabilities_are_those_of_the_service_client(service, rest):
    assert rest.get_server_capabilities().result() == service.get_server_capabilities()


def test_storage_usage_is_the_sum_of_what_is_listed(lone):
    if not hasattr(types, "CurrentCheckpointStorageUsageResponse"):
        pytest.skip("this tinker has no storage usage")
    service = tinker.ServiceClient(base_url=lone)
    service.create_lora_training_client(MODEL, rank=4).result().save_state("a").result()
    rest = service.create_rest_client()
    sizes = [c.size_bytes or 0 for c in rest.list_user_checkpoints().result().checkpoints]
    (usage,) = rest.get_current_checkpoint_storage_usage().result().data
    assert (usage.checkpoint_count, usage.size_bytes) == (len(sizes), sum(sizes))
    assert usage.size_gigabytes == pytest.approx(sum(sizes) / 1e9)
    assert usage.estimated_monthly_cost_usd is None


def test_an_archive_holds_an_adapter_that_urllib_can_fetch(rest, client, tmp_path):
    path = client.save_weights_for_sampler("a").result().path
    before = now()
    answer = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
    assert type(answer).__name__ == "CheckpointArchiveUrlResponse"
    assert before + timedelta(hours=23) < answer.expires < now() + timedelta(hours=25)
    urllib.request.urlretrieve(answer.url, tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar") as packed:
        packed.extractall(tmp_path / "a", filter="data")
    assert {file.name for file in (tmp_path / "a").iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "checkpoint_complete",
    }
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 32)


def test_archives_are_had_by_id_too_and_of_training_checkpoints(rest, client):
    client.save_state("a").result()
    by_id = asyncio.run(rest.get_checkpoint_archive_url_async(client.model_id, "weights/a"))
    with tarfile.open(fileobj=io.BytesIO(httpx.get(by_id.url).content)) as packed:
        assert "adapter_model.safetensors" in packed.getnames()


def test_a_checkpoint_that_is_deleted_takes_its_links_with_it(rest, client):
    path = client.save_weights_for_sampler("a").result().path
    url = rest.get_checkpoint_archive_url_from_tinker_path(path).result().url
    rest.delete_checkpoint_from_tinker_path(path).result()
    answer = httpx.get(url)
    assert answer.status_code == 404
    assert "Unknown checkpoint" in answer.text


def test_links_go_on_when_the_client_is_closed(address):
    with tinker.ServiceClient(base_url=address) as service:
        client = service.create_lora_training_client(MODEL, rank=4).result()
        path = client.save_weights_for_sampler("a").result().path
        rest = service.create_rest_client()
        url = rest.get_checkpoint_archive_url_from_tinker_path(path).result().url
    assert httpx.get(url).status_code == 200
    with pytest.raises(RuntimeError, match="closed"):
        rest.get_training_run(client.model_id)


def test_external_weights_come_as_files_with_a_link_each(rest, client):
    saved = client.save_weights_external("e", ttl_seconds=3600).result()
    assert type(saved).__name__ == "SaveWeightsExternalResponse"
    assert saved.path == f"tinker://{client.model_id}/external_weights/e"
    answer = rest.get_external_weights_urls(saved.path).result()
    assert type(answer).__name__ == "ExternalWeightsUrlsResponse"
    assert {"adapter_model.safetensors", "adapter_config.json"} <= answer.urls.keys()
    assert answer.expires > now()
    config = httpx.get(answer.urls["adapter_config.json"]).json()
    assert config["r"] == 4
    whole = httpx.get(answer.urls["adapter_model.safetensors"]).content
    part = httpx.get(answer.urls["adapter_model.safetensors"], headers={"Range": "bytes=8-"})
    assert (part.status_code, part.content) == (206, whole[8:])
    (listed,) = rest.list_checkpoints(client.model_id).result().checkpoints
    assert (listed.checkpoint_type, listed.checkpoint_id) == ("external", "external_weights/e")
    assert listed.expires_at is not None


def test_external_weights_can_be_for_the_owners_of_keys_alone(rest, client):
    pyrage = pytest.importorskip("pyrage")
    identity = pyrage.x25519.Identity.generate()
    double = asyncio.run(
        client.save_weights_external_async(
            "e", age_encryption_recipients=[str(identity.to_public())]
        )
    )
    urls = rest.get_external_weights_urls(double.result().path).result().urls
    assert all(name.endswith(".age") for name in urls)
    sealed = httpx.get(urls["adapter_config.json.age"]).content
    assert json.loads(pyrage.decrypt(sealed, [identity]))["r"] == 4


def test_recipients_that_are_none_are_no_recipients(client):
    with pytest.raises(ValueError, match="age_encryption_recipients is empty"):
        client.save_weights_external("e", age_encryption_recipients=[])
    with pytest.raises(TypeError, match="must be a list of public keys"):
        client.save_weights_external("e", age_encryption_recipients="age1x")
    with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError), match="age1x"):
        client.save_weights_external("e", age_encryption_recipients=["age1x"]).result()


def test_a_link_is_for_any_program_on_the_machine(rest, client, tmp_path):
    path = client.save_weights_for_sampler("a").result().path
    url = rest.get_checkpoint_archive_url_from_tinker_path(path).result().url
    code = f"import urllib.request; urllib.request.urlretrieve({url!r}, 'a.tar')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)
    assert tarfile.is_tarfile(tmp_path / "a.tar")


def test_a_process_that_has_fetched_ends_at_once(address, client):
    """The web server's threads do not keep it alive."""
    path = client.save_weights_for_sampler("a").result().path
    code = (
        "import sys, urllib.request, tinker_compat as tinker\n"
        "rest = tinker.RestClient(base_url=sys.argv[1])\n"
        "url = rest.get_checkpoint_archive_url_from_tinker_path(sys.argv[2]).result().url\n"
        "print(len(urllib.request.urlopen(url).read()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, address, path],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 512


def test_nothing_warns_where_nothing_is_ignored(rest, client):
    path = client.save_state("a").result().path
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rest.list_training_runs(5, 0, "accessible").result()
        rest.get_weights_info_by_tinker_path(path).result()
        rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
        asyncio.run(rest.list_user_checkpoints_async())
