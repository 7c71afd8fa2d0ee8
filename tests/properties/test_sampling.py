"""How a token is drawn: which are kept, from which distribution, by which number."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from backend.generator.sampling import (
    ABSENT_LOGPROB,
    Controls,
    TokenStream,
    alternative_uniforms,
    draw,
    draw_many,
    log_norms,
    topk,
)

RANDOM = np.random.default_rng(0)


def controls(num_rows: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Controls:
    return Controls(
        temperature=np.full(num_rows, temperature, np.float64),
        top_k=np.full(num_rows, top_k, np.int64),
        top_p=np.full(num_rows, top_p, np.float64),
        min_p=np.full(num_rows, min_p, np.float64),
    )


def distribution(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> np.ndarray:
    """The probabilities to draw from, written down plainly: sort, keep, renormalise."""
    scaled = row.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if 0 < top_k < len(p):
        order = order[:top_k]
    if top_p < 1:
        shares = np.cumsum(p[order]) / p[order].sum()
        order = order[: 1 + int(np.flatnonzero(np.append(shares, 2) >= top_p)[0])]
    order = [i for i in order if p[i] >= min_p * p.max()]
    kept = np.zeros_like(p)
    kept[order] = p[order]
    return kept / kept.sum()


def logit_rows(max_vocab: int = 12) -> st.SearchStrategy[np.ndarray]:
    """Few distinct values, so that many are equal; -inf is a token that cannot occur."""
    values = st.sampled_from([0.0, 0.0, 1.0, 2.5, -1.5, -40.0, 30.0, -np.inf])
    shapes = hnp.array_shapes(min_dims=2, max_dims=2, max_side=max_vocab)
    rows = hnp.arrays(st.sampled_from([np.float32, np.float64]), shapes, elements=values)
    return rows.filter(lambda a: bool(np.isfinite(a.max(axis=1)).all()))


UNIFORMS = st.floats(0, 1, exclude_max=True)
TEMPERATURES = st.sampled_from([1.0, 0.5, 2.0, 7.0])
TOP_P = st.sampled_from([1.0, 0.999, 0.9, 0.6, 0.5, 0.25, 0.01])
MIN_P = st.sampled_from([0.0, 1e-9, 0.01, 0.1, 0.3, 0.9, 1.0])


@given(
    logits=logit_rows(),
    temperature=TEMPERATURES,
    top_k=st.integers(-1, 14),
    top_p=TOP_P,
    min_p=MIN_P,
    uniform=UNIFORMS,
)
def test_a_token_is_the_inverse_of_its_distribution(
    logits, temperature, top_k, top_p, min_p, uniform
):
    """The drawn token's stretch of the cumulative distribution holds the number, to 1e-6 of rounding."""
    limits = controls(len(logits), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens, _ = draw(logits, limits, np.full(len(logits), uniform))
    for row, token in zip(logits, tokens, strict=True):
        p = distribution(row, temperature, top_k, top_p, min_p)
        assert p[token] > 0
        before = p[:token].sum()
        assert before - 1e-6 <= uniform <= before + p[token] + 1e-6


@given(logits=logit_rows(), top_k=st.integers(0, 12), top_p=TOP_P, min_p=MIN_P)
def test_exactly_the_kept_tokens_can_be_drawn(logits, top_k, top_p, min_p):
    """Over a fine grid of numbers; kept tokens rarer than a step of it may be missed, others never come."""
    num_draws = 257
    row = logits[:1]
    grid = (np.arange(num_draws) + 0.5) / num_draws
    many = np.repeat(row, num_draws, axis=0)
    limits = controls(num_draws, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens, _ = draw(many, limits, grid)
    p = distribution(row[0], 1.0, top_k, top_p, min_p)
    assert set(tokens.tolist()) <= set(np.flatnonzero(p).tolist())
    assert set(np.flatnonzero(p > 2 / num_draws).tolist()) <= set(tokens.tolist())


@given(logits=logit_rows(), temperature=TEMPERATURES, top_k=st.integers(0, 3), top_p=TOP_P)
def test_logprobs_are_of_the_raw_distribution(logits, temperature, top_k, top_p):
    limits = controls(len(logits), temperature=temperature, top_k=top_k, top_p=top_p)
    tokens, logprobs = draw(logits, limits, np.full(len(logits), 0.3))
    for row, token, logprob in zip(logits, tokens, logprobs, strict=True):
        p = distribution(row, 1.0, 0, 1.0)
        # float32 exponentials: 1e-6.
        assert logprob == pytest.approx(np.log(p[token]), abs=1e-6)


@given(logits=logit_rows(), uniform=UNIFORMS)
def test_temperature_0_takes_the_likeliest_of_equals_the_lowest(logits, uniform):
    tokens, _ = draw(logits, controls(len(logits), temperature=0.0), np.full(len(logits), uniform))
    assert tokens.tolist() == [int(np.argmax(row)) for row in logits]


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 5e-324])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tiny_temperatures_are_greedy_without_overflow(temperature, dtype):
    logits = np.array([[-3e38, 0.0, 1.0, 1.0 - 1e-3, 3e38 if dtype == np.float64 else 2.0]], dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens, logprobs = draw(logits, controls(1, temperature=temperature), np.array([0.999999]))
    assert tokens.tolist() == [4]
    assert np.isfinite(logprobs).all()


def test_huge_temperatures_are_uniform():
    logits = np.array([[0.0, 5.0, -5.0, 1.0]])
    for uniform, token in ((0.1, 0), (0.3, 1), (0.6, 2), (0.9, 3)):
        tokens, _ = draw(logits, controls(1, temperature=1e300), np.array([uniform]))
        assert tokens.tolist() == [token]


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 128, 129, 1000, 5000])
@pytest.mark.parametrize(
    "limits", [{}, {"temperature": 0.7}, {"top_k": 300}, {"top_p": 0.95}, {"min_p": 0.02}]
)
def test_a_row_is_drawn_the_same_in_any_company(vocab_size, limits):
    """Bit for bit: tokens and logprobs, alone, among others, and from a larger array."""
    logits = RANDOM.normal(size=(9, vocab_size)).astype(np.float32) * 3
    uniforms = RANDOM.random(9)
    tokens, logprobs = draw(logits, controls(9, **limits), uniforms)
    for i in range(9):
        token, logprob = draw(logits[i : i + 1], controls(1, **limits), uniforms[i : i + 1])
        assert (token[0], logprob[0]) == (tokens[i], logprobs[i])
    strided = np.stack([logits, logits], axis=1)[:, 0]
    again, same = draw(strided, controls(9, **limits), uniforms)
    assert np.array_equal(again, tokens)
    assert np.array_equal(same, logprobs)


