"""A warm answer equals a cold one: prefixes that were read before, and prompts that are read in parts (law 16)."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.generator.base import SampleCall, SampleResult
from backend.generator.embedded import EmbeddedGenerator
from backend.trainer.base import Adapter
from backend.trainer.base_model import BaseModel
from tests.generator.calls import call, random_prompt
from tests.generator.conftest import Wait
from tests.generator.oracle import (
    TOLERANCE,
    assert_logprobs_are_of,
    assert_same_answer,
    merged,
    publish,
    random_adapter,
    score,
)
from together_post_training.errors import PostTrainingError, Reason

SampleAll = Callable[..., list[SampleResult]]
NUM_SHARED = 40


@pytest.fixture
def fresh(base_of: Callable[[str], BaseModel], wait: Wait) -> Iterator[Callable[..., Any]]:
    """Makes generators that have read nothing yet."""
    made: list[EmbeddedGenerator] = []

    def make(name: str = "qwen3", **options: Any) -> EmbeddedGenerator:
        made.append(EmbeddedGenerator(base_of(name), **options))
        return made[-1]

    yield make
    for generator in made:
        wait(generator.close())


def adapters(base: BaseModel) -> list[Adapter | None]:
    return [None, random_adapter(base, seed=21), random_adapter(base, seed=22, rank=2)]


def assert_scores(result: SampleResult, expected: np.ndarray) -> None:
    assert result.prompt_logprobs is not None
    np.testing.assert_allclose(result.prompt_logprobs, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3_text", "qwen3_moe"])
def test_a_warm_answer_equals_a_cold_one(base_of, fresh, sample_all: SampleAll, name: str):
    """Some of these have windows far shorter than the prefix."""
    generator = fresh(name)
    asked = call(random_prompt(50), max_tokens=10, num_samples=2, topk_sample_logprobs=3)
    (cold,) = sample_all(generator, asked)
    (warm,) = sample_all(generator, asked)
    assert (cold.cache_hit_tokens, warm.cache_hit_tokens) == (0, 48)
    module = merged(base_of(name), None)
    assert_same_answer(module, asked, warm, cold)
    for sequence in warm.sequences:
        assert_logprobs_are_of(module, asked, sequence)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    calls=st.lists(
        st.tuples(
            st.integers(0, 2),  # the weights
            st.integers(0, 2),  # which prefix
            st.integers(0, NUM_SHARED),  # how much of it
            st.integers(1, 12),  # tokens of its own
            st.booleans(),  # whether it is asked together with the one before
        ),
        min_size=1,
        max_size=8,
    ),
    chunk=st.sampled_from([1, 5, 16, 512]),
)
def test_whatever_was_read_before_changes_nothing(
    base_of, generator_of, wait: Wait, sample_all, calls, chunk
):
    """Under several snapshots, interleaved and at once, however prompts are cut. Cold: a call of its own, on a
    generator that takes no prefix from what was read before."""
    base = base_of("qwen3")
    some = adapters(base)
    warm, cold = EmbeddedGenerator(base, max_prefill_tokens=chunk), generator_of("qwen3")
    names = [[None if a is None else publish(g, a) for a in some] for g in (warm, cold)]
    asked, groups = [], []
    for i, (weights, prefix, num_shared, num_own, is_joined) in enumerate(calls):
        prompt = random_prompt(NUM_SHARED, seed=prefix)[:num_shared]
        one = call(prompt + random_prompt(num_own, seed=50 + i), max_tokens=5, seed=i)
        asked.append((weights, one))
        if not (is_joined and groups):
            groups.append([])
        groups[-1].append(i)
    got: dict[int, SampleResult] = {}
    for group in groups:
        ready = [replace(asked[i][1], snapshot=names[0][asked[i][0]]) for i in group]
        got.update(zip(group, sample_all(warm, *ready), strict=True))
    for i, (weights, one) in enumerate(asked):
        (alone,) = sample_all(cold, replace(one, snapshot=names[1][weights], prompt_logprobs=True))
        assert alone.cache_hit_tokens == 0
        assert_same_answer(merged(base, some[weights]), one, got[i], alone)
    for name in names[1][1:]:
        assert name is not None
        cold.drop_snapshot(name)
    wait(warm.close())


def test_snapshots_do_not_share_what_was_read(base_of, fresh, sample_all: SampleAll):
    base, generator = base_of("qwen3"), fresh()
    adapter = random_adapter(base, seed=5)
    twins = [publish(generator, adapter), publish(generator, adapter), None]
    asked = call(random_prompt(50), max_tokens=4)
    for snapshot in twins:
        (result,) = sample_all(generator, replace(asked, snapshot=snapshot))
        assert result.cache_hit_tokens == 0
        weights = None if snapshot is None else adapter
        assert_logprobs_are_of(merged(base, weights), asked, result.sequences[0])
    for snapshot in twins:
        (result,) = sample_all(generator, replace(asked, snapshot=snapshot))
        assert result.cache_hit_tokens == 48


def test_the_next_turn_reads_only_what_is_new(base_of, fresh, sample_all: SampleAll):
    """The prompt, the answer and what follows; under an adapter."""
    base, generator = base_of("qwen3"), fresh()
    adapter = random_adapter(base, seed=6)
    asked = call(random_prompt(20), max_tokens=20, snapshot=publish(generator, adapter))
    (first,) = sample_all(generator, asked)
    whole = [*asked.prompt.tolist(), *first.sequences[0].tokens.tolist(), 5, 6, 7]
    turn = replace(asked, prompt=np.array(whole, np.int64))
    (second,) = sample_all(generator, turn)
    assert second.cache_hit_tokens == 32
    assert_logprobs_are_of(merged(base, adapter), turn, second.sequences[0])


def test_calls_that_begin_alike_read_it_once_though_they_come_together(
    fresh, sample_all: SampleAll
):
    generator = fresh()
    results = sample_all(
        generator, *(call(random_prompt(50), max_tokens=3, seed=seed) for seed in range(6))
    )
    assert sorted(r.cache_hit_tokens for r in results) == [0, 48, 48, 48, 48, 48]


@pytest.mark.parametrize("num_scored", [1, 4, 20])
def test_the_last_tokens_are_scored_without_reading_those_before(
    base_of, fresh, sample_all: SampleAll, num_scored: int
):
    generator = fresh()
    prompt = random_prompt(50)
    sample_all(generator, call(prompt, max_tokens=1))
    asked = call(prompt, max_tokens=0, prompt_logprobs=True, num_scored=num_scored)
    (result,) = sample_all(generator, asked)
    assert result.cache_hit_tokens == (49 - num_scored) // 16 * 16
    expected = score(merged(base_of("qwen3"), None), prompt)
    expected[:-num_scored] = np.nan
    assert_scores(result, expected)


def test_scored_prompts_are_read_whole_and_serve_later_calls(base_of, fresh, sample_all: SampleAll):
    generator = fresh()
    asked = call(random_prompt(50), max_tokens=0, prompt_logprobs=True)
    expected = score(merged(base_of("qwen3"), None), asked.prompt)
    for _ in range(2):
        (result,) = sample_all(generator, asked)
        assert result.cache_hit_tokens == 0
        assert_scores(result, expected)
    (sampled,) = sample_all(generator, replace(asked, max_tokens=2, prompt_logprobs=False))
    assert sampled.cache_hit_tokens == 48


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_prompts_are_scored_and_continued_alike_however_they_are_cut(
    base_of, fresh, sample_all: SampleAll, name: str, chunk: int
):
    """Among samples that run meanwhile."""
    generator = fresh(name, max_prefill_tokens=chunk)
    module = merged(base_of(name), None)
    calls = [call([9, 1], max_tokens=60)] + [
        call(
            random_prompt(n, seed=n),
            max_tokens=5,
            prompt_logprobs=True,
            topk_prompt_logprobs=2,
            num_samples=2,
        )
        for n in (50, 17, 2, 35)
    ]
    for asked, result in zip(calls, sample_all(generator, *calls), strict=True):
        for sequence in result.sequences:
            assert_logprobs_are_of(module, asked, sequence)
        if asked.prompt_logprobs:
            assert_scores(result, score(module, asked.prompt))


def test_a_call_cancelled_while_its_prompt_is_read_leaves_nothing(
    fresh, wait: Wait, sample_all: SampleAll
):
    generator = fresh(max_prefill_tokens=1)
    stepper = generator._engine._stepper
    plain = stepper.read
    has_read, may_go_on = threading.Event(), threading.Event()

    def read(*arguments):
        drawn = plain(*arguments)
        has_read.set()
        assert may_go_on.wait(10)
        return drawn

    async def cancel_one() -> None:
        stepper.read = read
        long = asyncio.ensure_future(
            generator.sample(call(random_prompt(60), max_tokens=2, num_samples=2))
        )
        assert await asyncio.to_thread(has_read.wait, 10)
        long.cancel()
        await asyncio.sleep(0)
        may_go_on.set()
        await generator.sample(call([2], max_tokens=1))

    wait(cancel_one())
    assert generator._engine._batch._cache.num_rows == 0
    (result,) = sample_all(generator, call(random_prompt(60), max_tokens=2))
    assert result.cache_hit_tokens == 0, "what was not read to its end is not kept"


def test_weights_that_overflow_leave_nothing_for_later_calls(
    base_of, fresh, wait: Wait, sample_all: SampleAll
):
    """The failure is the same again, and the base model's answers are what they were."""
    base, generator = base_of("qwen3"), fresh()
    adapter = random_adapter(base, seed=1, rank=2)
    huge = {name: np.full_like(values, 1e38) for name, values in adapter.tensors.items()}
    bad = publish(generator, replace(adapter, tensors=huge))
    asked = call(random_prompt(50), max_tokens=4)
    (cold,) = sample_all(generator, asked)
    for _ in range(2):
        with pytest.raises(PostTrainingError) as caught:
            wait(generator.sample(replace(asked, snapshot=bad)))
        assert caught.value.reason is Reason.NON_FINITE_LOGITS
    (warm,) = sample_all(generator, asked)
    assert warm.cache_hit_tokens == 48
    assert_same_answer(merged(base, None), asked, warm, cold)


