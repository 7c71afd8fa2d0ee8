"""How many calls a server holds: those that wait, those that run, and answers that nobody has taken yet.

Beyond that, calls are refused and told when to come again, so that a crowd costs them time and the server nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from together_post_training.errors import PostTrainingError, Reason, fail

_MIN_DELAY_S = 0.1
_MAX_DELAY_S = 30.0
# Of a new measurement of how long it takes until the next call ends.
_WEIGHT = 0.05
_MAX_INTERVAL_S = 1.0
# For each call that ends: were they as many, a server that once had too few would never learn that it could take more.
_RETURNS_PER_END = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """num_bytes: of requests and answers, as they are on the wire; in memory a request takes about four times that."""

    num_calls: int
    num_bytes: int


class Admission:
    """Owned by the event loop. `monotonic`: seconds, never back.

    A flow may hold as much as it leaves free: alone half of everything, one of two a third each. So whoever comes
    finds room, however much the others send or leave lying.
    """

    def __init__(self, limits: AdmissionLimits, monotonic: Callable[[], float]) -> None:
        self._limits = limits
        self._returns = _Returns(monotonic)
        self._calls_of: Counter[str] = Counter()
        self._bytes_of: Counter[str] = Counter()
        self.num_calls = 0
        self.num_bytes = 0
        self.num_refused = 0

    def enter(self, flow: str, num_bytes: int) -> Admitted:
        """Takes a call in, whose `Admitted` must be left in the end.

        Raises:
            PostTrainingError: RESOURCE_EXHAUSTED, with the seconds after which to try again.
        """
        limits = self._limits
        free_calls = limits.num_calls - self.num_calls - 1
        free_bytes = limits.num_bytes - self.num_bytes - num_bytes
        fits = _fits(self._calls_of.get(flow, 0), 1, free_calls) and (
            _fits(self._bytes_of.get(flow, 0), num_bytes, free_bytes)
            # Larger than all that there is: alone, if at all.
            or not self.num_calls
        )
        if not fits:
            self.num_refused += 1
            raise self._full()
        admitted = Admitted(self, flow)
        self._count(flow, calls=1)
        admitted.hold(num_bytes)
        return admitted

    def _count(self, flow: str, *, calls: int = 0, num_bytes: int = 0) -> None:
        self.num_calls += calls
        self.num_bytes += num_bytes
        self._calls_of[flow] += calls
        self._bytes_of[flow] += num_bytes
        if not self._calls_of[flow]:
            del self._calls_of[flow], self._bytes_of[flow]

    def _leave(self, flow: str, num_bytes: int) -> None:
        self._count(flow, calls=-1, num_bytes=-num_bytes)
        self._returns.note_end()

    def _full(self) -> PostTrainingError:
        limits = self._limits
        delay_s = self._returns.next_delay_s()
        error = fail(
            Reason.RESOURCE_EXHAUSTED,
            f"The server has all the sampling calls that it takes at a time: {self.num_calls} of {limits.num_calls}, "
            f"with {self.num_bytes / 2**20:.1f} of {limits.num_bytes / 2**20:.1f} MiB; nobody may hold more than what "
            f"is free. Try again in {delay_s:.1f} s.",
            num_calls=self.num_calls,
            max_calls=limits.num_calls,
            num_bytes=self.num_bytes,
            max_bytes=limits.num_bytes,
        )
        error.retry_after_s = delay_s
        return error


class Admitted:
    """One call's share, until it is left."""

    def __init__(self, admission: Admission, flow: str) -> None:
        self._admission = admission
        self.flow = flow
        self._num_bytes = 0
        self._is_left = False

    def hold(self, num_bytes: int) -> None:
        """It holds as much more."""
        if not self._is_left:
            self._num_bytes += num_bytes
            self._admission._count(self.flow, num_bytes=num_bytes)

    def leave(self) -> None:
        """Once; again changes nothing."""
        if not self._is_left:
            self._is_left = True
            self._admission._leave(self.flow, self._num_bytes)


def _fits(held: int, more: int, free: int) -> bool:
    """`held`: by the flow before; `free`: what would be left to everyone."""
    return free >= 0 and (not held or held + more <= free)


class _Returns:
    """When those who were refused come again: one after the other, somewhat faster than calls end."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._last_end_s = monotonic()
        self._next_s = 0.0
        self._interval_s = 0.0

    def note_end(self) -> None:
        now = self._monotonic()
        interval_s = min(now - self._last_end_s, _MAX_INTERVAL_S)
        self._interval_s += _WEIGHT * (interval_s - self._interval_s)
        self._last_end_s = now

    def next_delay_s(self) -> float:
        now = self._monotonic()
        earliest, latest = now + _MIN_DELAY_S, now + _MAX_DELAY_S
        self._next_s = min(
            max(self._next_s + self._interval_s / _RETURNS_PER_END, earliest), latest
        )
        return self._next_s - now
