"""Who runs: bounded, first come first served, and nobody waits for ever."""

from __future__ import annotations

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


def job(num_prompt: int, max_tokens: int, num_samples: int = 1, first_token: int = 0) -> Job:
    prompt = range(first_token, first_token + num_prompt)
    return Job(call(prompt, max_tokens=max_tokens, num_samples=num_samples), None, None)


def write(row: Row, start: int, tokens: Tensor) -> None:
    """As a model would: keys and values that say which token they are of."""
    keys = tokens.double()[:, None, None]
    row.pool.write(
        0, row.index * row.pool.capacity + start + torch.arange(len(tokens)), keys, -keys
    )


def held(sample: Sample) -> list[int]:
    """The tokens that a sample's row has been read for."""
    row = sample.held_row
    keys, values = row.pool.read_row(0, row.index, sample.num_tokens)
    assert torch.equal(keys, -values)
    return keys.flatten().long().tolist()


def step(batch: Batch) -> list[Prefill]:
    """Everybody gets a token, as from a model; those that have all leave."""
    prefills = batch.admit()
    finish_step(batch, prefills)
    return prefills


def finish_step(batch: Batch, prefills: list[Prefill]) -> None:
    push(batch, read(batch, prefills))
    batch.make_room()
    for sample in batch.running:
        assert sample.num_tokens <= sample.held_row.pool.capacity
        write(sample.held_row, sample.num_tokens - 1, sample.all_tokens()[-1:])
        assert held(sample) == sample.all_tokens().tolist()
    push(batch, list(batch.running))


def read(batch: Batch, prefills: list[Prefill]) -> list[Sample]:
    """The samples that get their next token by it."""
    for prefill in prefills:
        write(prefill.row, prefill.start, prefill.part)
    last = [prefill for prefill in prefills if prefill.is_last_part]
    batch.start(prefills)
    return [sample for prefill in last for sample in prefill.samples if sample.num_left]


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
    for _ in range(197):
        assert len(batch.running) == 2
        push(batch, list(batch.running))
        batch.make_room()
        for sample in batch.running:
            write(sample.held_row, sample.num_tokens - 1, sample.all_tokens()[-1:])
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
