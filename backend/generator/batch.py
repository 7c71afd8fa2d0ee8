"""Who runs: as many at a time as there is room for, in fair turns."""

from __future__ import annotations

import bisect
import itertools

import torch

from backend.generator.kv_cache import KVCache
from backend.generator.prefix_cache import BLOCK_TOKENS, Block, PrefixCache
from backend.generator.queueing import FairQueue
from backend.generator.sequences import Job, Prefill, Sample

# A new row has room for this many sampled tokens before it has to move to a larger one.
_HEADROOM = 128
# While nothing runs, nobody waits for the next token: so many times more is read in one step.
_ALONE = 4


class Batch:
    """The samples that wait, those whose prompts are being read, those that run, and their rows in the cache. Owned by
    the engine's thread.

    A sample that runs out of room takes the row of the youngest, which starts over later: it reads its tokens again
    and goes on where it was. So nobody has to reserve what a sample may never use.

    Args:
        max_running: samples that have rows at once.
        max_prefill_tokens: tokens read in one step while samples run; a longer prompt is read in parts.
    """

    def __init__(self, cache: KVCache, *, max_running: int, max_prefill_tokens: int) -> None:
        self._cache = cache
        self._max_running = max_running
        self._max_prefill_tokens = max_prefill_tokens
        self._waiting: FairQueue[Sample] = FairQueue()
        # Those that lost their rows, oldest first: they are the first to go on.
        self._suspended: list[Sample] = []
        self._numbers = itertools.count()
        self._reading: list[Prefill] = []
        self.prefixes = PrefixCache(cache)
        self.running: list[Sample] = []

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._suspended or self._reading or self.running)

    @property
    def jobs(self) -> set[Job]:
        """All that have not been answered."""
        waiting = {sample.job for sample in (*self._waiting, *self._suspended)}
        return {*waiting, *(p.job for p in self._reading), *self.running_jobs}

    @property
    def running_jobs(self) -> set[Job]:
        return {sample.job for sample in self.running}

    def add(self, job: Job) -> None:
        if job.number < 0:
            job.number = next(self._numbers)
        cost = len(job.prompt)
        for sample in job.members:
            if sample.tokens and not sample.is_finished:
                self._suspend(sample)
            elif not sample.is_finished:
                self._waiting.push(job.flow, sample, cost + _expected(sample))
                cost = 1  # The prompt is read once.

    def admit(self) -> list[Prefill]:
        """What to read now: first of the prompts that are being read, then of those of samples that get rows. Jobs that
        were cancelled meanwhile are dropped."""
        self.forget({p.job for p in self._reading if p.job.future.cancelled()})
        num_left = self._max_prefill_tokens * (1 if self.running else _ALONE)
        planned: list[Prefill] = []
        for prefill in self._reading:
            if not _plan(prefill, num_left, planned):
                return planned
            num_left -= len(prefill.part)
        self._admit_waiting(num_left, planned)
        return planned

    def start(self, prefills: list[Prefill]) -> None:
        """What was planned was read; the samples whose tokens have all been read run from now on."""
        for prefill in prefills:
            is_read, prefill.start = prefill.is_last_part, prefill.stop
            if is_read:
                self._reading.remove(prefill)
                self._run(prefill)

    def retire(self, sample: Sample) -> None:
        """Takes out a sample that has all its tokens; what it read may serve others."""
        row = sample.held_row
        self.prefixes.store(sample.job.weights, sample.all_tokens()[:-1], row)
        self._waiting.leave(sample, len(sample.tokens) - _expected(sample))
        self._release(sample)

    def forget(self, jobs: set[Job]) -> None:
        """Takes jobs out, wherever they are."""
        if not jobs:
            return
        self._reading = [prefill for prefill in self._reading if prefill.job not in jobs]
        self._suspended = [sample for sample in self._suspended if sample.job not in jobs]
        for job in jobs:
            for sample in job.members:
                self._waiting.leave(sample)
                self._release(sample)

    def make_room(self) -> None:
        """Gives every running sample a row with a place for its last token, or takes it out."""
        for sample in sorted(self.running, key=_age):
            while sample.row is not None and sample.num_tokens > sample.row.pool.capacity:
                if self._cache.can_grow(sample.row):
                    self._cache.grow(sample.row)
                else:
                    youngest = max(self.running, key=_age)
                    self._release(youngest)
                    self._suspend(youngest)

    def _admit_waiting(self, num_left: int, planned: list[Prefill]) -> None:
        not_served: list[Sample] = []
        try:
            while self._waiting or self._suspended:
                sample = self._suspended.pop(0) if self._suspended else self._waiting.pop()
                not_served.append(sample)
                if sample.job.future.cancelled():
                    # Maybe only since others of its samples were looked at.
                    self.forget({sample.job})
                    planned[:] = [p for p in planned if p.job is not sample.job]
                    not_served = [s for s in not_served if s.job is not sample.job]
                    continue
                if not self._has_room(sample):
                    return
                if self._join(sample):
                    not_served.pop()
                    continue
                blocks = self._known(sample)
                if self._will_be_known(sample, blocks):
                    sample.has_waited = True
                    continue
                start = len(blocks) * BLOCK_TOKENS
                prefill = Prefill(sample.job, sample.all_tokens(), [sample], start)
                if not _plan(prefill, num_left, planned):
                    return
                num_left -= len(prefill.part)
                self._begin(prefill, blocks)
                not_served.pop()
        finally:
            for sample in reversed(not_served):
                if sample.tokens:
                    self._suspend(sample)
                else:
                    self._waiting.put_back(sample)

    def _has_room(self, sample: Sample) -> bool:
        return self._cache.num_rows < self._max_running and self._cache.has_room(_capacity(sample))

    def _take_row(self, sample: Sample) -> None:
        sample.row = self._cache.take(_capacity(sample))

    def _join(self, sample: Sample) -> bool:
        """Whether the job's prompt is being read already: then the sample goes on from there too."""
        if not sample.tokens:
            for prefill in self._reading:
                if prefill.job is sample.job and not prefill.samples[0].tokens:
                    self._take_row(sample)
                    prefill.samples.append(sample)
                    return True
        return False

    def _known(self, sample: Sample) -> list[Block]:
        """What of the sample's tokens need not be read. The last is always read: it gives the first logits."""
        tokens = sample.all_tokens()
        num_reusable = sample.job.num_reusable
        if sample.tokens and num_reusable:
            num_reusable = len(tokens) - 1
        return self.prefixes.find(sample.job.weights, tokens[:num_reusable])

    def _will_be_known(self, sample: Sample, blocks: list[Block]) -> bool:
        """Whether most of what a sample would read is being read for another: then it waits for that, once."""
        num_known = len(blocks) * BLOCK_TOKENS
        num_reusable = sample.job.num_reusable
        if sample.has_waited or num_reusable - num_known < 2 * BLOCK_TOKENS:
            return False
        tokens = sample.all_tokens()[:num_reusable]
        for other in self._reading:
            if other.job.weights is sample.job.weights:
                num_shared = _num_shared(tokens, other.tokens)
                if 2 * (num_shared - num_known) > sample.num_tokens - num_known:
                    return True
        return False

    def _begin(self, prefill: Prefill, blocks: list[Block]) -> None:
        (sample,) = prefill.samples
        self._take_row(sample)
        self.prefixes.load(blocks, sample.held_row)
        self._reading.append(prefill)
        if sample.job.num_hits is None:
            sample.job.num_hits = prefill.start

    def _run(self, prefill: Prefill) -> None:
        row = prefill.row
        self.prefixes.store(prefill.job.weights, prefill.tokens, row)
        for sample in prefill.samples[1:]:
            to = sample.held_row
            row.pool.copy(row.index, to.pool, to.index, len(prefill.tokens))
        for sample in prefill.samples:
            if sample.num_left:
                sample.held_row.pool.run(sample.held_row)
                self.running.append(sample)
            else:
                self._waiting.leave(sample)
                self._release(sample)

    def _suspend(self, sample: Sample) -> None:
        bisect.insort(self._suspended, sample, key=_age)

    def _release(self, sample: Sample) -> None:
        if sample.row is None:
            return
        self._cache.give_back(sample.row)
        sample.row = None
        if sample in self.running:
            self.running.remove(sample)


def _plan(prefill: Prefill, num_left: int, planned: list[Prefill]) -> bool:
    """Whether a part of it is read in this step: all that is left, or, of what is read first, as much as may be."""
    if planned and prefill.num_left > num_left:
        return False
    prefill.stop = prefill.start + min(prefill.num_left, num_left)
    planned.append(prefill)
    return True


def _capacity(sample: Sample) -> int:
    return sample.num_tokens + min(sample.num_left, _HEADROOM)


def _expected(sample: Sample) -> int:
    """Tokens that a sample is taken to need before it is known how many it does."""
    return min(sample.job.call.max_tokens, _HEADROOM)


def _num_shared(one: torch.Tensor, other: torch.Tensor) -> int:
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).nonzero()
    return int(differ[0]) if len(differ) else length


def _age(sample: Sample) -> tuple[int, int]:
    """Smaller is older."""
    return sample.job.number, sample.index
