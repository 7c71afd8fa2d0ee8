"""What a server holds at most, and what it tells those whom it refuses."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.generator.admission import Admission, AdmissionLimits, Admitted
from together_post_training.errors import PostTrainingError, Reason


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def admission(
    num_calls: int = 100, num_bytes: int = 10**6, clock: Clock | None = None
) -> Admission:
    return Admission(AdmissionLimits(num_calls=num_calls, num_bytes=num_bytes), clock or Clock(0.0))


def enter_all(to: Admission, flow: str, num_bytes: int = 1) -> list[Admitted]:
    """As many as it takes."""
    admitted: list[Admitted] = []
    while True:
        try:
            admitted.append(to.enter(flow, num_bytes))
        except PostTrainingError:
            return admitted


def delay_s(to: Admission, flow: str) -> float:
    with pytest.raises(PostTrainingError) as refused:
        to.enter(flow, 1)
    assert refused.value.reason is Reason.RESOURCE_EXHAUSTED
    assert refused.value.retry_after_s is not None
    return refused.value.retry_after_s


def test_one_flow_alone_takes_half_and_leaves_room_for_others():
    a = admission(num_calls=100)
    assert len(enter_all(a, "first")) == 50
    assert len(enter_all(a, "second")) == 25
    assert len(enter_all(a, "third")) >= 10
    assert a.num_calls <= 100


def test_bytes_are_bounded_like_calls():
    a = admission(num_bytes=1000)
    assert len(enter_all(a, "first", 10)) == 50
    assert len(enter_all(a, "second", 100)) == 2


def test_single_place_is_taken_and_given_back():
    a = admission(num_calls=1)
    (only,) = enter_all(a, "first")
    assert not enter_all(a, "second")
    only.leave()
    only.leave()
    assert len(enter_all(a, "second")) == 1


def test_call_larger_than_everything_is_taken_in_alone():
    a = admission(num_bytes=1000)
    huge = a.enter("first", 5000)
    assert not enter_all(a, "second")
    huge.leave()
    assert a.enter("second", 1)


def test_answers_that_nobody_fetches_are_counted_until_they_leave():
    a = admission(num_bytes=1000)
    slow = a.enter("slow", 10)
    slow.hold(700)
    assert not enter_all(a, "slow")
    assert len(enter_all(a, "other", 10)) >= 10
    slow.leave()
    slow.hold(10**9)
    assert a.num_bytes < 1000


def test_refusal_says_what_is_full_and_how_full():
    a = admission(num_calls=10, num_bytes=2**20)
    enter_all(a, "first")
    with pytest.raises(PostTrainingError, match=r"5 of 10.* of 1.0 MiB.*Try again in") as refused:
        a.enter("first", 1)
    assert refused.value.metadata["max_calls"] == "10"


def test_those_who_were_refused_come_again_one_by_one_twice_as_fast_as_calls_end():
    clock = Clock(0.0)
    a = admission(num_calls=1000, clock=clock)
    held = enter_all(a, "first")
    for admitted in held[:200]:
        clock.now += 0.01
        admitted.leave()
    enter_all(a, "first")
    delays = [delay_s(a, "first") for _ in range(1000)]
    # A hundred calls end each second.
    assert delays[999] - delays[499] == pytest.approx(2.5, rel=0.05)
    assert delays == sorted(delays)


def test_nobody_is_sent_away_for_long_or_back_at_once():
    clock = Clock(0.0)
    a = admission(num_calls=4, clock=clock)
    held = enter_all(a, "first")
    assert delay_s(a, "first") >= 0.1
    clock.now += 1000
    held[0].leave()
    enter_all(a, "first")
    assert max(delay_s(a, "first") for _ in range(5000)) <= 30.0
    clock.now += 31
    assert delay_s(a, "first") <= 1.0


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(1, 400), st.booleans()), max_size=60
    )
)
def test_never_more_is_held_than_the_limits_and_all_is_given_back(actions):
    a = admission(num_calls=8, num_bytes=1000)
    held: list[Admitted] = []
    for flow, num_bytes, leaves in actions:
        if leaves and held:
            held.pop(num_bytes % len(held)).leave()
            continue
        with contextlib.suppress(PostTrainingError):
            held.append(a.enter(flow, num_bytes))
        assert a.num_calls == len(held) <= 8
        assert a.num_bytes <= 1000
    for admitted in held:
        admitted.leave()
    assert (a.num_calls, a.num_bytes) == (0, 0)
    assert not a._calls_of
    assert not a._bytes_of
