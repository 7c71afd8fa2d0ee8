"""What client-creating calls return: futures that are clients too."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tinker import types

import tinker_compat as tinker
from tests.compat.data import datum, prompt
from together_post_training.errors import Reason, fail


@pytest.fixture
def service(fake) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=fake.address)


def test_creators_return_at_once_what_is_a_future_and_a_client(fake, service):
    fake.inject("CreateSession", stall_s=0.5)
    training = service.create_lora_training_client("fake")
    assert "pending" in repr(training)
    assert isinstance(training, tinker.TrainingClient)
    assert isinstance(training, tinker.APIFuture)
    assert isinstance(training, tinker.BackcompatTrainingClientFuture)
    sampler = service.create_sampling_client(base_model="fake")
    assert isinstance(sampler, tinker.SamplingClient)
    assert isinstance(sampler, tinker.APIFuture)
    assert type(training.result(5)) is tinker.TrainingClient
    assert type(sampler.result(5)) is tinker.SamplingClient


def test_a_client_future_is_used_as_the_client_it_will_be(service):
    training = service.create_lora_training_client("fake")
    assert training.forward_backward([datum()], "cross_entropy").result().metrics
    assert training.optim_step(adam_params=types.AdamParams()).result()
    assert training.model_id == training.result().model_id
    assert training.holder is service.holder
    assert training.get_info().model_data.model_name == "fake"
    sampler = training.save_weights_and_get_sampling_client(kind="snapshot")
    assert sampler.sample(prompt(1), 1, types.SamplingParams(max_tokens=2)).result()
    assert sampler.get_base_model() == "fake"
    assert "TrainingClient" in repr(training)


def test_a_client_future_is_awaited_and_gives_the_same_client_each_time(service):
    training = service.create_lora_training_client("fake")

    async def main() -> list[object]:
        return [await training, await training.result_async(5), await training.coroutine()]

    clients = asyncio.run(main())
    clients += [training.result(), training.future().result()]
    assert len(set(map(id, clients))) == 1
    assert type(clients[0]) is tinker.TrainingClient


def test_async_twins_of_a_client_future_do_not_block_the_loop(fake, service):
    fake.inject("CreateSession", stall_s=0.4)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async def main() -> None:
        ticking = asyncio.create_task(tick())
        training = service.create_lora_training_client("fake")
        await (await training.forward_backward_async([datum()], "cross_entropy"))
        ticking.cancel()

    asyncio.run(main())
    assert ticks > 10


def test_async_creators_give_the_client_itself(service):
    async def main() -> list[type]:
        path = "tinker://x/weights/a"
        return [
            type(await service.create_lora_training_client_async("fake")),
            type(await service.create_training_client_from_state_async(path)),
            type(await service.create_training_client_from_state_with_optimizer_async(path)),
            type(await service.create_sampling_client_async(model_path=path)),
        ]

    assert asyncio.run(main()) == [tinker.TrainingClient] * 3 + [tinker.SamplingClient]


def test_a_client_that_cannot_be_made_says_so_at_its_first_use_and_by_result(fake, service):
    error = fail(Reason.MODEL_NOT_FOUND, "Unknown base model 'x': this server serves y.", model="x")
    fake.inject("CreateSession", error=error, times=9)
    training = service.create_lora_training_client("x")
    for use in (
        training.result,
        lambda: training.model_id,
        lambda: training.forward([datum()], "cross_entropy"),
    ):
        with pytest.raises(tinker.NotFoundError, match=r"'x'.*serves y"):
            use()
    assert "failed" in repr(training)


def test_private_names_of_a_client_future_are_not_the_clients(service):
    training = service.create_lora_training_client("fake")
    with pytest.raises(AttributeError):
        training._no_such_thing  # noqa: B018


def test_methods_patched_on_the_class_are_used_by_clients_and_client_futures(service, monkeypatch):
    calls: list[str] = []
    original = tinker.TrainingClient.forward_backward

    def counted(self, data, loss_fn, loss_fn_config=None):
        calls.append(loss_fn)
        return original(self, data, loss_fn, loss_fn_config)

    monkeypatch.setattr(tinker.TrainingClient, "forward_backward", counted)
    training = service.create_lora_training_client("fake")
    training.forward_backward([datum()], "cross_entropy").result()
    training.result().forward_backward([datum()], "ppo").result()

    async def main() -> None:
        await (await training.forward_backward_async([datum()], "cispo"))

    asyncio.run(main())
    assert calls == ["cross_entropy", "ppo", "cispo"]


def test_clients_made_in_threads_have_ids_of_their_own(service):
    made: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: made.append(service.create_lora_training_client("fake").model_id)
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    session = service.holder.get_session_id()
    assert sorted(made) == sorted(f"{session}:train:{i}" for i in range(8))
