"""Several generators as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from backend.generator.base import SampleCall, SampleResult
from backend.generator.bigram import BigramGenerator
from backend.generator.replicas import Replicas
from backend.trainer import bigram
from backend.trainer.base import FullWeights, Weights
from backend.trainer.bigram import HEAD
from tests.generator.calls import call, random_prompt
from together_post_training.errors import PostTrainingError, Reason, fail

MODEL = bigram.load("builtin:bigram16")
WEIGHTS = FullWeights(tensors={HEAD: np.eye(16)})


class Faulty(BigramGenerator):
    """Fails, or keeps the caller waiting, where the test says so."""

    def __init__(self) -> None:
        super().__init__(MODEL)
        self.calls: list[SampleCall] = []
        self.added: list[str] = []
        self.sample_error: PostTrainingError | None = None
        self.add_error: PostTrainingError | None = None
        self.may_add = asyncio.Event()
        self.may_add.set()
        self.may_sample = asyncio.Event()
        self.may_sample.set()

    async def add_snapshot(self, snapshot: str, weights: Weights) -> None:
        await self.may_add.wait()
        if self.add_error is not None:
            raise self.add_error
        await super().add_snapshot(snapshot, weights)
        self.added.append(snapshot)

    def drop_snapshot(self, snapshot: str) -> None:
        super().drop_snapshot(snapshot)
        self.added.remove(snapshot)

    async def sample(self, call: SampleCall) -> SampleResult:
        self.calls.append(call)
        await self.may_sample.wait()
        if self.sample_error is not None:
            raise self.sample_error
        return await super().sample(call)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def with_replicas(
    count: int, test: Callable[[Replicas, list[Faulty], Clock], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> None:
        faulty, clock = [Faulty() for _ in range(count)], Clock()
        replicas = Replicas(faulty, out_s=10.0, monotonic=clock)
        await test(replicas, faulty, clock)
        await replicas.close()

    asyncio.run(main())


def unavailable() -> PostTrainingError:
    return fail(Reason.UNAVAILABLE, "The engine is gone.")


def tokens(result: SampleResult) -> list[list[int]]:
    return [sequence.tokens.tolist() for sequence in result.sequences]


def test_replicas_give_what_one_generator_gives():
    async def test(replicas: Replicas, faulty: list[Faulty], clock: Clock) -> None:
        alone = BigramGenerator(MODEL)
        for generator in (alone, replicas):
            await generator.add_snapshot("s", WEIGHTS)
        asked = [
            call([i % 16], max_tokens=5, seed=i, num_samples=2, snapshot=("s", None)[i % 2])
            for i in range(20)
        ]
        got = await asyncio.gather(*(replicas.sample(c) for c in asked))
        assert [tokens(g) for g in got] == [tokens(await alone.sample(c)) for c in asked]
        assert all(f.calls for f in faulty)
        assert replicas.model == alone.model

    with_replicas(3, test)


def test_snapshot_is_on_all_replicas_until_it_is_dropped():
    async def test(replicas: Replicas, faulty: list[Faulty], clock: Clock) -> None:
        await replicas.add_snapshot("s", WEIGHTS)
        assert [f.added for f in faulty] == [["s"]] * 3
        replicas.drop_snapshot("s")
        assert [f.added for f in faulty] == [[]] * 3
        with pytest.raises(PostTrainingError) as refused:
            await replicas.sample(call([1], max_tokens=1, snapshot="s"))
        assert refused.value.reason is Reason.SNAPSHOT_NOT_FOUND

    with_replicas(3, test)


def test_snapshot_is_on_no_replica_if_one_refuses_it():
    async def test(replicas: Replicas, faulty: list[Faulty], clock: Clock) -> None:
        faulty[1].add_error = fail(Reason.INCOMPATIBLE_CHECKPOINT, "It does not fit.")
        with pytest.raises(PostTrainingError, match="does not fit"):
            await replicas.add_snapshot("s", WEIGHTS)
        assert [f.added for f in faulty] == [[]] * 3

    with_replicas(3, test)


def test_snapshot_is_on_no_replica_if_its_publisher_is_cancelled():
    async def test(replicas: Replicas, faulty: list[Faulty], clock: Clock) -> None:
        faulty[1].may_add.clear()
        adding = asyncio.ensure_future(replicas.add_snapshot("s", WEIGHTS))
        while not faulty[2].added:
            await asyncio.sleep(0)
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        faulty[1].may_add.set()
        await asyncio.sleep(0.01)
        assert [f.added for f in faulty] == [[]] * 3

    with_replicas(3, test)


def test_call_to_a_replica_that_is_gone_is_answered_by_another():
    async def test(replicas: Replicas, faulty: list[Faulty], clock: Clock) -> None:
        faulty[0].sample_error = unavailable()
        asked = [call([i], max_tokens=4, seed=i) for i in range(8)]
        got = await asyncio.gather(*(replicas.sample(c) for c in asked))
        alone = BigramGenerator(MODEL)
        assert [tokens(g) for g in got] == [tokens(await alone.sample(c)) for c in asked]
        assert replicas._router.loads == [0, 0]

    with_replicas(2, test)


def test_replica_that_was_gone_is_asked_again_after_a_while():
    async def test(replicas: Replicas, faulty: list[Faulty], clock: Clock) -> None:
        faulty[0].sample_error = unavailable()
        for i in range(4):
            await replicas.sample(call([i], max_tokens=1))
        assert len(faulty[0].calls) == 1, "then it was left out"
        faulty[0].sample_error = None
        clock.now += 10
        for i in range(4):
            await replicas.sample(call([i], max_tokens=1))
        assert len(faulty[0].calls) > 1

    with_replicas(2, test)


def test_call_is_tried_on_two_replicas_at_most():
    async def test(replicas: Replicas, faulty: list[Faulty], clock: Clock) -> None:
        for f in faulty:
            f.sample_error = unavailable()
        with pytest.raises(PostTrainingError, match="is gone"):
            await replicas.sample(call([1], max_tokens=1))
        assert sum(len(f.calls) for f in faulty) == 2

    with_replicas(3, test)


def test_when_all_are_gone_one_is_asked_all_the_same():
    """It may be back: nobody else is there to say so."""

    async def test(replicas: Replicas, faulty: list[Faulty], clock: Clock) -> None:
        for f in faulty:
            f.sample_error = unavailable()
        for _ in range(2):
            with pytest.raises(PostTrainingError):
                await replicas.sample(call([1], max_tokens=1))
        for f in faulty:
            f.sample_error = None
        assert (await replicas.sample(call([1], max_tokens=1))).sequences

    with_replicas(2, test)


def test_call_that_is_wrong_is_not_tried_elsewhere():
    async def test(replicas: Replicas, faulty: list[Faulty], clock: Clock) -> None:
        faulty[0].sample_error = fail(Reason.TOKEN_OUT_OF_RANGE, "No such token.")
        with pytest.raises(PostTrainingError, match="No such token"):
            await replicas.sample(call([1], max_tokens=1))
        assert not faulty[1].calls

    with_replicas(2, test)


def test_call_that_is_cancelled_is_cancelled_where_it_runs_and_counts_no_more():
    async def test(replicas: Replicas, faulty: list[Faulty], clock: Clock) -> None:
        faulty[0].may_sample.clear()
        sampling = asyncio.ensure_future(replicas.sample(call([1], max_tokens=1)))
        while not faulty[0].calls:
            await asyncio.sleep(0)
        assert replicas._router.loads == [2, 0]
        sampling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sampling
        assert replicas._router.loads == [0, 0]

    with_replicas(2, test)


def test_calls_spread_over_replicas_while_they_run():
    async def test(replicas: Replicas, faulty: list[Faulty], clock: Clock) -> None:
        for f in faulty:
            f.may_sample.clear()
        running = [
            asyncio.ensure_future(
                replicas.sample(call(random_prompt(8, seed=i, vocab_size=16), max_tokens=4))
            )
            for i in range(30)
        ]
        await asyncio.sleep(0)
        assert [len(f.calls) for f in faulty] == [10, 10, 10]
        for f in faulty:
            f.may_sample.set()
        await asyncio.gather(*running)

    with_replicas(3, test)


def test_nothing_is_sampled_after_the_end():
    async def test(replicas: Replicas, faulty: list[Faulty], clock: Clock) -> None:
        await replicas.close()
        with pytest.raises(PostTrainingError, match="closed"):
            await replicas.sample(call([1], max_tokens=1))
        assert not any(f.calls for f in faulty)

    with_replicas(2, test)
