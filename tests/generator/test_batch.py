"""Who runs: bounded, first come first served, and nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.generator.batch import Batch
from backend.generator.kv_cache import KVCache
from backend.generator.sequences import Job, Prefill
from tests.generator.calls import call

WINDOW = 256


def job(num_prompt: int, max_tokens: int, num_samples: int = 1) -> Job:
    asked = call(range(num_prompt), max_tokens=max_tokens, num_samples=num_samples)
    return Job(asked, None, None)


def step(batch: Batch) -> list[Prefill]:
    """Everybody gets a token, as from a model; those that have all leave."""
    prefills = batch.admit()
    batch.start()
    push(batch, [sample for prefill in prefills for sample in prefill.samples])
    batch.make_room()
    for sample in batch.running:
        assert sample.num_tokens <= sample.held_row.pool.capacity
    push(batch, list(batch.running))
    return prefills


def push(batch: Batch, samples: list) -> None:
    for sample in samples:
        sample.push(7, -1.0, None)
        if sample.is_finished:
            batch.release(sample)


@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 150), st.integers(0, 100), st.integers(1, 5)), max_size=12
    ),
    max_running=st.integers(1, 8),
    max_tokens=st.integers(WINDOW, 3 * WINDOW),
    max_prefill_tokens=st.integers(1, 300),
)
def test_every_job_is_served_within_the_limits(jobs, max_running, max_tokens, max_prefill_tokens):
    cache = KVCache(max_tokens)
    batch = Batch(cache, max_running=max_running, max_prefill_tokens=max_prefill_tokens)
    made = [job(*sizes) for sizes in jobs]
    for one in made:
        batch.add(one)
    first_read: list[int] = []
    for _ in range(10_000):
        if batch.is_idle:
            break
        prefills = step(batch)
        first_read += [p.job.number for p in prefills if p.job.number not in first_read]
        assert cache.tokens_used <= max_tokens
        assert len(batch.running) == cache.num_rows <= max_running
        read = sum(len(prefill.tokens) for prefill in prefills)
        assert read <= max_prefill_tokens or len(prefills) == 1
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
    batch = Batch(KVCache(4096), max_running=8, max_prefill_tokens=100)
    for _ in range(5):
        batch.add(job(30, 5))
    assert [p.job.number for p in batch.admit()] == [0, 1, 2]
    assert [p.job.number for p in batch.admit()] == [3, 4]


def test_a_large_call_does_not_let_later_ones_pass():
    batch = Batch(KVCache(4096), max_running=2, max_prefill_tokens=100)
    batch.add(job(3, 5, num_samples=3))
    batch.add(job(3, 5))
    (first,) = batch.admit()
    assert [len(first.samples), first.job.number] == [2, 0]
    batch.start()
    assert batch.admit() == []
    batch.release(first.samples[0])
    (second,) = batch.admit()
    assert second.job.number == 0


def test_the_youngest_gives_its_row_to_an_older_one_and_starts_over():
    """Two rows of 256 tokens fit, or one of 512."""
    batch = Batch(KVCache(512), max_running=8, max_prefill_tokens=1000)
    old, young = job(60, 300), job(60, 300)
    batch.add(old)
    batch.add(young)
    assert len(batch.admit()) == 2
    batch.start()
    for _ in range(197):
        assert len(batch.running) == 2
        push(batch, list(batch.running))
        batch.make_room()
    assert batch.running == old.samples
    assert old.samples[0].held_row.pool.capacity == 512
    assert batch.admit() == []  # there is no room yet
    batch.release(old.samples[0])
    (prefill,) = batch.admit()
    assert prefill.samples == young.samples
    assert prefill.tokens.tolist() == [*range(60), *[7] * 197]


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
