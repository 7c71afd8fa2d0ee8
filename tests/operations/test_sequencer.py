"""Law 11, against a model that keeps everything and decides from scratch."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend.operations.sequencer import Sequencer
from together_post_training.errors import PostTrainingError, Reason

MAX_HELD = 5
GAP_TIMEOUT_S = 10.0

numbers = st.integers(min_value=-1, max_value=14)
digests = st.sampled_from([b"a", b"b"])


class SequencerMachine(RuleBasedStateMachine):
    """The model: which numbers were claimed with what, which of those were committed, who was released."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.heard = 0.0
        self.sequencer = Sequencer(max_held=MAX_HELD, gap_timeout_s=GAP_TIMEOUT_S, now=self.now)
        self.claimed: dict[int, bytes | None] = {}
        self.committed: set[int] = set()
        self.released: list[int] = []

    def next_expected(self) -> int:
        n = 1
        while n in self.committed:
            n += 1
        return n

    @rule(number=numbers, digest=digests)
    def submit(self, number: int, digest: bytes) -> None:
        expected = self.expected_claim(number, digest)
        if isinstance(expected, Reason):
            with pytest.raises(PostTrainingError) as caught:
                self.sequencer.claim(number, digest)
            assert caught.value.reason == expected
            return
        assert self.sequencer.claim(number, digest) is expected
        self.claimed.setdefault(number, digest)

    def expected_claim(self, number: int, digest: bytes) -> Reason | bool:
        if number < 1:
            return Reason.INVALID_ARGUMENT
        if number in self.claimed:
            known = self.claimed[number]
            return False if known in (None, digest) else Reason.SEQUENCE_REUSED
        if number >= self.next_expected() + MAX_HELD:
            return Reason.RESOURCE_EXHAUSTED
        return True

    @precondition(lambda self: self.claimed.keys() - self.committed)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.claimed.keys() - self.committed)))
        before = self.next_expected()
        self.committed.add(number)
        expected = list(range(before, self.next_expected()))
        assert self.sequencer.commit(number) == expected
        self.released += expected

    @precondition(lambda self: self.claimed.keys() - self.committed)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.claimed.keys() - self.committed)))
        self.sequencer.abandon(number)
        del self.claimed[number]

    @rule(number=st.integers(min_value=1, max_value=14))
    def use_up(self, number: int) -> None:
        """A number that was never submitted is cancelled."""
        if number in self.claimed or number >= self.next_expected() + MAX_HELD:
            return
        assert self.sequencer.claim(number, None)
        self.claimed[number] = None

    @rule(seconds=st.sampled_from([1.0, 4.0, GAP_TIMEOUT_S]), is_alive=st.booleans())
    def time_passes(self, seconds: float, is_alive: bool) -> None:
        self.now += seconds
        if is_alive:
            self.sequencer.alive(self.now)
            self.heard = self.now

    @rule()
    def look_for_missing(self) -> None:
        held = self.committed - set(self.released)
        expected = []
        if held and self.now - self.heard >= GAP_TIMEOUT_S:
            expected = [n for n in range(self.next_expected(), max(held)) if n not in self.claimed]
        assert self.sequencer.missing(self.now) == expected

    @invariant()
    def every_number_takes_effect_once_and_in_order(self) -> None:
        assert self.released == list(range(1, self.next_expected()))
        assert self.sequencer.next_sequence == self.next_expected()

    @invariant()
    def what_is_held_is_bounded(self) -> None:
        assert self.sequencer.num_held == len(self.committed) - len(self.released) < MAX_HELD


TestSequencer = SequencerMachine.TestCase


def test_sequencer_releases_what_waited_when_the_missing_number_comes():
    sequencer = Sequencer(max_held=10, gap_timeout_s=60, now=0)
    for number in (3, 2, 5):
        assert sequencer.claim(number, b"x")
        assert sequencer.commit(number) == []
    sequencer.claim(1, b"x")
    assert sequencer.commit(1) == [1, 2, 3]
    sequencer.claim(4, b"x")
    assert sequencer.commit(4) == [4, 5]


def test_sequencer_waits_for_a_missing_number_while_the_caller_is_alive():
    sequencer = Sequencer(max_held=10, gap_timeout_s=60, now=0)
    sequencer.claim(3, b"x")
    sequencer.commit(3)
    for now in range(0, 600, 10):
        sequencer.alive(now)
        assert sequencer.missing(now + 9) == []
    assert sequencer.missing(590 + 59.9) == []
    assert sequencer.missing(590 + 60) == [1, 2]


def test_sequencer_keeps_a_number_that_is_being_written_down_from_being_lost():
    sequencer = Sequencer(max_held=10, gap_timeout_s=60, now=0)
    sequencer.claim(3, b"x")
    sequencer.commit(3)
    sequencer.claim(1, b"x")
    assert sequencer.missing(1000) == [2]


@pytest.mark.parametrize("number", [0, -1, 2**53 + 1])
def test_sequencer_refuses_malformed_numbers_with_the_value(number: int):
    sequencer = Sequencer(max_held=10, gap_timeout_s=60, now=0)
    with pytest.raises(PostTrainingError, match=str(number)):
        sequencer.claim(number, b"x")
