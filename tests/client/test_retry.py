from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from together_post_training.client.retry import (
    CONNECT_TIMEOUT_VARIABLE,
    RetryPolicy,
    policy_from,
)


@given(attempt=st.integers(0, 2000), random=st.floats(0, 1, exclude_max=True))
def test_delay_stays_within_jitter_of_the_backoff(attempt, random):
    policy = RetryPolicy(first_delay_s=0.05, max_delay_s=5.0, jitter=0.25)
    backoff = min(5.0, 0.05 * 2.0 ** min(attempt, 20))
    assert 0.75 * backoff <= policy.delay_s(attempt, random) <= 1.25 * backoff


@given(
    attempt=st.integers(0, 2000),
    random=st.floats(0, 1, exclude_max=True),
    told_s=st.floats(0, 1000),
)
def test_delay_is_what_the_server_asked_for_and_a_little_more_however_often(
    attempt, random, told_s
):
    policy = RetryPolicy(first_delay_s=0.05, max_delay_s=5.0, jitter=0.25)
    delay_s = policy.delay_s(attempt, random, told_s=told_s)
    assert max(told_s, 0.05) <= delay_s <= 1.25 * max(told_s, 0.05)


def test_policy_gives_a_server_half_a_minute_to_answer_first_and_five_to_come_back():
    policy = policy_from({})
    assert (policy.connect_timeout_s, policy.outage_timeout_s) == (30.0, 300.0)


def test_policy_takes_the_connect_timeout_from_the_environment():
    assert policy_from({CONNECT_TIMEOUT_VARIABLE: "2.5"}).connect_timeout_s == 2.5


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_policy_refuses_a_connect_timeout_that_is_none(text):
    with pytest.raises(ValueError, match=f"{CONNECT_TIMEOUT_VARIABLE} is '{text}'"):
        policy_from({CONNECT_TIMEOUT_VARIABLE: text})
