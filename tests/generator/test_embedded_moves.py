"""Calls that follow the live policy: from the moment they move, exactly as if all their tokens had been read under the
new weights."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from backend.generator.base import SampleCall, SampledSequence, SampleResult, Segment
from backend.generator.embedded import EmbeddedGenerator
from backend.generator.engine import Engine
from backend.trainer.base_model import BaseModel
from backend.trainer.model_layout import ModelLayout, under
from tests.generator.calls import call, random_prompt
from tests.generator.conftest import Wait
from tests.generator.oracle import TOLERANCE, merged, random_adapter, score
from tests.generator.test_full_snapshots import random_weights
from together_post_training.errors import PostTrainingError, Reason

TIMEOUT_S = 10


@pytest.fixture(scope="module")
def modules(base_of: Callable[[str], BaseModel]) -> dict[str, PreTrainedModel]:
    """Plain models with the weights of every snapshot here: adapters, and full weights."""
    base = base_of("qwen3")
    layout = ModelLayout(base.module)
    full = {
        f"full-{seed}": under(base, layout, random_weights(base, seed)).module for seed in (1, 2)
    }
    return {
        f"adapter-{seed}": merged(base, random_adapter(base, seed=seed)) for seed in (1, 2, 3)
    } | full


@pytest.fixture
def generator(base_of: Callable[[str], BaseModel], wait: Wait) -> Iterator[EmbeddedGenerator]:
    base = base_of("qwen3")
    generator = EmbeddedGenerator(base)
    for seed in (1, 2, 3):
        wait(generator.add_snapshot(f"adapter-{seed}", random_adapter(base, seed=seed)))
    for seed in (1, 2):
        wait(generator.add_snapshot(f"full-{seed}", random_weights(base, seed)))
    yield generator
    wait(generator.close())


def following(snapshot: str, num_prompt: int = 20, **options: Any) -> SampleCall:
    options = {"max_tokens": 30} | options
    return call(random_prompt(num_prompt), snapshot=snapshot, follows=True, **options)


async def engine_of(generator: EmbeddedGenerator, snapshot: str) -> Engine:
    if snapshot not in generator._full:
        return generator._engine
    async with generator._full.engine(snapshot) as engine:
        return engine


async def run(
    generator: EmbeddedGenerator,
    calls: Sequence[SampleCall],
    moves: dict[int, tuple[str, str]],
) -> list[SampleResult]:
    """Samples all at once; after so many steps in all, calls move, and all of them have before the next step."""
    loop = asyncio.get_running_loop()
    number = itertools.count(1)

    def watch(engine: Engine) -> None:
        plain = engine._stepper.advance

        def advance(running: Any) -> Any:
            drawn = plain(running)
            if (move := moves.get(next(number))) is not None:
                loop.call_soon_threadsafe(generator.move, *move)
                deadline = time.monotonic() + TIMEOUT_S
                while engine._inbox.qsize() < sum(one.follows for one in calls):
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
            return drawn

        engine._stepper.advance = advance  # pyright: ignore[reportAttributeAccessIssue]
        engine._inbox.put(lambda: assert_is_set(all_are_here))

    all_are_here = threading.Event()
    for engine in {await engine_of(generator, old) for old, _ in moves.values()}:
        watch(engine)
    answers = asyncio.gather(*(generator.sample(c) for c in calls))
    for _ in range(10):
        await asyncio.sleep(0)
    all_are_here.set()
    return list(await answers)


def assert_is_set(event: threading.Event) -> None:
    assert event.wait(TIMEOUT_S)


def assert_is_of_its_segments(
    modules: dict[str, PreTrainedModel], call: SampleCall, sequence: SampledSequence
) -> None:
    whole = [*call.prompt.tolist(), *sequence.tokens.tolist()]
    ends = [*(s.first_token for s in sequence.segments[1:]), len(sequence.tokens)]
    for segment, end in zip(sequence.segments, ends, strict=True):
        assert segment.snapshot is not None
        expected = score(modules[segment.snapshot], whole)[len(call.prompt) :]
        here = slice(segment.first_token, end)
        np.testing.assert_allclose(sequence.logprobs[here], expected[here], rtol=0, atol=TOLERANCE)


def segments(*pairs: tuple[str, int]) -> tuple[Segment, ...]:
    return tuple(Segment(snapshot=name, first_token=first) for name, first in pairs)


# Reading the prompt gives the first token, and step n the one after; a move takes effect after the step.
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("adapter-1", "adapter-2"),
        ("adapter-1", "full-1"),
        ("full-1", "adapter-1"),
        ("full-1", "full-2"),
    ],
)
def test_tokens_after_a_move_are_those_of_the_new_weights(
    modules, generator: EmbeddedGenerator, wait: Wait, old: str, new: str
):
    """Greedy, so that the tokens too are what a fresh call would continue with."""
    asked = following(old, temperature=0.0)
    (result,) = wait(run(generator, [asked], {9: (old, new)}))
    (sequence,) = result.sequences
    assert sequence.segments == segments((old, 0), (new, 10))
    assert_is_of_its_segments(modules, asked, sequence)
    prefix = [*asked.prompt.tolist(), *sequence.tokens[:10].tolist()]
    fresh = wait(generator.sample(call(prefix, snapshot=new, max_tokens=20, temperature=0.0)))
    assert fresh.sequences[0].tokens.tolist() == sequence.tokens[10:].tolist()
    before = wait(generator.sample(call(asked.prompt, snapshot=old, max_tokens=30, temperature=0)))
    assert before.sequences[0].tokens[:10].tolist() == sequence.tokens[:10].tolist()
    assert before.sequences[0].tokens.tolist() != sequence.tokens.tolist()


def test_all_samples_of_many_calls_move_and_others_stay(
    modules, generator: EmbeddedGenerator, wait: Wait
):
    """Calls that do not follow, and those of other snapshots, are not touched."""
    moved = [following("adapter-1", n, num_samples=3, seed=n) for n in (5, 20, 30)]
    pinned = [
        call(random_prompt(20), snapshot="adapter-1", max_tokens=30),
        call(random_prompt(20), snapshot="adapter-3", max_tokens=30),
    ]
    results = wait(run(generator, [*moved, *pinned], {4: ("adapter-1", "adapter-2")}))
    for asked, result in zip([*moved, *pinned], results, strict=True):
        for sequence in result.sequences:
            if asked.follows:
                assert sequence.segments == segments(("adapter-1", 0), ("adapter-2", 5))
            else:
                assert sequence.segments == (Segment(snapshot=asked.snapshot),)
            assert_is_of_its_segments(modules, asked, sequence)


def test_calls_move_again_and_again(modules, generator: EmbeddedGenerator, wait: Wait):
    """From engine to engine and back, to weights that they had before too."""
    path = ["adapter-1", "adapter-2", "full-1", "full-2", "adapter-1", "adapter-3"]
    moves = {3 * i: (a, b) for i, (a, b) in enumerate(itertools.pairwise(path), 1)}
    asked = following(path[0], num_samples=2)
    (result,) = wait(run(generator, [asked], moves))
    for sequence in result.sequences:
        # Reading again draws a token: a segment has one more than the steps between two moves.
        assert [s.snapshot for s in sequence.segments] == path
        assert [s.first_token for s in sequence.segments] == [0, 4, 8, 12, 16, 20]
        assert_is_of_its_segments(modules, asked, sequence)


def test_calls_move_on_while_their_first_engine_is_busy(
    modules, generator: EmbeddedGenerator, wait: Wait
):
    """The engine that they move to first has nothing else to do, and must not pass on what it does not have yet."""
    is_busy, may_go_on = threading.Event(), threading.Event()

    async def move_twice(asked: SampleCall) -> SampleResult:
        first, second = [await engine_of(generator, name) for name in ("full-1", "full-2")]
        plain, number = first._stepper.advance, itertools.count(1)

        def advance(running: Any) -> Any:
            if next(number) == 5:
                is_busy.set()
                assert_is_set(may_go_on)
            return plain(running)

        first._stepper.advance = advance  # pyright: ignore[reportAttributeAccessIssue]
        running = asyncio.ensure_future(generator.sample(asked))
        await asyncio.to_thread(assert_is_set, is_busy)
        for old, new in (("full-1", "full-2"), ("full-2", "adapter-3")):
            generator.move(old, new)
            for _ in range(10):
                await asyncio.sleep(0)
            for engine in (second, generator._engine):
                passed = threading.Event()
                engine._inbox.put(passed.set)
                await asyncio.to_thread(assert_is_set, passed)
        may_go_on.set()
        return await asyncio.wait_for(running, TIMEOUT_S)

    asked = following("full-1", num_samples=2)
    for sequence in wait(move_twice(asked)).sequences:
        assert len(sequence.tokens) == 30
        assert sequence.segments[0] == Segment(snapshot="full-1")
        assert sequence.segments[-1].snapshot == "adapter-3"
        assert_is_of_its_segments(modules, asked, sequence)


def test_samples_that_ended_before_the_move_keep_their_only_segment(
    modules, generator: EmbeddedGenerator, wait: Wait
):
    asked = following("adapter-1", num_samples=6, seed=3)
    (free,) = wait(run(generator, [asked], {}))
    # A token that ends some of the samples early, and some later or never.
    stop = int(free.sequences[0].tokens[5])
    asked = following("adapter-1", num_samples=6, seed=3, stop_tokens=[stop])
    (result,) = wait(run(generator, [asked], {8: ("adapter-1", "adapter-2")}))
    lengths = [len(sequence.tokens) for sequence in result.sequences]
    assert min(lengths) <= 9 < max(lengths)
    for sequence in result.sequences:
        expected = [("adapter-1", 0)] + [("adapter-2", 9)] * (len(sequence.tokens) > 9)
        assert sequence.segments == segments(*expected)
        assert_is_of_its_segments(modules, asked, sequence)


def test_calls_that_wait_switch_and_have_one_segment(
    modules, base_of: Callable[[str], BaseModel], wait: Wait
):
    base = base_of("qwen3")
    generator = EmbeddedGenerator(base, max_running=1)
    for seed in (1, 2):
        wait(generator.add_snapshot(f"adapter-{seed}", random_adapter(base, seed=seed)))
    calls = [following("adapter-1", n, prompt_logprobs=True) for n in (10, 12)]
    results = wait(run(generator, calls, {6: ("adapter-1", "adapter-2")}))
    assert results[0].sequences[0].segments == segments(("adapter-1", 0), ("adapter-2", 7))
    assert results[1].sequences[0].segments == segments(("adapter-2", 0))
    for asked, result, read_by in zip(calls, results, ("adapter-1", "adapter-2"), strict=True):
        assert_is_of_its_segments(modules, asked, result.sequences[0])
        np.testing.assert_allclose(
            result.prompt_logprobs, score(modules[read_by], asked.prompt), rtol=0, atol=TOLERANCE
        )
    wait(generator.close())


def test_prompts_that_are_half_read_are_read_and_scored_again(
    modules, base_of: Callable[[str], BaseModel], wait: Wait
):
    base = base_of("qwen3")
    generator = EmbeddedGenerator(base, max_prefill_tokens=2)
    for seed in (1, 2):
        wait(generator.add_snapshot(f"adapter-{seed}", random_adapter(base, seed=seed)))
    runs = following("adapter-1", 3)
    long = following("adapter-1", 40, max_tokens=8, prompt_logprobs=True, num_samples=2)
    results = wait(run(generator, [runs, long], {5: ("adapter-1", "adapter-2")}))
    for sequence in results[1].sequences:
        assert sequence.segments == segments(("adapter-2", 0))
        assert_is_of_its_segments(modules, long, sequence)
    np.testing.assert_allclose(
        results[1].prompt_logprobs,
        score(modules["adapter-2"], long.prompt),
        rtol=0,
        atol=TOLERANCE,
    )
    wait(generator.close())


def test_seeds_go_on_where_they_were(generator: EmbeddedGenerator, wait: Wait):
    """To weights that are the same: a move then changes nothing."""
    adapter = random_adapter(generator_base(generator), seed=1)
    wait(generator.add_snapshot("twin", adapter))
    asked = following("adapter-1", seed=7)
    (moved,) = wait(run(generator, [asked], {11: ("adapter-1", "twin")}))
    stayed = wait(generator.sample(asked))
    assert moved.sequences[0].segments == segments(("adapter-1", 0), ("twin", 12))
    assert moved.sequences[0].tokens.tolist() == stayed.sequences[0].tokens.tolist()


def test_a_call_that_moved_can_be_cancelled(generator: EmbeddedGenerator, wait: Wait):
    async def cancel() -> None:
        asked = following("adapter-1", num_samples=2, max_tokens=40)
        running = asyncio.ensure_future(run(generator, [asked], {5: ("adapter-1", "full-1")}))
        while not generator._full._snapshots["full-1"].num_users:
            assert not running.done()
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not generator._following
        assert not generator._full._snapshots["full-1"].num_users
        await generator.sample(call([1], max_tokens=2))
        await generator.sample(call([1], max_tokens=2, snapshot="full-1"))

    wait(cancel())
    assert generator._engine._batch._cache.num_rows == 0


def test_moving_to_what_is_not_there_is_not_found(generator: EmbeddedGenerator):
    with pytest.raises(PostTrainingError, match="never-made") as error:
        generator.move("adapter-1", "never-made")
    assert error.value.reason is Reason.SNAPSHOT_NOT_FOUND


def test_a_call_whose_new_engine_does_not_start_fails(
    generator: EmbeddedGenerator, wait: Wait, monkeypatch: pytest.MonkeyPatch
):
    def fails(*_: object) -> Engine:
        raise MemoryError("no more of it")

    monkeypatch.setattr(generator._full, "_make_engine", fails)

    async def move() -> None:
        running = asyncio.ensure_future(
            generator.sample(following("adapter-1", 1, max_tokens=60, num_samples=100))
        )
        await asyncio.sleep(0.01)
        generator.move("adapter-1", "full-1")
        with pytest.raises(MemoryError, match="no more"):
            await asyncio.wait_for(running, TIMEOUT_S)
        await generator.sample(call([1], max_tokens=2))

    wait(move())
    assert generator._engine._batch._cache.num_rows == 0


def generator_base(generator: EmbeddedGenerator) -> BaseModel:
    return generator._full._base
