"""Scripts with much under way at once, as people write them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import threading
from collections.abc import Sequence

import pytest
from tinker import types

import tinker_compat as tinker
from tests.compat.data import HIT, datum, greedy, prompt

NUM_REQUESTS = 300


def tokens_of(response: types.SampleResponse) -> list[int]:
    return list(response.sequences[0].tokens)


def test_hundreds_of_samples_are_gathered_each_its_own(sampler):
    """In the order in which they were asked for."""

    async def main() -> list[types.SampleResponse]:
        calls = [sampler.sample_async(prompt(i % 16), 1, greedy(2)) for i in range(NUM_REQUESTS)]
        return await asyncio.gather(*calls)

    responses = asyncio.run(main())
    expected = [[(i + 1) % 16, (i + 2) % 16] for i in range(NUM_REQUESTS)]
    assert [tokens_of(response) for response in responses] == expected


def test_gather_keeps_the_answers_of_the_others_when_one_fails(sampler):
    async def main() -> list[types.SampleResponse | BaseException]:
        calls = [sampler.sample_async(prompt(i), 1, greedy(1)) for i in range(8)]
        calls.append(sampler.sample_async(prompt(99), 1, greedy(1)))
        return await asyncio.gather(*calls, return_exceptions=True)

    *answers, failure = asyncio.run(main())
    assert isinstance(failure, tinker.BadRequestError)
    tokens = [tokens_of(a) for a in answers if isinstance(a, types.SampleResponse)]
    assert tokens == [[i + 1] for i in range(8)]


def test_a_semaphore_and_as_completed_work(sampler):
    async def rollout(gate: asyncio.Semaphore, token: int) -> int:
        async with gate:
            return tokens_of(await sampler.sample_async(prompt(token), 1, greedy(1)))[0]

    async def main() -> set[int]:
        gate = asyncio.Semaphore(8)
        calls = [rollout(gate, i % 16) for i in range(64)]
        return {await finished for finished in asyncio.as_completed(calls)}

    assert asyncio.run(main()) == set(range(16))


def test_a_task_group_that_fails_cancels_what_it_started(sampler):
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                long = types.SamplingParams(max_tokens=1000)
                group.create_task(sampler.sample_async(prompt(3), 1, long))
            group.create_task(sampler.sample_async(prompt(99), 1, greedy(1)))

    with pytest.raises(ExceptionGroup) as failure:
        asyncio.run(asyncio.wait_for(main(), 20))
    assert [type(e) for e in failure.value.exceptions] == [tinker.BadRequestError]
    assert tokens_of(sampler.sample(prompt(3), 1, greedy(1)).result()) == [4]


def test_plain_futures_are_waited_for_in_any_order(sampler):
    futures = {sampler.sample(prompt(i % 16), 1, greedy(1)): i % 16 for i in range(NUM_REQUESTS)}
    for future in concurrent.futures.as_completed(futures, timeout=60):
        assert tokens_of(future.result()) == [(futures[future] + 1) % 16]


def test_threads_share_one_client(client, sampler):
    """Sampling and training from a pool of threads: every operation counts, whichever thread asked for it."""

    def work(token: int) -> list[int]:
        client.forward_backward([datum()], "cross_entropy")
        return tokens_of(sampler.sample(prompt(token), 1, greedy(1)).result())

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(15))) == [[i + 1] for i in range(15)]
    done = client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    assert done.metrics
    after = client.forward([datum()], "cross_entropy").result()
    assert after.loss_fn_outputs[0]["logprobs"].tolist()[0] > HIT


def test_loops_in_threads_share_one_client(sampler):
    """Each has a loop of its own, all of them at once."""
    results: dict[int, list[list[int]]] = {}

    async def gather(token: int) -> list[list[int]]:
        calls = [sampler.sample_async(prompt(token), 1, greedy(2)) for _ in range(20)]
        return [tokens_of(response) for response in await asyncio.gather(*calls)]

    def run(token: int) -> None:
        results[token] = asyncio.run(gather(token))

    threads = [threading.Thread(target=run, args=(token,)) for token in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {token: [[token + 1, token + 2]] * 20 for token in range(5)}


def test_a_future_made_in_one_loop_is_awaited_in_another(client):
    async def submit() -> tinker.APIFuture[types.ForwardBackwardOutput]:
        return await client.forward_async([datum()], "cross_entropy")

    async def collect(future: tinker.APIFuture[types.ForwardBackwardOutput]) -> float:
        return (await future).loss_fn_outputs[0]["logprobs"].tolist()[0]

    assert asyncio.run(collect(asyncio.run(submit()))) == pytest.approx(HIT, abs=1e-5)


def test_waiting_in_a_running_loop_works_and_says_what_it_blocks(sampler, caplog):
    async def main() -> list[int]:
        return tokens_of(sampler.sample(prompt(3), 1, greedy(1)).result(timeout=20))

    assert asyncio.run(main()) == [4]
    (record,) = caplog.records
    assert "inside a running event loop, which it blocks" in record.getMessage()


def test_waiting_in_threads_does_not_block_the_loop(sampler):
    async def main() -> tuple[list[list[int]], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        calls = [
            asyncio.to_thread(lambda t=t: sampler.sample(prompt(t), 1, greedy(1)).result())
            for t in range(12)
        ]
        responses = await asyncio.gather(*calls)
        ticking.cancel()
        return [tokens_of(response) for response in responses], ticks

    tokens, ticks = asyncio.run(main())
    assert tokens == [[t + 1] for t in range(12)]
    assert ticks > 1


def rollouts(sampler: tinker.SamplingClient, starts: Sequence[int]) -> list[list[int]]:
    """In a worker: many at once, from its own loop."""

    async def main() -> list[list[int]]:
        calls = [sampler.sample_async(prompt(start), 1, greedy(2)) for start in starts]
        return [tokens_of(response) for response in await asyncio.gather(*calls)]

    return asyncio.run(main())


def rollout_by_handle(handle: str, start: int) -> list[int]:
    sampler = tinker.SamplingClient.from_sampler_handle(handle)
    return tokens_of(sampler.sample(prompt(start), 1, greedy(2)).result())


def test_a_pool_of_processes_samples_from_the_weights_of_its_moment(client):
    """Clients are pickled with every task; what is trained meanwhile changes none of them."""
    before = client.save_weights_and_get_sampling_client()
    teach = datum([3], target_tokens=[9], weights=[1.0])
    for _ in range(8):
        client.forward_backward([teach], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1.0))
    after = client.save_weights_and_get_sampling_client().result()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn) as pool:
        chunks = [[3] * 20, [3] * 20]
        old = [pool.submit(rollouts, before, chunk) for chunk in chunks]
        new = [pool.submit(rollouts, after, chunk) for chunk in chunks]
        handle = pool.submit(rollout_by_handle, after.get_sampler_handle(), 3)
        assert [f.result(timeout=60) for f in old] == [[[4, 5]] * 20] * 2
        assert {tokens[0] for f in new for tokens in f.result(timeout=60)} == {9}
        assert handle.result(timeout=60)[0] == 9
    assert tokens_of(before.sample(prompt(3), 1, greedy(1)).result()) == [4]
