"""What futures do, row by row."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import sys
import threading
import time
import types as python_types
from collections.abc import Callable
from typing import Any

import pytest
from tinker import types

import tinker_compat as tinker
from tests.client.fake_service import FakeService
from tests.compat.data import datum, prompt
from together_post_training.client.loop import background_loop
from together_post_training.errors import Reason, fail


@pytest.fixture
def training(fake: FakeService) -> tinker.TrainingClient:
    service = tinker.ServiceClient(base_url=fake.address)
    return service.create_lora_training_client("fake").result()


@pytest.fixture
def stuck(fake: FakeService, training: tinker.TrainingClient) -> Callable[[], Any]:
    """A forward_backward that does not end by itself."""
    fake.unfinished = set(range(1, 1000))

    def submit() -> Any:
        return training.forward_backward([datum()], "cross_entropy")

    return submit


@pytest.fixture
def release(fake: FakeService) -> Callable[[], None]:
    def end_all() -> None:
        fake.unfinished.clear()
        fake.nudge()

    return end_all


def refusing(fake: FakeService) -> None:
    def refuse(request: Any) -> None:
        raise fail(Reason.UNKNOWN_LOSS, "refused")

    fake.behave = refuse


def until(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.01)


def step(training: tinker.TrainingClient) -> Any:
    return training.optim_step(types.AdamParams())


def test_result_gives_the_same_object_again_and_again(training):
    future = step(training)
    assert future.result() is future.result()


def test_result_raises_the_same_error_again_and_again(fake, training):
    refusing(fake)
    future = step(training)
    errors = []
    for _ in range(2):
        with pytest.raises(tinker.BadRequestError) as refused:
            future.result()
        errors.append(refused.value)
    assert errors[0] is errors[1]


def test_result_that_is_late_times_out_and_the_operation_goes_on(stuck, release):
    future = stuck()
    with pytest.raises(TimeoutError) as late:
        future.result(timeout=0.05)
    assert str(late.value) == ""
    release()
    assert future.result(timeout=5).metrics["loss:sum"] == 1.0


def test_await_may_be_repeated_also_after_result_and_on_other_loops(training):
    future = step(training)

    async def twice() -> Any:
        return await future, await future

    first, second = asyncio.run(twice())
    assert first is second is future.result()
    assert asyncio.run(twice())[0] is first


@pytest.mark.parametrize("style", ["result_async", "wait_for"])
def test_result_async_that_is_late_cancels_the_operation_and_the_client_goes_on(
    fake, training, stuck, release, style
):
    future = stuck()

    async def wait() -> None:
        until(lambda: fake.received("WaitOperation"))
        if style == "wait_for":
            await asyncio.wait_for(future, 0.05)
        else:
            await future.result_async(timeout=0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(wait())
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(timeout=5)

    async def wait_again() -> None:
        await future

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(wait_again())
    until(lambda: fake.received("CancelOperation"))
    release()
    assert step(training).result(timeout=5)


def test_async_twins_of_operations_give_a_future(training):
    async def main() -> list[Any]:
        data = [datum()]
        passed = await training.forward_async(data, "cross_entropy")
        trained = await training.forward_backward_async(data, "cross_entropy")
        stepped = await training.optim_step_async(types.AdamParams())
        saved = await training.save_state_async("a")
        exported = await training.save_weights_for_sampler_async("a")
        loaded = await training.load_state_async("tinker://x/weights/a")
        reloaded = await training.load_state_with_optimizer_async("tinker://x/weights/a")
        futures = [passed, trained, stepped, saved, exported, loaded, reloaded]
        assert all(isinstance(f, tinker.APIFuture) for f in futures)
        return [await f for f in futures]

    results = asyncio.run(main())
    assert [type(r).__name__ for r in results] == [
        "ForwardBackwardOutput",
        "ForwardBackwardOutput",
        "OptimStepResponse",
        "SaveWeightsResponse",
        "SaveWeightsForSamplerResponse",
        "LoadWeightsResponse",
        "LoadWeightsResponse",
    ]


def test_async_twins_may_be_collected_by_result_and_result_async(training):
    async def main() -> None:
        assert (await training.optim_step_async(types.AdamParams())).result()
        assert await (await training.optim_step_async(types.AdamParams())).result_async()
        assert await (await training.optim_step_async(types.AdamParams()))

    asyncio.run(main())


def test_async_twins_that_give_values_give_them_at_once(training):
    async def main() -> None:
        sampler = await training.save_weights_and_get_sampling_client_async()
        assert type(sampler) is tinker.SamplingClient
        reply = await sampler.sample_async(prompt(1), 1, types.SamplingParams(max_tokens=2))
        assert reply.sequences[0].tokens == [0, 1]
        assert (await sampler.compute_logprobs_async(prompt(1, 2)))[0] is None
        assert await sampler.get_base_model_async() == "fake"
        assert (await training.get_info_async()).model_id == training.model_id
        opened = await training.create_sampling_client_async("tinker://x/weights/a")
        assert type(opened) is tinker.SamplingClient

    asyncio.run(main())


def test_asyncio_gather_wait_for_ensure_future_and_create_task(training):
    async def main() -> None:
        gathered = await asyncio.gather(step(training), step(training))
        assert len(gathered) == 2
        assert await asyncio.wait_for(step(training), 5)
        assert await asyncio.ensure_future(step(training))
        with pytest.raises(TypeError):
            await asyncio.create_task(step(training))  # pyright: ignore[reportArgumentType]
        assert await asyncio.create_task(step(training).coroutine())

    asyncio.run(main())


def test_sample_futures_work_with_concurrent_futures_and_wrap_future(training):
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=2)
    futures = [sampler.sample(prompt(1), 1, params) for _ in range(5)]
    assert all(isinstance(f, concurrent.futures.Future) for f in futures)
    assert all(isinstance(f, tinker.APIFuture) for f in futures)
    done, pending = concurrent.futures.wait(futures, timeout=5)
    assert (len(done), len(pending)) == (5, 0)
    assert set(concurrent.futures.as_completed(futures, timeout=5)) == set(futures)
    called: list[Any] = []
    futures[0].add_done_callback(called.append)
    assert called == [futures[0]]
    assert futures[0].done()
    assert futures[0].exception() is None

    async def main() -> Any:
        return await asyncio.wrap_future(sampler.sample(prompt(1), 1, params))

    assert asyncio.run(main()).sequences[0].tokens == [0, 1]


def test_training_futures_give_a_concurrent_future(training):
    future = step(training).future()
    assert isinstance(future, concurrent.futures.Future)
    assert concurrent.futures.wait([future], timeout=5).done == {future}


def test_cancelling_a_sample_hangs_up(fake, training):
    sampler = training.save_weights_and_get_sampling_client().result()
    fake.inject("Sample", stall_s=30)
    future = sampler.sample(prompt(1), 1, types.SamplingParams(max_tokens=2))
    until(lambda: fake.received("Sample"))
    assert future.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(timeout=5)
    assert sampler.sample(prompt(1), 1, types.SamplingParams(max_tokens=2)).result(timeout=5)


def test_result_inside_a_running_loop_blocks_and_warns_with_the_stack(stuck, release, caplog):
    future = stuck()
    releasing = threading.Thread(target=lambda: (until(lambda: caplog.records), release()))

    async def main() -> Any:
        return future.result(timeout=10)

    with caplog.at_level(logging.WARNING):
        releasing.start()
        assert asyncio.run(main())
        releasing.join()
    (record,) = caplog.records
    assert "called inside a running event loop" in record.message
    assert "test_result_inside_a_running_loop" in record.message


def test_result_of_a_finished_future_does_not_warn_inside_a_running_loop(training, caplog):
    future = step(training)
    future.result()

    async def main() -> Any:
        return future.result()

    asyncio.run(main())
    assert caplog.records == []


def test_result_inside_a_notebook_does_not_warn(stuck, release, caplog, monkeypatch):
    class ZMQInteractiveShell:
        pass

    notebook = python_types.SimpleNamespace(get_ipython=ZMQInteractiveShell)
    monkeypatch.setitem(sys.modules, "IPython", notebook)

    future = stuck()

    async def main() -> Any:
        asyncio.get_running_loop().run_in_executor(None, lambda: (time.sleep(0.1), release()))
        return future.result(timeout=10)

    assert asyncio.run(main())
    assert caplog.records == []


def test_result_on_the_clients_own_loop_is_refused(stuck, release):
    pending = stuck()

    async def on_the_loop() -> None:
        pending.result()

    with pytest.raises(RuntimeError, match="wait for itself forever"):
        background_loop().start(on_the_loop()).result(5)
    release()
    pending.result(5)


def test_a_dropped_future_still_runs(fake, training):
    step(training)
    gc.collect()
    until(lambda: fake.received("OptimStep"))


def test_futures_work_from_other_threads_and_loops_at_once(training):
    future = step(training)
    results: list[Any] = []

    async def wait() -> None:
        results.append(await future)

    threads = [threading.Thread(target=lambda: asyncio.run(wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(map(id, results))) == 1


def test_nothing_warns_of_the_future(training, recwarn):
    """Under -W error the old idioms go on."""
    sampler = training.save_weights_and_get_sampling_client()
    sampler.sample(prompt(1), 1, types.SamplingParams(max_tokens=2)).done()
    training.load_state("tinker://x/weights/a").result()
    assert [str(w.message) for w in recwarn] == []
