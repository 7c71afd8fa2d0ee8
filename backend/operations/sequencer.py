"""The order of one session's operations: by sequence number, whatever the order in which they arrive.

    claim    a submission arrives                new, the same again, or refused
    commit   what was claimed may take effect    everything that is now in order is released
    abandon  it could not be accepted after all  the number is free again

Between claim and commit the submission is written to the journal, so that nothing takes effect that is not kept.
A number that is used up without a submission (cancelled, lost) is claimed and committed without a digest.

Pure: no clock, no I/O, no locks. The event loop owns it.
"""

from __future__ import annotations

from together_post_training.errors import Reason, fail
from together_post_training.names import MAX_SEQUENCE


class Sequencer:
    """Releases every number from 1 on, once each, in order.

    Args:
        max_held: how far ahead of the next number a submission may be. It bounds what is held.
        gap_timeout_s: how long a missing number is waited for after the session's last sign of life.
        now: seconds, of any clock; the same clock's readings go into `alive` and `missing`.
    """

    def __init__(self, *, max_held: int, gap_timeout_s: float, now: float) -> None:
        self._max_held = max_held
        self._gap_timeout_s = gap_timeout_s
        self._last_alive = now
        self._next = 1
        # By number; None: used up without a submission.
        self._digests: dict[int, bytes | None] = {}
        self._held: set[int] = set()

    @property
    def next_sequence(self) -> int:
        """The smallest number that has not been released."""
        return self._next

    @property
    def num_held(self) -> int:
        return len(self._held)

    def is_used(self, sequence: int) -> bool:
        return sequence in self._digests

    def claim(self, sequence: int, digest: bytes | None) -> bool:
        """True: it is new, and the caller commits or abandons it. False: it is the same as before.

        A number that was used up without a submission answers every submission like the same one.

        Raises:
            PostTrainingError: INVALID_ARGUMENT, SEQUENCE_REUSED, RESOURCE_EXHAUSTED. Nothing has changed then.
        """
        if not 1 <= sequence <= MAX_SEQUENCE:
            raise fail(
                Reason.INVALID_ARGUMENT,
                f"Sequence number {sequence}: a session's operations are numbered 1, 2, 3, ...",
                sequence=sequence,
            )
        if sequence in self._digests:
            check_same(sequence, self._digests[sequence], digest)
            return False
        if sequence >= self._next + self._max_held:
            raise fail(
                Reason.RESOURCE_EXHAUSTED,
                f"Sequence number {sequence} is too far ahead: operation {self._next} has not arrived yet, and at "
                f"most {self._max_held} numbers from there on are accepted. Send {self._next} first.",
                sequence=sequence,
                next_sequence=self._next,
                max_held=self._max_held,
            )
        self._digests[sequence] = digest
        return True

    def commit(self, sequence: int) -> list[int]:
        """The numbers that may now take effect, in order; empty when an earlier one is missing."""
        assert sequence in self._digests, f"{sequence} was not claimed"
        assert sequence not in self._held, f"{sequence} was committed before"
        self._held.add(sequence)
        released = []
        while self._next in self._held:
            self._held.remove(self._next)
            released.append(self._next)
            self._next += 1
        return released

    def abandon(self, sequence: int) -> None:
        """Takes a claim back."""
        assert sequence >= self._next, f"{sequence} was released"
        assert sequence not in self._held, f"{sequence} was committed"
        del self._digests[sequence]

    def alive(self, now: float) -> None:
        """The session's caller was heard of."""
        self._last_alive = max(self._last_alive, now)

    def missing(self, now: float) -> list[int]:
        """The numbers that others wait for and that will not come any more."""
        if not self._held or now - self._last_alive < self._gap_timeout_s:
            return []
        return [n for n in range(self._next, max(self._held)) if n not in self._digests]


def check_same(sequence: int, known: bytes | None, digest: bytes | None) -> None:
    """Raises SEQUENCE_REUSED unless the digests are equal, or one is None."""
    if known is None or digest is None or known == digest:
        return
    raise fail(
        Reason.SEQUENCE_REUSED,
        f"Sequence number {sequence} was used for another request. The same number is only for sending the "
        "same bytes again; number new requests on.",
        sequence=sequence,
    )
