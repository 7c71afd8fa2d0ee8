"""Who runs: first come, first served, as many at a time as there is room for."""

from __future__ import annotations

import itertools
from collections import deque

from backend.generator.kv_cache import KVCache
from backend.generator.sequences import Job, Prefill, Sample

# A new row has room for this many sampled tokens before it has to move to a larger one.
_HEADROOM = 128


class Batch:
    """The jobs that wait, the samples that run, and their rows in the cache. Owned by the engine's thread.

    A sample that runs out of room takes the row of the youngest, which starts over later: it reads its tokens again
    and goes on where it was. So nobody has to reserve what a sample may never use.

    Args:
        max_running: samples that run at once.
        max_prefill_tokens: tokens read in one step, unless a single prompt is longer.
    """

    def __init__(self, cache: KVCache, *, max_running: int, max_prefill_tokens: int) -> None:
        self._cache = cache
        self._max_running = max_running
        self._max_prefill_tokens = max_prefill_tokens
        self._waiting: deque[Job] = deque()
        self._numbers = itertools.count()
        self._admitted: list[Prefill] = []
        self.running: list[Sample] = []

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self.running)

    @property
    def jobs(self) -> set[Job]:
        """All that have not been answered."""
        return {*self._waiting, *(p.job for p in self._admitted), *self.running_jobs}

    @property
    def running_jobs(self) -> set[Job]:
        return {sample.job for sample in self.running}

    def add(self, job: Job) -> None:
        job.number = next(self._numbers)
        self._waiting.append(job)

    def admit(self) -> list[Prefill]:
        """The prompts to read now; their samples have rows. Jobs that were cancelled while they waited are dropped."""
        self._admitted = []
        num_tokens = 0
        while self._waiting:
            job = self._waiting[0]
            if job.future.cancelled():
                self.forget({job})
                continue
            prefill = Prefill(job, job.next_tokens())
            num_tokens += len(prefill.tokens)
            if self._admitted and num_tokens > self._max_prefill_tokens:
                break
            self._seat(prefill)
            if job.waiting and not prefill.samples:
                break
            self._admitted.append(prefill)
            if not job.waiting:
                self._waiting.popleft()
        return self._admitted

    def start(self) -> None:
        """The samples of the prompts that were admitted run from now on."""
        for prefill in self._admitted:
            self.running += [sample for sample in prefill.samples if sample.row is not None]
        self._admitted = []

    def release(self, sample: Sample) -> None:
        """Takes a sample out and its row back, if it has one."""
        if sample.row is None:
            return
        self._cache.give_back(sample.row)
        sample.row = None
        if sample in self.running:
            self.running.remove(sample)

    def forget(self, jobs: set[Job]) -> None:
        """Takes jobs out, wherever they are."""
        if not jobs:
            return
        self._waiting = deque(job for job in self._waiting if job not in jobs)
        self._admitted = [prefill for prefill in self._admitted if prefill.job not in jobs]
        for job in jobs:
            for sample in job.samples:
                self.release(sample)

    def make_room(self) -> None:
        """Gives every running sample a row with a place for its last token, or takes it out."""
        for sample in sorted(self.running, key=_age):
            while sample.row is not None and sample.num_tokens > sample.row.pool.capacity:
                if self._cache.can_grow(sample.row):
                    self._cache.grow(sample.row)
                else:
                    self._suspend(max(self.running, key=_age))

    def _seat(self, prefill: Prefill) -> None:
        """Gives rows to the samples that go on from the prefill's tokens."""
        waiting = prefill.job.waiting
        while waiting and waiting[0].num_tokens == len(prefill.tokens):
            sample = waiting[0]
            num_tokens = sample.num_tokens + min(sample.num_left, _HEADROOM)
            if self._cache.num_rows >= self._max_running or not self._cache.has_room(num_tokens):
                return
            sample.row = self._cache.take(num_tokens)
            prefill.samples.append(waiting.popleft())
            if sample.tokens:
                return  # nobody shares what it has sampled

    def _suspend(self, sample: Sample) -> None:
        self.release(sample)
        sample.job.waiting.appendleft(sample)
        if sample.job not in self._waiting:
            self._waiting.appendleft(sample.job)


def _age(sample: Sample) -> int:
    """Smaller is older."""
    return sample.job.number