def test_a_snapshot_that_is_dropped_takes_what_was_read_with_it(
    base_of, fresh, sample_all: SampleAll
):
    base, generator = base_of("qwen3"), fresh()
    snapshot = publish(generator, random_adapter(base, seed=1))
    sample_all(generator, call(random_prompt(50), max_tokens=10, snapshot=snapshot))
    prefixes = generator._engine._batch.prefixes
    assert prefixes.num_tokens == 48
    weights = weakref.ref(next(iter(generator._snapshots[snapshot].pairs.values()))[0])
    generator.drop_snapshot(snapshot)
    sample_all(generator, call([1], max_tokens=1))
    assert prefixes.num_tokens == 0
    gc.collect()
    assert weights() is None


def test_prefixes_make_way_for_samples_and_nothing_is_lost(base_of, fresh, sample_all: SampleAll):
    """Memory for three windows, and prompts that have nothing in common."""
    per_token = 2 * 2 * 8 * 2 * 4
    generator = fresh(cache_bytes=3 * 64 * per_token)
    module = merged(base_of("qwen3"), None)
    calls = [call(random_prompt(40, seed=s), max_tokens=20, num_samples=2) for s in range(6)]
    for _ in range(2):
        for asked, result in zip(calls, sample_all(generator, *calls), strict=True):
            for sequence in result.sequences:
                assert len(sequence.tokens) == 20
                assert_logprobs_are_of(module, asked, sequence)
    cache = generator._engine._batch._cache
    prefixes = generator._engine._batch.prefixes
    assert cache.num_rows == 0
    assert 0 < prefixes.num_tokens <= 3 * 64 - cache.tokens_allocated


def test_full_weights_have_prefixes_of_their_own(base_of, fresh, wait: Wait, sample_all: SampleAll):
    from tests.generator.test_full_snapshots import plain_logprobs, random_weights

    base, generator = base_of("qwen3"), fresh()
    weights = random_weights(base)
    wait(generator.add_snapshot("full", weights))
    asked: SampleCall = call(random_prompt(50), max_tokens=4)
    sample_all(generator, asked)
    for num_hits in (0, 48):
        (result,) = sample_all(generator, replace(asked, snapshot="full"))
        assert result.cache_hit_tokens == num_hits
        whole = [*asked.prompt.tolist(), *result.sequences[0].tokens.tolist()]
        expected = plain_logprobs(base, weights, whole)[49:]
        np.testing.assert_allclose(result.sequences[0].logprobs, expected, rtol=0, atol=TOLERANCE)
