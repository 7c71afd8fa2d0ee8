"""Who runs: bounded, first come first served, and nobody waits for ever."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend.generator.batch import Batch
from backend.generator.kv_cache import KVCache, Row
from backend.generator.sequences import Job, Prefill, Sample
from tests.generator.calls import call

WINDOW = 256


def job(
    num_prompt: int,
    max_tokens: int,
    num_samples: int = 1,
    *,
    first_token: int = 0,
    weights: Any = None,
    flow: str | None = None,
) -> Job:
    prompt = range(first_token, first_token + num_prompt)
    asked = call(prompt, max_tokens=max_tokens, num_samples=num_samples, snapshot=flow)
    return Job(asked, weights, None)


def write(job: Job, row: Row, start: int, tokens: Tensor) -> None:
    """As a model would: keys and values that say of which token they are, and under which weights."""
    keys = (tokens + 10_000 * _number(job)).double()[:, None, None]
    row.pool.write(
        0, row.index * row.pool.capacity + start + torch.arange(len(tokens)), keys, -keys
    )


def held(sample: Sample, length: int) -> list[int]:
    """The tokens that the first keys and values of a sample's row are of, under its own weights."""
    if not length:
        return []
    row = sample.held_row
    keys, values = row.pool.read_row(0, row.index, length)
    assert torch.equal(keys, -values)
    return (keys.flatten().long() - 10_000 * _number(sample.job)).tolist()


def _number(job: Job) -> int:
    return id(job.weights) % 997


def step(batch: Batch) -> list[tuple[Job, int, int]]:
    """Everybody gets a token, as from a model; those that have all leave. Returns what was read of which prompts."""
    prefills = batch.admit()
    parts = [(prefill.job, prefill.start, prefill.stop) for prefill in prefills]
    finish_step(batch, prefills)
    return parts


def finish_step(batch: Batch, prefills: list[Prefill]) -> None:
    push(batch, read(batch, prefills))
    batch.make_room()
    advance(batch)


def read(batch: Batch, prefills: list[Prefill]) -> list[Sample]:
    """The samples that get their next token by it."""
    for prefill in prefills:
        assert held(prefill.samples[0], prefill.start) == prefill.tokens[: prefill.start].tolist()
        write(prefill.job, prefill.row, prefill.start, prefill.part)
    last = [prefill for prefill in prefills if prefill.is_last_part]
    batch.start(prefills)
    return [sample for prefill in last for sample in prefill.samples if sample.num_left]


def advance(batch: Batch) -> None:
    for sample in batch.running:
        tokens = sample.all_tokens()
        write(sample.job, sample.held_row, len(tokens) - 1, tokens[-1:])
        assert held(sample, len(tokens)) == tokens.tolist()
    push(batch, list(batch.running))


def push(batch: Batch, samples: list[Sample]) -> None:
    for sample in samples:
        sample.push(7, -1.0, None)
        if sample.is_finished:
            batch.retire(sample)


@settings(max_examples=50)
@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 150), st.integers(0, 60), st.integers(1, 5)), max_size=8
    ),
    max_running=st.integers(1, 8),
    max_tokens=st.integers(WINDOW, 3 * WINDOW),
    max_prefill_tokens=st.integers(1, 300),
)
def test_every_job_is_served_within_the_limits(jobs, max_running, max_tokens, max_prefill_tokens):
    cache = KVCache(max_tokens)
    batch = Batch(cache, max_running=max_running, max_prefill_tokens=max_prefill_tokens)
    made = [job(*sizes, first_token=1000 * i) for i, sizes in enumerate(jobs)]
    for one in made:
        batch.add(one)
    first_read: list[int] = []
    for _ in range(10_000):
        if batch.is_idle:
            break
        most = max_prefill_tokens * (1 if batch.running else 4)
        prefills = batch.admit()
        assert sum(len(prefill.part) for prefill in prefills) <= most
        first_read += [p.job.number for p in prefills if p.job.number not in first_read]
        finish_step(batch, prefills)
        assert cache.tokens_used <= max_tokens
        assert len(batch.running) <= cache.num_rows <= max_running
    assert batch.is_idle
    assert cache.num_rows == 0
    assert first_read == sorted(first_read) == list(range(len(made)))
    for one in made:
        assert all(len(s.tokens) == one.call.max_tokens for s in one.samples)