@pytest.mark.parametrize(
    "limits", [{}, {"temperature": 0.5}, {"top_k": 700}, {"top_p": 0.8}, {"min_p": 0.05}]
)
def test_shares_follow_the_distribution_over_a_large_vocabulary(limits):
    """20000 evenly spread numbers give each token its share to one part in 20000, twice over."""
    logits = (RANDOM.normal(size=2000) * 2).astype(np.float32)
    p = distribution(logits, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, **limits})
    num_draws = 20000
    grid = (np.arange(num_draws) + 0.5) / num_draws
    counts = np.zeros(2000)
    for chunk in np.split(grid, 40):
        tokens, _ = draw(np.tile(logits, (500, 1)), controls(500, **limits), chunk)
        counts += np.bincount(tokens, minlength=2000)
    np.testing.assert_allclose(counts / num_draws, p, rtol=0, atol=2 / num_draws)


def test_mixed_rows_are_drawn_each_by_its_own_controls():
    logits = np.tile(np.array([[0.0, 3.0, 2.0, 1.0]]), (4, 1))
    mixed = Controls(
        temperature=np.array([0.0, 1.0, 1.0, 1e9]),
        top_k=np.array([0, 1, 0, 2]),
        top_p=np.array([1.0, 1.0, 1e-9, 1.0]),
        min_p=np.zeros(4),
    )
    tokens, _ = draw(logits, mixed, np.full(4, 0.999))
    assert tokens.tolist() == [1, 1, 1, 2]


def test_the_number_0_draws_the_first_token_that_can_occur():
    logits = np.full((1, 300), -np.inf)
    logits[0, [140, 200]] = 0.0
    tokens, _ = draw(logits, controls(1), np.zeros(1))
    assert tokens.tolist() == [140]


@pytest.mark.parametrize("limits", [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.99}])
def test_the_largest_number_below_1_draws_a_token_that_can_occur(limits):
    """Products and sums round up at the end: never past the last possible token."""
    largest = np.nextafter(1.0, 0.0)
    for size in (3, 200, 1001):
        logits = RANDOM.normal(size=(20, size)).astype(np.float32)
        logits[:, -2:] = -np.inf
        tokens, logprobs = draw(logits, controls(20, **limits), np.full(20, largest))
        assert np.isfinite(logprobs).all()
        assert tokens.max() < size - 2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_row_is_told_by_nan_and_spares_its_neighbours(bad):
    logits = np.array([[0.0, 1.0, 2.0]] * 3, np.float32)
    logits[1, 1] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens, logprobs = draw(logits, controls(3), np.full(3, 0.99))
    assert tokens.tolist() == [2, 0, 2]
    assert np.isnan(logprobs).tolist() == [False, True, False]
    nothing, logprob = draw(np.full((1, 3), -np.inf), controls(1), np.zeros(1))
    assert (nothing[0], np.isnan(logprob[0])) == (0, True)


def test_logits_are_left_alone():
    logits = RANDOM.normal(size=(2, 5)).astype(np.float32)
    before = logits.copy()
    draw(logits, controls(2, temperature=0.5, top_k=2, top_p=0.5), np.zeros(2))
    topk(logits, 3)
    assert np.array_equal(logits, before)


