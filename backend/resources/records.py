"""What is kept of what was sampled, for training on it: by key, in memory, for about a day."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

Array = np.ndarray

LIFETIME_S = 24 * 3600.0
# Of Python's own, for each record.
_OVERHEAD_BYTES = 500


class Record(Protocol):
    @property
    def arrays(self) -> tuple[Array, ...]:
        """All that it holds; records of one request may share some."""
        ...


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class _Kept(Generic[R]):
    """The records of one request, which go together."""

    records: Mapping[str, R]
    num_bytes: int
    end_s: float


class Records(Generic[R]):
    """At most `max_bytes`, each for `lifetime_s` at most; the oldest go first. They end with the server.

    The event loop adds; any thread may look one up.

    clock: seconds, never back.
    """

    def __init__(
        self, clock: Callable[[], float], *, lifetime_s: float = LIFETIME_S, max_bytes: int
    ) -> None:
        self._clock = clock
        self._lifetime_s = lifetime_s
        self._max_bytes = max_bytes
        self._kept: deque[_Kept[R]] = deque()
        # To look one up is one look at this, so that it needs no lock.
        self._by_key: dict[str, tuple[R, float]] = {}
        self.num_bytes = 0

    def add(self, records: Mapping[str, R]) -> None:
        """Those of one request, by their keys."""
        sizes = {id(array): array.nbytes for r in records.values() for array in r.arrays}
        num_bytes = sum(sizes.values()) + len(records) * _OVERHEAD_BYTES
        kept = _Kept(records, num_bytes, self._clock() + self._lifetime_s)
        self._kept.append(kept)
        self.num_bytes += kept.num_bytes
        self._by_key.update((key, (record, kept.end_s)) for key, record in records.items())
        self._drop_old()

    def find(self, key: str) -> R | None:
        record, end_s = self._by_key.get(key, (None, 0.0))
        return record if self._clock() < end_s else None

    def _drop_old(self) -> None:
        now = self._clock()
        while self._kept and (self.num_bytes > self._max_bytes or self._kept[0].end_s <= now):
            oldest = self._kept.popleft()
            self.num_bytes -= oldest.num_bytes
            for key in oldest.records:
                del self._by_key[key]