def test_samples_of_a_call_share_one_reading_of_the_prompt():
    batch = Batch(KVCache(4096), max_running=8, max_prefill_tokens=100)
    batch.add(job(30, 5, num_samples=6))
    (prefill,) = batch.admit()
    assert len(prefill.tokens) == 30
    assert len(prefill.samples) == 6


def test_calls_that_wait_are_read_together_in_order():
    batch = Batch(KVCache(4096), max_running=8, max_prefill_tokens=25)
    for i in range(5):
        batch.add(job(30, 5, first_token=i))
    prefills = batch.admit()
    assert [p.job.number for p in prefills] == [0, 1, 2]
    read(batch, prefills)
    assert [p.stop for p in batch.admit()] == [25]


def test_a_large_call_does_not_let_later_ones_pass():
    batch = Batch(KVCache(4096), max_running=2, max_prefill_tokens=100)
    batch.add(job(3, 5, num_samples=3))
    batch.add(job(3, 5))
    (first,) = batch.admit()
    assert [len(first.samples), first.job.number] == [2, 0]
    read(batch, [first])
    assert batch.admit() == []
    batch.retire(first.samples[0])
    (second,) = batch.admit()
    assert second.job.number == 0


def test_the_youngest_gives_its_row_to_an_older_one_and_starts_over():
    """Two rows of 256 tokens fit, or one of 512."""
    batch = Batch(KVCache(512), max_running=8, max_prefill_tokens=1000)
    old, young = job(60, 300), job(60, 300, first_token=1)
    batch.add(old)
    batch.add(young)
    prefills = batch.admit()
    assert len(prefills) == 2
    read(batch, prefills)
    push(batch, [*batch.running])
    for _ in range(196):
        assert len(batch.running) == 2
        advance(batch)
        batch.make_room()
    assert batch.running == old.samples
    assert old.samples[0].held_row.pool.capacity == 512
    assert batch.admit() == []  # there is no room yet
    batch.retire(old.samples[0])
    (prefill,) = batch.admit()
    assert prefill.samples == young.samples
    assert prefill.tokens.tolist() == [*range(1, 61), *[7] * 197]


def test_jobs_cancelled_while_they_wait_are_dropped():
    batch = Batch(KVCache(4096), max_running=1, max_prefill_tokens=100)
    jobs = [job(5, 50) for _ in range(4)]
    for one in jobs:
        batch.add(one)
    for cancelled in (0, 2):
        jobs[cancelled].future.cancel()
    assert [p.job for p in batch.admit()] == [jobs[1]]
    assert batch.jobs >= {jobs[1], jobs[3]}


@pytest.mark.parametrize("num_prompt", [60, 90], ids=["planned", "waiting for another"])
def test_a_call_cancelled_while_its_samples_are_looked_at_is_dropped(monkeypatch, num_prompt):
    """Calls hang up at any time, also between one of their samples and the next."""
    cache = KVCache(4096)
    batch = Batch(cache, max_running=8, max_prefill_tokens=64)
    batch.add(first := job(70 if num_prompt == 60 else 300, 1))
    step(batch)
    batch.add(one := job(num_prompt, 4, num_samples=2, first_token=0))
    batch.add(later := job(5, 1, first_token=1000))
    looks = iter([False, True])

    def cancelled() -> bool:
        return next(looks, True)

    monkeypatch.setattr(one.future, "cancelled", cancelled)
    for _ in range(8):
        prefills = batch.admit()
        assert all(prefill.job is not one for prefill in prefills)
        finish_step(batch, prefills)
    assert batch.is_idle
    assert cache.num_rows == 0
    assert first.samples[0].is_finished
    assert later.samples[0].is_finished


def test_memory_that_runs_out_loses_no_job(monkeypatch):
    """Neither those admitted in the same step nor the one that it struck, and no row."""
    cache = KVCache(4096)
    batch = Batch(cache, max_running=8, max_prefill_tokens=100)
    jobs = [job(5, 50), job(5, 50)]
    for one in jobs:
        batch.add(one)
    take, taken = cache.take, []

    def run_out(num_tokens: int):
        if taken:
            raise MemoryError
        taken.append(num_tokens)
        return take(num_tokens)

    monkeypatch.setattr(cache, "take", run_out)
    with pytest.raises(MemoryError):
        batch.admit()
    assert batch.jobs == set(jobs)
    batch.forget(batch.jobs)
    assert batch.jobs == set()
    assert cache.num_rows == 0