def test_min_p_is_applied_last_and_after_temperature():
    """Probabilities .4 .3 .2 .1. min_p .5 alone keeps those of at least .2. With top_p .55, which is of everything, .4
    and .3; were min_p first, .4 / .9 < .55 would need .3 too, and top_p .72 would keep two instead of three."""
    row = np.log([[0.4, 0.3, 0.2, 0.1]])
    grid = (np.arange(400) + 0.5) / 400

    def kept(**limits: Any) -> set[int]:
        tokens, _ = draw(np.repeat(row, 400, axis=0), controls(400, **limits), grid)
        return set(tokens.tolist())

    assert kept(min_p=0.49) == {0, 1, 2}
    assert kept(min_p=0.51) == {0, 1}
    assert kept(min_p=0.49, top_p=0.72) == {0, 1, 2}
    assert kept(min_p=0.49, top_p=0.69) == {0, 1}
    # Squared, .2 is a quarter of .4; to the power 1/2 it is .71 of it.
    assert kept(min_p=0.49, temperature=0.5) == {0, 1}
    assert kept(min_p=0.49, temperature=2.0) == {0, 1, 2, 3}
    assert kept(min_p=1.0) == {0}


def test_many_draws_of_a_row_are_draws_of_its_numbers():
    logits = (RANDOM.normal(size=(5, 300)) * 2).astype(np.float32)
    uniforms = RANDOM.random((5, 7))
    for temperature in (0.0, 0.6, 1.0, 3.0):
        many = draw_many(logits, temperature, uniforms)
        assert many.shape == (5, 7)
        for column in range(7):
            tokens, _ = draw(logits, controls(5, temperature=temperature), uniforms[:, column])
            assert many[:, column].tolist() == tokens.tolist()
    assert draw_many(logits[:0], 1.0, uniforms[:0]).shape == (0, 7)


# Likeliest tokens


@given(logits=logit_rows(), k=st.integers(1, 15))
def test_topk_lists_the_likeliest_best_first(logits, k):
    best = topk(logits, k)
    assert best.token_ids.shape == best.logprobs.shape == (len(logits), k)
    assert (best.token_ids.dtype, best.logprobs.dtype) == (np.int32, np.float32)
    vocab_size = logits.shape[1]
    norms = log_norms(logits)
    for row, ids, logprobs, norm in zip(logits, best.token_ids, best.logprobs, norms, strict=True):
        order = sorted(range(vocab_size), key=lambda i: (-row[i], i))[:k]
        assert ids[:vocab_size].tolist() == order
        np.testing.assert_allclose(logprobs[:vocab_size], row[order] - norm, rtol=1e-6, atol=1e-6)
        assert np.all(logprobs[vocab_size:] == ABSENT_LOGPROB)
        assert np.all(ids[vocab_size:] == 0)
        assert np.exp(row.astype(np.float64) - norm).sum() == pytest.approx(1, abs=1e-6)


# Streams


@given(seed=st.integers(-(2**63), 2**64), positions=st.lists(st.integers(0, 2000), max_size=6))
def test_a_streams_number_depends_on_seed_and_position_alone(seed, positions):
    stream = TokenStream(seed)
    for position in positions:
        number = stream.uniform(position)
        assert 0 <= number < 1
        assert number == TokenStream(seed).uniform(position)


def test_streams_are_uniform_and_unlike_each_other():
    """300 seeds by 300 positions: mean 1/2 and spread 1/sqrt(12) in 5 standard errors each way."""
    numbers = np.array([[TokenStream(s).uniform(t) for t in range(0, 600, 2)] for s in range(300)])
    assert len(np.unique(numbers)) == numbers.size
    for axis in (0, 1):
        means = numbers.mean(axis=axis)
        assert np.abs(means - 0.5).max() < 5 * np.sqrt(1 / 12 / 300)
    for a, b in ((numbers[:-1], numbers[1:]), (numbers[:, :-1], numbers[:, 1:])):
        correlation = np.corrcoef(a.ravel(), b.ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(a.size)


@given(
    seed=st.integers(-(2**63), 2**64),
    start=st.integers(1, 3000),
    length=st.integers(0, 40),
    cut=st.integers(0, 40),
    num=st.integers(1, 100),
)
def test_numbers_of_alternatives_depend_on_seed_position_and_place_alone(
    seed, start, length, cut, num
):
    whole = alternative_uniforms(seed, start, start + length, 100)
    middle = start + min(cut, length)
    parts = [
        alternative_uniforms(seed, start, middle, num),
        alternative_uniforms(seed, middle, start + length, num),
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole[:, :num])


def test_alternatives_have_a_stream_of_their_own():
    """Unlike each other, and unlike the numbers that draw samples."""
    drawn = alternative_uniforms(5, 1, 200, 100)
    other = alternative_uniforms(6, 1, 200, 100)
    stream = TokenStream(5)
    sampled = np.array([stream.uniform(i) for i in range(20_000)])
    everything = np.concatenate([drawn.ravel(), other.ravel(), sampled])
    assert len(np.unique(everything)) == everything.size
    for part in (drawn, other):
        assert abs(part.mean() - 0.5) < 5 * np.sqrt(1 / 12 / part.size)
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 5 / np.sqrt(drawn.size)
