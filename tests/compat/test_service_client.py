"""Making a ServiceClient, and what it knows."""

from __future__ import annotations

import asyncio
import time
import warnings

import pytest

import tinker_compat as tinker
from tests.compat.conftest import MODEL
from tinker_compat import holder
from tinker_compat.service_client import LORA_ALPHA


def test_making_one_calls_nobody():
    tinker.ServiceClient(base_url="grpc://192.0.2.1:9")


def test_arguments_of_other_sdks_are_ignored_with_a_warning():
    with pytest.warns(UserWarning, match="max_retries, timeout"):
        tinker.ServiceClient(base_url="h:1", timeout=3, max_retries=2)
    with pytest.warns(UserWarning, match="project_id='p' is ignored"):
        tinker.ServiceClient(None, "p", base_url="h:1")


def test_arguments_that_mean_something_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tinker.ServiceClient(
            {"k": "v"},
            None,
            base_url="h:1",
            api_key="dummy",
            display_name="run",
            default_headers_overrides={"a": "b"},
        )


def test_what_is_given_reaches_the_server(fake):
    service = tinker.ServiceClient(
        user_metadata={"team": "a", "k": "service"},
        base_url=fake.address,
        api_key="tml-x",
        display_name="run",
        default_headers_overrides={"CF-Access": "yes"},
    )
    service.create_lora_training_client(
        "fake", rank=8, seed=0, train_unembed=False, user_metadata={"k": "client"}
    ).result()
    (request,) = fake.received("CreateSession")
    assert dict(request.user_metadata) == {"team": "a", "k": "client"}
    assert request.display_name == "run"
    lora = request.lora
    assert (lora.rank, lora.alpha, lora.HasField("seed"), lora.seed) == (8, LORA_ALPHA, True, 0)
    assert (lora.train_mlp, lora.train_attn, lora.train_unembed) == (True, True, False)
    sent = fake.metadata[-1]
    assert (sent["authorization"], sent["cf-access"]) == ("Bearer tml-x", "yes")


def test_defaults_are_rank_32_alpha_32_and_everything_trained(fake):
    tinker.ServiceClient(base_url=fake.address).create_lora_training_client("fake").result()
    lora = fake.received("CreateSession")[0].lora
    assert (lora.rank, lora.alpha, lora.HasField("seed")) == (32, 32.0, False)
    assert lora.train_mlp
    assert lora.train_attn
    assert lora.train_unembed


def test_resuming_sends_the_path_and_leaves_the_configuration_to_the_checkpoint(fake):
    service = tinker.ServiceClient(base_url=fake.address)
    path = "tinker://s/weights/a"
    service.create_training_client_from_state(path, user_metadata={"k": "v"}).result()
    service.create_training_client_from_state(path, {"k": "old"}).result()
    service.create_training_client_from_state_with_optimizer(path, "fake").result()
    first, second, third = fake.received("CreateSession")
    assert [r.resume_from for r in (first, second, third)] == [path] * 3
    assert [r.load_optimizer for r in (first, second, third)] == [False, False, True]
    assert not any(r.HasField("lora") for r in (first, second, third))
    assert (dict(first.user_metadata), dict(second.user_metadata)) == ({"k": "v"}, {"k": "old"})
    assert third.base_model == "fake"


def test_the_address_comes_from_the_environment_when_the_client_is_made(fake, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", fake.address)
    service = tinker.ServiceClient()
    assert service.get_server_capabilities().supported_models[0].model_name == "fake"


def test_capabilities_list_the_models(service):
    (model,) = service.get_server_capabilities().supported_models
    assert (model.model_name, model.max_context_length) == (MODEL, 1024)
    answer = asyncio.run(service.get_server_capabilities_async())
    assert answer.supported_models[0].model_name == MODEL


def test_capabilities_show_no_length_where_the_server_knows_none(fake):
    models = tinker.ServiceClient(base_url=fake.address).get_server_capabilities().supported_models
    lengths = [(model.model_name, model.max_context_length) for model in models]
    assert lengths == [("fake", 64), ("unloaded", None)]


def test_access_tokens_are_ignored_with_a_warning(client):
    path = client.save_state("a").result().path
    with pytest.warns(UserWarning, match="weights_access_token is ignored"):
        client.load_state(path, weights_access_token="t").result()


def test_what_has_nothing_behind_it_is_refused_by_name_when_it_is_used():
    with pytest.raises(tinker.BadRequestError, match="AdminClient is not supported"):
        tinker.AdminClient()


def test_the_console_url_names_the_server_and_the_client(service, address):
    session_id = service.holder.get_session_id()
    assert service.get_console_url() == f"{address}/{session_id}"
    client = service.create_lora_training_client(MODEL, rank=4)
    assert client.get_console_url() == f"{address}/{session_id}:train:0"


def test_closing_with_a_detail_warns_that_nobody_keeps_it(fake):
    service = tinker.ServiceClient(base_url=fake.address)
    with pytest.warns(UserWarning, match="detail='out of data' is ignored"):
        service.close("errored", "out of data").result(10)


def test_closing_does_not_wait_long_for_a_server_that_is_away(fake, monkeypatch):
    monkeypatch.setattr(holder, "_STOP_TIMEOUT_S", 0.5)
    with tinker.ServiceClient(base_url=fake.address) as service:
        for _ in range(3):
            service.create_lora_training_client("fake").result()
        fake.stop()
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 5


def test_an_async_program_leaves_the_block_without_a_warning(address, caplog):
    async def program() -> None:
        with tinker.ServiceClient(base_url=address) as service:
            await service.create_lora_training_client(MODEL)

    asyncio.run(program())
    assert "running event loop" not in caplog.text


def test_the_holder_has_the_session_id_and_close(service):
    session_id = service.holder.get_session_id()
    client = service.create_lora_training_client(MODEL)
    assert client.model_id.startswith(f"{session_id}:train:")
    service.holder.close().result()
    with pytest.raises(RuntimeError, match="closed"):
        service.create_lora_training_client(MODEL)