def test_forgotten_jobs_leave_nothing():
    cache = KVCache(4096)
    batch = Batch(cache, max_running=2, max_prefill_tokens=100)
    jobs = [job(5, 50, num_samples=2), job(5, 50)]
    for one in jobs:
        batch.add(one)
    step(batch)
    assert batch.jobs == set(jobs)
    batch.forget({jobs[0]})
    assert batch.jobs == {jobs[1]}
    assert cache.num_rows == 0
    batch.forget({jobs[1]})
    assert batch.is_idle


class Weights:
    """Known by identity."""


@settings(max_examples=60)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 1, 5000]),  # the first token: which prompts begin alike
            st.integers(1, 150),
            st.integers(0, 60),
            st.integers(1, 3),
            st.integers(0, 2),  # the weights
            st.integers(0, 30),  # the step in which it arrives
            st.sampled_from([None, None, None, 3, 10]),  # steps until it is cancelled
        ),
        max_size=10,
    ),
    max_tokens=st.sampled_from([WINDOW, 2 * WINDOW, 16 * WINDOW]),
    max_running=st.integers(1, 6),
    max_prefill_tokens=st.sampled_from([1, 16, 50, 512]),
)
def test_rows_hold_what_their_samples_have_read(calls, max_tokens, max_running, max_prefill_tokens):
    """Under their own weights, token by token, wherever it comes from: read in parts, shared by the samples of a call,
    found among what was read before, moved, or read again after the row was lost. Nothing is left in the end."""
    cache = KVCache(max_tokens)
    batch = Batch(cache, max_running=max_running, max_prefill_tokens=max_prefill_tokens)
    weights = [None, Weights(), Weights()]
    for some in weights[1:]:
        batch.prefixes.add(some)
    arriving = [
        (at, job(n, m, k, first_token=first, weights=weights[w]), until)
        for first, n, m, k, w, at, until in calls
    ]
    for now in range(10_000):
        for at, one, until in arriving:
            if now == at:
                batch.add(one)
            if until is not None and now == at + until:
                one.future.cancel()
        batch.forget({one for one in batch.running_jobs if one.future.cancelled()})
        step(batch)
        assert cache.tokens_used <= cache.tokens_allocated
        assert cache.tokens_allocated + batch.prefixes.num_tokens <= max_tokens
        if batch.is_idle and now > 40:
            break
    assert batch.is_idle
    assert cache.num_rows == 0
    for _, one, until in arriving:
        if until is None:
            assert all(len(s.tokens) == one.call.max_tokens for s in one.samples)


def test_a_prompt_that_begins_like_an_earlier_one_is_read_from_there_on():
    batch = Batch(KVCache(4096), max_running=8, max_prefill_tokens=512)
    for num_prompt, num_hits in ((100, 0), (100, 96), (40, 32), (130, 96), (129, 128), (128, 112)):
        batch.add(one := job(num_prompt, 1))
        assert step(batch) == [(one, num_hits, num_prompt)]
        assert one.num_hits == num_hits
    other = Weights()
    batch.prefixes.add(other)
    batch.add(one := job(100, 1, weights=other))
    assert step(batch) == [(one, 0, 100)]


def test_hits_are_those_of_when_the_prompt_is_read():
    """What a call would have found when there was no time to read it counts for nothing."""
    batch = Batch(KVCache(4096), max_running=8, max_prefill_tokens=16)
    batch.add(job(5, 60, first_token=1000))
    step(batch)
    batch.add(job(40, 1))
    step(batch)
    batch.add(one := job(40, 1))
    starts = [start for _ in range(8) for reading, start, _ in step(batch) if reading is one]
    assert starts == [32]
    assert one.num_hits == 32


@pytest.mark.parametrize(("num_sampled", "num_hits"), [(40, 80), (46, 80), (47, 96)])
def test_what_was_sampled_is_not_read_again_in_the_next_turn(num_sampled, num_hits):
    """Blocks are of 16 tokens, and the last token that is sampled was never read."""
    batch = Batch(KVCache(4096), max_running=8, max_prefill_tokens=512)
    batch.add(first := job(50, num_sampled))
    while not batch.is_idle:
        step(batch)
    answered = first.samples[0].all_tokens().tolist()
    asked = call([*answered, 1, 2, 3], max_tokens=5)
    batch.add(second := Job(asked, None, None))
    step(batch)
    assert second.num_hits == num_hits


