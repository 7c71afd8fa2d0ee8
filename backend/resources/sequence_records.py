"""What the generator sampled, kept for losses that read it: tokens and log-probabilities by sequence id."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Array = np.ndarray

LIFETIME_S = 24 * 3600.0
MAX_BYTES = 512 * 1024 * 1024
# Of Python's own, for each record.
_OVERHEAD_BYTES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRecord:
    """One sampled sequence: prompt int32 (P,), tokens int32 (N,), logprobs float32 (N,) as they were sampled."""

    prompt: Array
    tokens: Array
    logprobs: Array


@dataclass(frozen=True, slots=True)
class _Kept:
    """The records of one request, which share their prompt and go together."""

    records: Mapping[str, SequenceRecord]
    num_bytes: int
    end_s: float


class SequenceRecords:
    """At most `max_bytes`, each for `lifetime_s` at most; the oldest go first. They end with the server.

    The event loop adds; any thread may look one up.

    clock: seconds, never back.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        lifetime_s: float = LIFETIME_S,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._clock = clock
        self._lifetime_s = lifetime_s
        self._max_bytes = max_bytes
        self._kept: deque[_Kept] = deque()
        # To look one up is one look at this, so that it needs no lock.
        self._by_id: dict[str, tuple[SequenceRecord, float]] = {}
        self.num_bytes = 0

    def add(self, records: Mapping[str, SequenceRecord]) -> None:
        """Those of one request, by their ids."""
        prompt_bytes = max((record.prompt.nbytes for record in records.values()), default=0)
        own_bytes = (
            r.tokens.nbytes + r.logprobs.nbytes + _OVERHEAD_BYTES for r in records.values()
        )
        kept = _Kept(records, prompt_bytes + sum(own_bytes), self._clock() + self._lifetime_s)
        self._kept.append(kept)
        self.num_bytes += kept.num_bytes
        self._by_id.update((id_, (record, kept.end_s)) for id_, record in records.items())
        self._drop_old()

    def find(self, sequence_id: str) -> SequenceRecord | None:
        record, end_s = self._by_id.get(sequence_id, (None, 0.0))
        return record if self._clock() < end_s else None

    def _drop_old(self) -> None:
        now = self._clock()
        while self._kept and (self.num_bytes > self._max_bytes or self._kept[0].end_s <= now):
            oldest = self._kept.popleft()
            self.num_bytes -= oldest.num_bytes
            for id_ in oldest.records:
                del self._by_id[id_]
