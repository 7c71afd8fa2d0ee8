"""Traps of compatibility, one test each, as a user meets them: clients, futures, environment, processes.

The numbers rank what most often breaks scripts that were written for Tinker; the other numbers are in the other
test_traps files.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker as genuine
from tinker import types

import tinker_compat as tinker
from tests.compat.conftest import MODEL
from tests.compat.data import HIT, close, datum, greedy, prompt
from tests.compat.traps import ADAM, scored
from tests.services.harness import Running, serving_watched, wait_until
from together_post_training.v1 import operations_pb2

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Running]:
    """A server whose trainer stands still until the test lets it go on."""
    with serving_watched(tmp_path / "store") as running:
        assert running.watched is not None
        running.watched.gate.clear()
        yield running


def state(running: Running, client: tinker.TrainingClient, sequence: int) -> int:
    """Of an operation, as the server has it."""
    name = f"sessions/{client.model_id}/operations/{sequence}"
    request = operations_pb2.GetOperationRequest(name=name)
    return running.caller.operations.GetOperation(request).state


def client_of(running: Running) -> tinker.TrainingClient:
    service = tinker.ServiceClient(base_url=f"grpc://{running.address}")
    return service.create_lora_training_client(MODEL, rank=4).result()


def test_trap_01_client_creators_serve_two_idioms(service):
    made = service.create_lora_training_client(MODEL, rank=4)
    assert isinstance(made, tinker.TrainingClient)
    assert isinstance(made, tinker.APIFuture)

    used_as_it_is = made.forward_backward([datum()], "cross_entropy").result()
    assert used_as_it_is.metrics["loss:sum"] > 0
    assert made.model_id.endswith(":train:0")
    assert made.holder is service.holder

    async def awaited() -> tinker.TrainingClient:
        return await made

    client = made.result()
    assert type(client) is tinker.TrainingClient
    assert asyncio.run(awaited()) is client is made.future().result()
    assert client.model_id == made.model_id

    path = client.save_weights_for_sampler("first").result().path
    for creating in (
        service.create_sampling_client(base_model=MODEL),
        service.create_sampling_client(model_path=path),
        client.create_sampling_client(path),
        client.save_weights_and_get_sampling_client(),
    ):
        assert isinstance(creating, tinker.SamplingClient)
        assert isinstance(creating, tinker.APIFuture)
        as_it_is = creating.sample(prompt(3), 1, greedy(2)).result()
        resolved = creating.result().sample(prompt(3), 1, greedy(2)).result()
        assert as_it_is.sequences[0].tokens == resolved.sequences[0].tokens == [4, 5]


def test_trap_01_creators_do_not_wait_for_the_server(fake):
    fake.inject("CreateSession", stall_s=0.5)
    service = tinker.ServiceClient(base_url=fake.address)
    start_s = time.monotonic()
    made = service.create_lora_training_client("fake")
    assert time.monotonic() - start_s < 0.4
    assert "pending" in repr(made)
    assert made.result(timeout=10).model_id


def test_trap_02_double_await(service):
    """Operations: the coroutine gives a future. Everything else: the coroutine gives the value."""

    async def main() -> None:
        client = await service.create_lora_training_client_async(base_model=MODEL, rank=4)
        assert type(client) is tinker.TrainingClient
        data = [datum()]

        def loss(data: Any, logprobs: list[Any]) -> Any:
            return -logprobs[0].sum(), {}

        saved = await (await client.save_state_async("s"))
        for twice in (
            client.forward_async(data, "cross_entropy"),
            client.forward_backward_async(data, "cross_entropy"),
            client.forward_backward_custom_async(data, loss),
            client.optim_step_async(ADAM),
            client.save_state_async("t"),
            client.save_weights_for_sampler_async("s"),
            client.load_state_async(saved.path),
            client.load_state_with_optimizer_async(saved.path),
        ):
            future = await twice
            assert isinstance(future, tinker.APIFuture)
            assert (await future) is (await future.result_async()) is future.result()

        sampler = await client.save_weights_and_get_sampling_client_async()
        resumed = await service.create_training_client_from_state_async(saved.path)
        whole = await service.create_training_client_from_state_with_optimizer_async(saved.path)
        opened = await service.create_sampling_client_async(base_model=MODEL)
        assert type(resumed) is type(whole) is tinker.TrainingClient
        assert type(opened) is type(sampler) is tinker.SamplingClient
        response = await sampler.sample_async(prompt(3), num_samples=1, sampling_params=greedy(1))
        assert response.sequences[0].tokens == [4]
        assert (await sampler.compute_logprobs_async(prompt(3, 4)))[0] is None
        assert await sampler.get_base_model_async() == MODEL
        assert (await client.get_info_async()).model_id == client.model_id
        capabilities = await service.get_server_capabilities_async()
        assert capabilities.supported_models[0].model_name == MODEL

    asyncio.run(main())


def test_trap_07_sample_is_a_concurrent_future_and_awaitable(sampler):
    def ask() -> Any:
        return sampler.sample(prompt(3), num_samples=1, sampling_params=greedy(2))

    future = ask()
    assert isinstance(future, concurrent.futures.Future)
    assert isinstance(future, tinker.APIFuture)
    assert future.result(timeout=10).sequences[0].tokens == [4, 5]
    finished = concurrent.futures.as_completed([ask() for _ in range(5)], timeout=10)
    assert [f.result().sequences[0].tokens for f in finished] == [[4, 5]] * 5
    scores = sampler.compute_logprobs(prompt(3, 4))
    done, _ = concurrent.futures.wait([ask(), scores], timeout=10)
    assert len(done) == 2
    assert scores.done()
    called = threading.Event()
    ask().add_done_callback(lambda _: called.set())
    assert called.wait(10)

    async def main() -> None:
        assert (await ask()).sequences[0].tokens == [4, 5]
        assert (await asyncio.wrap_future(ask())).sequences[0].tokens == [4, 5]
        responses = await asyncio.gather(*(ask() for _ in range(5)))
        assert [r.sequences[0].tokens for r in responses] == [[4, 5]] * 5
        assert (await asyncio.wait_for(ask(), 10)).sequences

    asyncio.run(main())


def test_trap_14_optim_step_takes_its_parameters_under_every_name(client):
    moved = []
    for call in (
        lambda: client.optim_step(ADAM),
        lambda: client.optim_step(optim_params=ADAM),
        lambda: client.optim_step(adam_params=ADAM),
        lambda: client.optim_step({"learning_rate": 0.05}),
        lambda: client.optim_step(adam_params={"learning_rate": 0.05}),
    ):
        client.forward_backward([datum()], "cross_entropy")
        moved.append(call().result().metrics["update_l2:mean"])
    assert all(moved)
    with pytest.raises(ValueError, match="not both"):
        client.optim_step(ADAM, adam_params=ADAM)
    for missing in (None, 0.05, [ADAM]):
        with pytest.raises(TypeError, match="Expected AdamParams or OptimParamsBase"):
            client.optim_step(missing)


def test_trap_15_what_newer_sdks_dropped_is_still_there(service, client, recwarn):
    models = service.get_server_capabilities().supported_models
    assert MODEL in [model.model_name for model in models]
    assert client.get_info().model_data.model_name == MODEL
    path = client.save_state("kept").result().path
    assert client.load_state(path).result().path == path
    assert client.load_state_with_optimizer(path).result().path == path
    rest = service.create_rest_client()
    assert isinstance(rest, tinker.RestClient)
    exported = client.save_weights_for_sampler("kept").result().path
    for link in (
        rest.get_checkpoint_archive_url_from_tinker_path(exported).result(),
        rest.get_checkpoint_archive_url(client.model_id, "sampler_weights/kept").result(),
        asyncio.run(rest.get_checkpoint_archive_url_from_tinker_path_async(exported)),
    ):
        assert link.url.startswith("http")
        assert link.expires.timestamp() > time.time()
    assert [str(w.message) for w in recwarn if issubclass(w.category, FutureWarning)] == []


def test_trap_20_result_that_times_out_leaves_the_operation_running(held):
    client = client_of(held)
    future = client.forward_backward([datum()], "cross_entropy")
    with pytest.raises(TimeoutError):
        future.result(timeout=0.1)
    assert not future.cancelled()
    held.watched.gate.set()
    assert future.result(timeout=10).metrics["loss:sum"] > 0


@pytest.mark.parametrize("style", ["result_async", "wait_for"])
def test_trap_20_await_that_times_out_cancels_the_operation(held, style):
    client = client_of(held)
    running = client.forward_backward([datum()], "cross_entropy")
    assert held.watched.started.wait(10)
    future = client.forward_backward([datum()], "cross_entropy")

    async def give_up() -> None:
        if style == "wait_for":
            await asyncio.wait_for(future, 0.1)
        else:
            await future.result_async(timeout=0.1)

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(timeout=10)
    wait_until(lambda: state(held, client, 2) == operations_pb2.OPERATION_STATE_CANCELLED)
    held.watched.gate.set()
    assert running.result(timeout=10).metrics["loss:sum"] > 0
    assert client.forward([datum()], "cross_entropy").result(timeout=10), "the client goes on"
    assert len(held.watched.passes) == 2, "what was cancelled before it started never ran"


def test_trap_24_the_constructor_takes_what_scripts_pass(address, monkeypatch):
    for key in ("dummy", "x", "EMPTY_TOKEN", "local"):
        made = tinker.ServiceClient(base_url=address, api_key=key, user_metadata={"run": "a"})
        assert made.get_server_capabilities().supported_models
    with pytest.warns(UserWarning, match="default_headers, timeout"):
        tinker.ServiceClient(base_url=address, timeout=60, default_headers={"a": "b"})
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    assert tinker.ServiceClient(base_url=address).get_server_capabilities().supported_models
    # Many scripts read a .env file after their imports.
    monkeypatch.setenv("TINKER_API_KEY", "from-the-environment")
    monkeypatch.setenv("TINKER_BASE_URL", address)
    late = tinker.ServiceClient()
    assert late.holder.connection.key == "from-the-environment"
    assert late.get_server_capabilities().supported_models


DEEP_IMPORTS = """
import together.post_training.tinker as tinker
from together.post_training.tinker import types
from together.post_training.tinker.types import LossFnType, ImageChunk
from together.post_training.tinker.types.tensor_data import TensorData
from together.post_training.tinker.types.image_chunk import ImageChunk as Chunk
from together.post_training.tinker.lib.public_interfaces import APIFuture, RestClient
from together.post_training.tinker.lib.public_interfaces.service_client import ServiceClient
from together.post_training.tinker.lib.public_interfaces.rest_client import RestClient as Rest
from together.post_training.tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture
from together.post_training.tinker.lib.retry_handler import RetryConfig
import tinker as genuine
assert ServiceClient is tinker.ServiceClient
assert RestClient is Rest is tinker.RestClient
assert TensorData is tinker.TensorData is genuine.TensorData
assert ImageChunk is Chunk
assert tinker.__version__ == genuine.__version__ and tinker.__title__ == "tinker"
"""


def test_trap_24_deep_imports_resolve_under_the_new_name():
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tinker_compat/_alias")])
    subprocess.run(
        [sys.executable, "-c", DEEP_IMPORTS],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])},
        check=True,
        timeout=60,
    )


def test_trap_24_methods_are_patched_on_the_class(service, monkeypatch):
    seen: list[str] = []
    original = tinker.TrainingClient.optim_step
    assert inspect.isfunction(original)

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append("optim_step")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(tinker.TrainingClient, "optim_step", recording)
    made = service.create_lora_training_client(MODEL, rank=4)
    made.optim_step(ADAM).result()
    made.result().optim_step(ADAM).result()
    assert seen == ["optim_step"] * 2


def test_trap_24_objects_of_the_genuine_package_are_accepted(client):
    made = genuine.Datum(
        model_input=genuine.ModelInput.from_ints([3, 4]),
        loss_fn_inputs={"target_tokens": [4, 5], "weights": [1.0, 1.0]},  # pyright: ignore[reportArgumentType]
    )
    assert isinstance(made, tinker.Datum)
    loss = client.forward_backward([made], "cross_entropy").result().metrics["loss:sum"]
    assert loss == close(-2 * HIT)
    assert client.optim_step(genuine.AdamParams(learning_rate=0.0)).result()


def test_trap_25_sampling_clients_go_to_worker_processes(client):
    sampler = client.save_weights_and_get_sampling_client().result()
    expected = scored(sampler)
    assert scored(pickle.loads(pickle.dumps(sampler))) == expected
    copy = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle())
    assert scored(copy) == expected
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        assert list(pool.map(scored, [sampler, sampler])) == [expected] * 2


def test_trap_25_one_future_serves_many_threads_and_loops(client):
    future = client.forward([datum()], "cross_entropy")
    results: list[Any] = []

    async def wait() -> None:
        results.append(await future)

    ways = [lambda: asyncio.run(wait()), lambda: results.append(future.result())] * 4
    threads = [threading.Thread(target=way) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(result is results[0] for result in results)


def test_trap_25_sync_calls_work_inside_a_running_loop_and_only_warn(held, caplog):
    client = client_of(held)
    watched = held.watched

    async def cell() -> Any:
        future = client.forward_backward([datum()], "cross_entropy")
        threading.Timer(0.2, watched.gate.set).start()
        return future.result()

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(cell()).metrics["loss:sum"] > 0
    assert "inside a running event loop" in caplog.text


def test_trap_25_hundreds_of_samples_at_once(sampler):
    async def main() -> list[types.SampleResponse]:
        calls = (
            sampler.sample_async(prompt=prompt(i % 16), num_samples=1, sampling_params=greedy(2))
            for i in range(600)
        )
        return await asyncio.gather(*calls)

    tokens = [response.sequences[0].tokens for response in asyncio.run(main())]
    assert tokens == [[(i + 1) % 16, (i + 2) % 16] for i in range(600)]