def test_positions_that_are_scored_are_read():
    batch = Batch(KVCache(4096), max_running=8, max_prefill_tokens=512)
    batch.add(job(100, 1))
    step(batch)
    cases: list[tuple[dict[str, Any], int]] = [
        ({"prompt_logprobs": True}, 0),
        ({"prompt_logprobs": True, "num_scored": 1}, 96),
        ({"prompt_logprobs": True, "num_scored": 3}, 96),
        ({"prompt_logprobs": True, "num_scored": 4}, 80),
        ({"topk_prompt_logprobs": 2, "num_scored": 50}, 48),
        ({"prompt_alt_tokens": 1}, 0),
        ({"return_routed_experts": True}, 0),
    ]
    for options, num_hits in cases:
        one = Job(call(range(100), max_tokens=1, **options), None, None)
        batch.add(one)
        prefills = batch.admit()
        assert [p.start for p in prefills] == [num_hits]
        one.scores.next = one.scores.num_tokens
        finish_step(batch, prefills)


def test_calls_that_begin_alike_wait_for_the_first_to_be_read():
    """And others do not wait for them."""
    batch = Batch(KVCache(4096), max_running=8, max_prefill_tokens=512)
    alike = [job(n, 3) for n in (200, 200, 220)]
    other = job(200, 3, first_token=1000)
    for one in (*alike, other):
        batch.add(one)
    assert step(batch) == [(alike[0], 0, 200), (other, 0, 200)]
    assert step(batch) == [(alike[1], 192, 200), (alike[2], 192, 220)]


def test_a_long_prompt_is_read_in_parts_while_samples_run():
    batch = Batch(KVCache(8192), max_running=8, max_prefill_tokens=100)
    batch.add(running := job(10, 500))
    step(batch)
    batch.add(long := job(950, 5, first_token=2000))
    batch.add(short := job(60, 5, first_token=4000))
    parts = []
    for _ in range(10):
        num_tokens = len(running.samples[0].tokens)
        parts.append(step(batch))
        assert len(running.samples[0].tokens) == num_tokens + 1
    assert parts[:9] == [[(long, n, n + 100)] for n in range(0, 900, 100)]
    assert parts[9] == [(long, 900, 950)]
    assert step(batch) == [(short, 0, 60)], "it fits in whole only now"


def test_a_call_that_is_cancelled_between_parts_gives_its_rows_back():
    cache = KVCache(8192)
    batch = Batch(cache, max_running=8, max_prefill_tokens=100)
    batch.add(long := job(900, 5, num_samples=3))
    step(batch)
    assert cache.num_rows == 3
    assert long.future.cancel()
    assert step(batch) == []
    assert cache.num_rows == 0
    assert batch.is_idle


def test_many_calls_of_one_flow_do_not_keep_another_waiting():
    """Shares of what is sampled while both wait, though one sends ten times as much, earlier."""
    batch = Batch(KVCache(64 * 1024), max_running=4, max_prefill_tokens=512)
    served: Counter[str] = Counter()
    crowd = [job(20, 30, 2, first_token=1000 * i, flow="crowd") for i in range(50)]
    few = [job(20, 30, first_token=1000 * i, flow="few") for i in range(10)]
    for one in (*crowd, *few):
        batch.add(one)
    while any(s.row is None and not s.is_finished for one in few for s in one.samples):
        step(batch)
        for sample in batch.running:
            served[sample.job.flow] += 1
    # Each is owed half; the last ones to be admitted still run.
    assert served["few"] >= 0.4 * served["crowd"]
    assert sum(s.is_finished for one in crowd for s in one.samples) <= 12


def test_suspended_samples_go_on_before_others_are_admitted():
    batch = Batch(KVCache(512), max_running=8, max_prefill_tokens=1000)
    old, young = job(60, 300), job(60, 300, first_token=1000)
    batch.add(old)
    batch.add(young)
    late = job(60, 300, first_token=3000, flow="another")
    step(batch)
    batch.add(late)
    while not old.samples[0].is_finished:
        step(batch)
    num_sampled = len(young.samples[0].tokens)
    assert young.samples[0].row is None
    assert num_sampled > 100
    (prefill,) = batch.admit()
    assert prefill.job is young
    assert len(prefill.tokens) == 60 + num_sampled
