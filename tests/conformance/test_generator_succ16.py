"""Generators on the closed-form bigram: numbers worked out by hand.

Tolerance 1e-4 on logprobs: a transformer with this model's weights ends in RMSNorm with an epsilon of
1e-6, which alone moves a hit by 7e-6.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.conformance.bench import Bench
from tests.conformance.data import HIT, MISS, always, call
from together_post_training.errors import PostTrainingError

TOL = 1e-4


@pytest.mark.parametrize(
    ("prompt", "stop_tokens", "max_tokens", "expected", "reason"),
    [
        ([3], [6], 10, [4, 5, 6], "stop"),
        ([3], [], 2, [4, 5], "length"),
        ([3], [6], 3, [4, 5, 6], "stop"),
        ([6], [6], 20, [*range(7, 16), *range(7)], "stop"),
        ([3], [9], 4, [4, 5, 6, 7], "length"),
        # Several, as a model's end-of-sequence tokens are given: each counts.
        ([3], [6, 9], 12, [4, 5, 6], "stop"),
        ([6], [6, 9], 12, [7, 8, 9], "stop"),
        ([6], [12], 12, [7, 8, 9, 10, 11, 12], "stop"),
    ],
)
def test_stop_token_is_kept_and_counted(
    succ16: Bench, prompt, stop_tokens, max_tokens, expected, reason
):
    """SA-10, SA-13."""
    greedy = call(prompt, max_tokens=max_tokens, temperature=0.0, stop_tokens=stop_tokens)
    (sequence,) = succ16.sample(greedy).sequences
    assert sequence.tokens.tolist() == expected
    assert sequence.tokens.dtype == np.int32
    assert sequence.logprobs.dtype == np.float32
    assert sequence.stop_reason == reason
    np.testing.assert_allclose(sequence.logprobs, [HIT] * len(expected), atol=TOL)


def test_greedy_runs_to_the_end_of_the_window(succ16: Bench):
    """SA-18."""
    window = succ16.generator.model.limits.max_seq_length
    (sequence,) = succ16.sample(call([3], max_tokens=window - 1, temperature=0.0)).sequences
    assert sequence.tokens.tolist() == [(4 + i) % 16 for i in range(window - 1)]
    assert sequence.stop_reason == "length"


@pytest.mark.parametrize(
    "limits",
    [
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"temperature": 1e-38},
        {"temperature": 5e-324},
        {"top_p": 1e-6},
        {"top_p": 0.7},
        {"top_k": 1, "temperature": 5.0},
    ],
)
def test_extreme_limits_are_greedy_with_raw_logprobs(succ16: Bench, limits):
    """SA-03, SA-07."""
    result = succ16.sample(call([3], num_samples=20, max_tokens=1, **limits))
    assert {s.tokens.tolist()[0] for s in result.sequences} == {4}
    for sequence in result.sequences:
        np.testing.assert_allclose(sequence.logprobs, [HIT], atol=TOL)


@pytest.mark.parametrize(
    ("temperature", "share"), [(1.0, 0.784477), (0.5, 0.994994), (2.0, 0.330030), (5.0, 0.129197)]
)
def test_temperature_sets_the_share_of_the_likeliest(succ16: Bench, temperature, share):
    """4 standard deviations of 2000 draws; exact shares are e^(4/T) / (e^(4/T) + 15). SA-03."""
    result = succ16.sample(call([3], num_samples=2000, max_tokens=1, temperature=temperature))
    tokens = np.concatenate([s.tokens for s in result.sequences])
    assert np.mean(tokens == 4) == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / 2000))
    # The other 15 are equally likely: all occur, unless the hit takes nearly everything.
    assert temperature < 1 or len(set(tokens.tolist())) == 16
    logprobs = np.concatenate([s.logprobs for s in result.sequences])
    np.testing.assert_allclose(logprobs, np.where(tokens == 4, HIT, MISS), atol=TOL)


def test_positions_of_a_sample_are_drawn_independently(succ16: Bench):
    """At temperature 5 tokens are nearly uniform: neighbours in 2000 samples do not correlate."""
    asked = call([3], num_samples=2000, max_tokens=3, temperature=5.0)
    tokens = np.array([s.tokens for s in succ16.sample(asked).sequences])
    steps = (np.diff(tokens, axis=1) % 16).astype(float)
    # A share of .129197 of hits, whatever came before; 4.5 standard deviations.
    both = np.mean((steps == 1).all(axis=1))
    assert both == pytest.approx(0.016692, abs=4.5 * np.sqrt(0.016692 / 2000))
    for first, second in ((tokens[:, 0], tokens[:, 1]), (tokens[:, 1], tokens[:, 2])):
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.1 + 4.5 / np.sqrt(2000)


def test_top_k_above_the_vocabulary_and_0_keep_all(succ16: Bench):
    """SA-06."""
    free = call([3], num_samples=8, max_tokens=12, temperature=5.0)
    expected = [s.tokens.tolist() for s in succ16.sample(free).sequences]
    for top_k in (16, 1000):
        got = succ16.sample(replace(free, top_k=top_k)).sequences
        assert [s.tokens.tolist() for s in got] == expected
    assert len({tuple(tokens) for tokens in expected}) == 8


def test_top_k_keeps_the_lowest_of_equal_tokens(succ16: Bench):
    """After 3: token 4, then of the fifteen equals 0 and 1."""
    result = succ16.sample(call([3], num_samples=300, max_tokens=1, temperature=5.0, top_k=3))
    assert {int(s.tokens[0]) for s in result.sequences} == {4, 0, 1}


def test_top_p_keeps_the_fewest_tokens_that_reach_it(succ16: Bench):
    """.784477 + .014368 reaches .79 and two more are needed for .82: 4, 0, 1, 2."""
    for top_p, kept in ((0.79, {4, 0}), (0.82, {4, 0, 1, 2})):
        hot = call([3], num_samples=2000, max_tokens=1, top_p=top_p)
        assert {int(s.tokens[0]) for s in succ16.sample(hot).sequences} == kept


def test_prompt_logprobs_have_the_prompts_length(succ16: Bench):
    """LG-03."""
    scored = succ16.sample(call([3, 4, 5, 9, 10], max_tokens=0, prompt_logprobs=True))
    assert scored.prompt_logprobs is not None
    assert scored.prompt_logprobs.dtype == np.float32
    np.testing.assert_allclose(scored.prompt_logprobs, [np.nan, HIT, HIT, MISS, HIT], atol=TOL)
    single = succ16.sample(call([3], max_tokens=0, prompt_logprobs=True)).prompt_logprobs
    np.testing.assert_equal(single, [np.nan])
    both = succ16.sample(call([3, 9], max_tokens=3, prompt_logprobs=True))
    assert both.prompt_logprobs is not None
    np.testing.assert_allclose(both.prompt_logprobs, [np.nan, MISS], atol=TOL)
    assert len(both.sequences[0].tokens) == 3


def test_prompt_logprobs_are_absent_unless_asked_for(succ16: Bench):
    result = succ16.sample(call([3, 4], max_tokens=2))
    assert result.prompt_logprobs is None
    assert result.topk_prompt is None
    assert result.sequences[0].topk is None


@pytest.mark.parametrize("k", [3, 16, 17])
def test_topk_of_the_prompt(succ16: Bench, k):
    """LG-05."""
    result = succ16.sample(call([3, 4], num_samples=4, max_tokens=1, topk_prompt_logprobs=k))
    topk = result.topk_prompt
    assert topk is not None
    assert topk.token_ids.shape == topk.logprobs.shape == (2, k)
    assert topk.token_ids.dtype == np.int32
    assert topk.logprobs.dtype == np.float32
    assert np.all(topk.logprobs[0] == -99999)  # nothing is predicted at position 0
    kept = min(k, 16)
    assert topk.token_ids[1, :3].tolist() == [4, 0, 1]
    np.testing.assert_allclose(topk.logprobs[1, :kept], [HIT] + [MISS] * (kept - 1), atol=TOL)
    assert np.all(topk.logprobs[1, kept:] == -99999)
    if k >= 16:
        assert np.exp(topk.logprobs[1, :16].astype(float)).sum() == pytest.approx(1, abs=1e-4)


def test_topk_of_sampled_positions(succ16: Bench):
    asked = call([3], num_samples=2, max_tokens=5, temperature=5.0, topk_sample_logprobs=2)
    for sequence in succ16.sample(asked).sequences:
        assert sequence.topk is not None
        assert sequence.topk.token_ids.shape == (5, 2)
        contexts = [3, *sequence.tokens.tolist()[:-1]]
        assert sequence.topk.token_ids[:, 0].tolist() == [(c + 1) % 16 for c in contexts]
        np.testing.assert_allclose(sequence.topk.logprobs, [[HIT, MISS]] * 5, atol=TOL)


def test_snapshots_and_the_base_answer_side_by_side(succ16: Bench):
    session = succ16.session(rank=4, alpha=16)
    snapshots = []
    for token in (9, 12):
        adapter = always(succ16.trainer, session, token=token, delta=8.0)
        snapshots.append(succ16.name("snapshot"))
        succ16.add(snapshots[-1], adapter)
    for snapshot, expected in ((None, 4), (snapshots[0], 9), (snapshots[1], 12), (None, 4)):
        asked = call([3], snapshot=snapshot, max_tokens=3, temperature=0.0)
        assert succ16.sample(asked).sequences[0].tokens[0] == expected


def test_a_very_unlikely_token_has_a_finite_logprob(succ16: Bench):
    """LG-06."""
    session = succ16.session(rank=4, alpha=16)
    snapshot = succ16.name("snapshot")
    adapter = always(succ16.trainer, session, token=2, delta=-1e5)
    succ16.add(snapshot, adapter)
    result = succ16.sample(
        call([3, 2], snapshot=snapshot, max_tokens=0, prompt_logprobs=True, topk_prompt_logprobs=16)
    )
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[1] == pytest.approx(-1e5, rel=1e-3)
    assert result.topk_prompt is not None
    assert result.topk_prompt.token_ids[1, -1] == 2
    assert np.isfinite(result.topk_prompt.logprobs).all()


def test_stop_strings_are_matched_or_refused(succ16: Bench):
    """A model without text refuses them; one whose token i is the letter i stops at "efg"."""
    asked = call([3], max_tokens=10, temperature=0.0, stop_strings=["efg"])
    try:
        (sequence,) = succ16.sample(asked).sequences
    except PostTrainingError as error:
        assert "efg" in str(error)  # noqa: PT017 (either answer is right, silence is not)
    else:
        assert sequence.tokens.tolist() == [4, 5, 6]
        assert sequence.stop_reason == "stop"
