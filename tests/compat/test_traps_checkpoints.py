"""Traps of compatibility, one test each, as a user meets them: checkpoints, their paths and names, snapshots.

The numbers rank what most often breaks scripts that were written for Tinker; the other numbers are in the other
test_traps files.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tinker import types

import tinker_compat as tinker
from tests.compat.conftest import MODEL, running_server
from tests.compat.data import close, datum
from tests.compat.traps import fresh, logprobs, scored, step_metrics, train
from tests.services.harness import Clock, serving


def test_trap_16_paths_have_tinkers_form_and_parts(service, client):
    session = service.holder.get_session_id()
    assert client.model_id == f"{session}:train:0", "colons in the first part, as Tinker's"
    saved = client.save_state("step-000010").result()
    exported = client.save_weights_for_sampler(name="final").result()
    assert saved.path == f"tinker://{client.model_id}/weights/step-000010"
    assert exported.path == f"tinker://{client.model_id}/sampler_weights/final"

    parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(saved.path)
    assert parsed.training_run_id == client.model_id
    assert (parsed.checkpoint_type, parsed.checkpoint_id) == ("training", "weights/step-000010")
    # What scripts do to the strings.
    run_id = saved.path.removeprefix("tinker://").split("/")[0]
    assert run_id == client.model_id
    assert saved.path.split("/")[-1] == "step-000010"
    twin = client.save_weights_for_sampler("step-000010").result().path
    assert saved.path.replace("/weights/", "/sampler_weights/") == twin

    rest = service.create_rest_client()
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert {checkpoint.tinker_path for checkpoint in listed} == {saved.path, exported.path, twin}
    for checkpoint in listed:
        assert checkpoint.tinker_path == f"tinker://{client.model_id}/{checkpoint.checkpoint_id}"


def test_trap_16_states_outlive_their_client_session_and_server(tmp_path):
    """A script saves and ends; days later another one goes on."""
    store = tmp_path / "store"
    with running_server(store) as address, tinker.ServiceClient(base_url=address) as service:
        client = fresh(service)
        train(client)
        state = client.save_state("000010").result().path
        exported = client.save_weights_for_sampler("000010").result().path
        expected = logprobs(client)
        train(client)
        going_on = logprobs(client)
    with running_server(store) as address:
        other = tinker.ServiceClient(base_url=address)
        whole = other.create_training_client_from_state_with_optimizer(state)
        weights_only = other.create_training_client_from_state(state)
        loaded = other.create_lora_training_client(MODEL, rank=4)
        loaded.load_state_with_optimizer(state)
        assert logprobs(whole) == logprobs(weights_only) == logprobs(loaded) == expected
        assert whole.get_info().lora_rank == 4
        sampler = other.create_sampling_client(model_path=exported)
        assert scored(sampler)[1] == close(expected[0])
        for run in (whole, weights_only, loaded):
            train(run.result() if isinstance(run, tinker.APIFuture) else run)
        assert logprobs(whole) == logprobs(loaded) == going_on
        assert logprobs(weights_only) != going_on, "its optimiser began anew"


INVALID_PATHS = [
    "weights/a",
    "/some/directory",
    "tinker://run/weights",
    "tinker://run/weights/a/b",
    "tinker://run/other/a",
    "https://example.com/run/weights/a",
]


@pytest.mark.parametrize("path", INVALID_PATHS)
def test_trap_16_what_is_no_path_is_refused_with_its_value(service, client, path):
    rest = service.create_rest_client()
    for call in (
        rest.delete_checkpoint_from_tinker_path,
        rest.publish_checkpoint_from_tinker_path,
        rest.get_checkpoint_archive_url_from_tinker_path,
        rest.get_training_run_by_tinker_path,
    ):
        with pytest.raises(ValueError, match="Invalid tinker path"):
            call(path).result()
    for load in (service.create_training_client_from_state, client.load_state):
        with pytest.raises(tinker.BadRequestError) as refused:
            load(path).result()
        assert path in str(refused.value)
    assert logprobs(client), "the client goes on"


def test_trap_16_what_was_never_saved_is_not_found(service, client):
    missing = f"tinker://{client.model_id}/weights/never"
    calls: list[Callable[[], Any]] = [
        service.create_training_client_from_state(missing).result,
        service.create_training_client_from_state_with_optimizer(missing).result,
        service.create_sampling_client(model_path=missing).result,
        client.load_state(missing).result,
        service.create_rest_client().delete_checkpoint_from_tinker_path(missing).result,
    ]
    for call in calls:
        with pytest.raises(tinker.NotFoundError, match="never"):
            call()


@pytest.mark.parametrize("name", ["000010", "final"])
def test_trap_17_a_taken_name_is_a_conflict_at_once_and_overwrite_replaces_it(client, name):
    path = client.save_state(name).result().path
    before = logprobs(client)
    train(client)
    start_s = time.monotonic()
    with pytest.raises(tinker.ConflictError, match=f"{name}.* already exists") as taken:
        client.save_state(name).result()
    assert time.monotonic() - start_s < 5, "no minutes of retries"
    assert taken.value.status_code == 409
    after = logprobs(client)
    client.load_state(path).result()
    assert logprobs(client) == before, "what was saved first is untouched"
    train(client)
    assert client.save_state(name, overwrite=True).result().path == path
    client.load_state(path).result()
    assert logprobs(client) == close(after)


def test_trap_17_only_save_state_overwrites_and_each_kind_and_run_has_its_own_names(
    service, client
):
    assert client.save_state("final").result()
    assert client.save_weights_for_sampler("final").result()
    with pytest.raises(tinker.ConflictError):
        client.save_weights_for_sampler("final").result()
    with pytest.raises(TypeError, match="overwrite"):
        client.save_weights_for_sampler("final", overwrite=True)
    assert fresh(service).save_state("final").result(), "of another run"


def test_trap_18_unnamed_snapshots_are_frozen_ephemeral_and_their_name_is_ignored(service, client):
    with pytest.warns(DeprecationWarning, match="name='step-1' has no effect"):
        first = client.save_weights_and_get_sampling_client(name="step-1").result()
    before = scored(first)
    train(client)
    with pytest.warns(DeprecationWarning, match="has no effect"):
        second = client.save_weights_and_get_sampling_client("step-1").result()
    train(client)
    third = client.save_weights_and_get_sampling_client().result()
    assert scored(first) == before
    assert before[2] != scored(second)[2] != scored(third)[2]
    assert len({each._sampling_session_id for each in (first, second, third)}) == 3
    listed = service.create_rest_client().list_checkpoints(client.model_id).result()
    assert listed.checkpoints == []


def test_trap_18_inflight_clients_share_what_was_published_last(client):
    inflight = client.save_weights_and_get_sampling_client(kind="inflight").result()
    frozen = client.save_weights_and_get_sampling_client().result()
    before = scored(frozen)
    assert scored(inflight) == before
    train(client)
    assert scored(inflight) == before, "nothing was published yet"
    second = client.save_weights_and_get_sampling_client(kind="inflight").result()
    assert scored(inflight) == scored(second) != before
    assert scored(frozen) == before


def test_checkpoints_expire_by_their_ttl_and_those_without_one_never_do(tmp_path: Path):
    clock = Clock(1_900_000_000.0)
    with serving(tmp_path / "store", clocks={"clock": clock}) as running:
        service = tinker.ServiceClient(base_url=f"grpc://{running.address}")
        rest = service.create_rest_client()
        client = fresh(service)
        kept = client.save_state("kept").result().path
        short = client.save_state("short", ttl_seconds=3600).result().path
        exported = client.save_weights_for_sampler("short", ttl_seconds=3600).result().path
        saved_from_it = client.save_weights_for_sampler("spared", ttl_seconds=3600).result().path

        def expiries() -> dict[str, datetime | None]:
            found = rest.list_checkpoints(client.model_id).result().checkpoints
            return {checkpoint.tinker_path: checkpoint.expires_at for checkpoint in found}

        in_an_hour = datetime.fromtimestamp(clock.now + 3600, UTC)
        hourly = {short: in_an_hour, exported: in_an_hour, saved_from_it: in_an_hour}
        assert expiries() == {kept: None, **hourly}
        rest.set_checkpoint_ttl_from_tinker_path(saved_from_it, None).result()
        pinned = service.create_sampling_client(exported).result()
        before = scored(pinned)

        clock.now += 3601
        assert expiries() == {kept: None, saved_from_it: None}
        for gone in (short, exported):
            with pytest.raises(tinker.NotFoundError, match="expired"):
                service.create_sampling_client(gone).result()
        with pytest.raises(tinker.NotFoundError):
            service.create_training_client_from_state(short).result()
        assert scored(pinned) == before, "who had opened it goes on"
        assert client.save_state("short").result().path == short, "the name is free again"


@pytest.mark.parametrize("ttl_seconds", [0, -1, 11 * 366 * 24 * 3600])
def test_a_ttl_that_is_none_is_refused(client, ttl_seconds):
    with pytest.raises(tinker.BadRequestError, match="ten years"):
        client.save_state("a", ttl_seconds=ttl_seconds).result()


def test_loading_takes_its_place_in_the_order_and_ends_the_window(service, client):
    """Also a state of another run. What was accumulated before it is gone."""
    start = client.save_state("start").result().path
    before = logprobs(client)
    train(client)
    other = service.create_lora_training_client(MODEL, rank=4)
    other.forward_backward([datum()], "cross_entropy")
    loading = other.load_state(start)
    emptied = step_metrics(other.result(), types.AdamParams(learning_rate=0.1))
    assert loading.result().path == start
    assert emptied["empty_window:max"] == 1
    assert logprobs(other) == before
    with pytest.raises(tinker.TinkerError, match="Rank"):
        service.create_lora_training_client(MODEL, rank=8).load_state(start).result()


def test_sampler_weights_are_where_training_can_start_from_too(service, client):
    train(client)
    exported = client.save_weights_for_sampler("s").result().path
    assert logprobs(service.create_training_client_from_state(exported)) == logprobs(client)
    with pytest.raises(tinker.TinkerError, match="optimi"):
        service.create_training_client_from_state_with_optimizer(exported).result()


def test_publishing_twice_is_a_conflict(service, client):
    rest = service.create_rest_client()
    path = client.save_weights_for_sampler("s").result().path
    rest.publish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.ConflictError):
        rest.publish_checkpoint_from_tinker_path(path).result()
    (shown,) = rest.list_checkpoints(client.model_id).result().checkpoints
    assert shown.public
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.ConflictError):
        rest.unpublish_checkpoint_from_tinker_path(path).result()
