"""Samples put together from the parts that a server gave, and where they end."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.generator.base import Segment, Stop
from backend.generator.sglang.replies import End, Sampled
from backend.generator.sglang.sample_run import SampleRun, stop_length
from backend.generator.stopping import StopMatcher
from tests.generator.sglang.stand_in_engine import letter
from tests.generator.sglang.test_generator import call
from together_post_training.errors import PostTrainingError


def decode(tokens) -> str:
    return "".join(map(letter, tokens))


def part(tokens: list[int], end: End = "length") -> Sampled:
    return Sampled(
        tokens=np.array(tokens, np.int32),
        logprobs=-np.array(tokens, np.float32),
        topk=None,
        end=end,
        cached_tokens=0,
        weight_version="",
    )


def run_of(**settings) -> SampleRun:
    return SampleRun(call([1, 2], **settings), 0, decode, None, ExitStack())


@given(
    st.lists(st.integers(0, 3), max_size=30),
    st.lists(st.text("abcd", min_size=1, max_size=3), max_size=3),
    st.sets(st.integers(0, 3), max_size=1),
)
def test_samples_end_where_a_matcher_that_sees_every_token_ends_them(tokens, strings, named):
    stop = Stop(strings=tuple(strings), tokens=tuple(named))
    matcher = StopMatcher(stop, decode)
    expected = next((i + 1 for i, token in enumerate(tokens) if matcher.push(token)), None)
    assert stop_length(tokens, stop, decode) == expected


def test_parts_follow_each_other_and_each_goes_on_from_all_before():
    run = run_of(max_tokens=5, stop=Stop(tokens=(9,)))
    run.take(part([3, 7], end="stop"), None)  # 7 is the model's own, and not the call's.
    assert not run.is_finished
    assert run.so_far() == [1, 2, 3, 7]
    assert run.num_left == 3
    run.take(part([4, 9], end="stop"), None)
    sequence = run.result()
    assert sequence.tokens.tolist() == [3, 7, 4, 9]
    assert sequence.logprobs.tolist() == [-3, -7, -4, -9]
    assert sequence.stop_reason == "stop"
    assert sequence.segments == ()


def test_segments_tell_from_which_token_on_other_weights_were_asked():
    run = run_of(max_tokens=4, snapshot="a")
    run.move("b", None)
    run.take(part([3], end="abort"), "a")
    run.move("c", None)
    run.take(part([], end="abort"), "b")  # None was sampled before it moved on.
    run.take(part([4, 5, 6]), "c")
    assert run.result().segments == (Segment(snapshot="a"), Segment(snapshot="c", first_token=1))


def test_a_sample_that_moved_before_its_first_token_is_all_of_the_new_weights():
    run = run_of(max_tokens=1, snapshot="a")
    run.move("b", None)
    run.take(part([], end="abort"), "a")
    run.take(part([4]), "b")
    assert run.result().segments == (Segment(snapshot="b"),)


def test_segments_beyond_the_stop_are_left_out():
    """A string began under the first weights and ended under the second, where the server did not see it."""
    run = run_of(max_tokens=6, snapshot="a", stop=Stop(strings=("de",)))
    run.move("b", None)
    run.take(part([2, 3], end="abort"), "a")
    run.move("c", None)
    run.take(part([4, 5], end="abort"), "b")
    assert run.is_finished
    sequence = run.result()
    assert sequence.tokens.tolist() == [2, 3, 4]
    assert sequence.segments == (Segment(snapshot="a"), Segment(snapshot="b", first_token=2))


@pytest.mark.parametrize(
    ("end", "says"), [("abort", "told by others"), ("stop", "no tokens"), ("length", "no tokens")]
)
def test_what_would_never_end_is_refused(end, says):
    with pytest.raises(PostTrainingError, match=says):
        run_of().take(part([], end=end), None)
