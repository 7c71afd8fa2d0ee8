"""Drawing on torch tensors gives what the reference gives."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.generator import sampling, torch_sampling, truncation
from backend.generator.sampling import Controls

# Sizes around one and several blocks, and one that is no multiple.
VOCAB_SIZES = [1, 2, 255, 256, 257, 1000, 4096]


def random_logits(
    num_rows: int, vocab_size: int, *, seed: int = 0, spread: float = 3.0
) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(scale=spread, size=(num_rows, vocab_size)).astype(np.float32)


def controls(
    num_rows: int,
    *,
    temperature: npt.ArrayLike = 1.0,
    top_k: npt.ArrayLike = 0,
    top_p: npt.ArrayLike = 1.0,
    min_p: npt.ArrayLike = 0.0,
) -> Controls:
    return Controls(
        temperature=np.broadcast_to(np.asarray(temperature, np.float64), num_rows).copy(),
        top_k=np.broadcast_to(np.asarray(top_k, np.int64), num_rows).copy(),
        top_p=np.broadcast_to(np.asarray(top_p, np.float64), num_rows).copy(),
        min_p=np.broadcast_to(np.asarray(min_p, np.float64), num_rows).copy(),
    )


def assert_same_draw(logits: np.ndarray, limits: Controls, uniforms: np.ndarray) -> None:
    """Logprobs within the rounding of float32 sums."""
    tokens, logprobs = torch_sampling.draw(torch.from_numpy(logits), limits, uniforms)
    expected_tokens, expected_logprobs = sampling.draw(logits, limits, uniforms)
    assert tokens.tolist() == expected_tokens.tolist()
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": 300, "min_p": 0.01},
        {"temperature": 1.3, "top_k": 50, "top_p": 0.95},
        {"temperature": 2.0, "top_k": 500, "top_p": 0.99, "min_p": 1e-3},
        {"temperature": 4.0, "top_p": 0.9},
        {"temperature": 1e4, "top_p": 0.5},
    ],
)
def test_tokens_are_the_references(vocab_size, limits):
    """1,000 draws each. A number within 1e-7 of a boundary could fall on either side of it: none here does."""
    logits = random_logits(1000, vocab_size, seed=vocab_size)
    uniforms = np.random.default_rng(vocab_size).random(1000)
    assert_same_draw(logits, controls(1000, **limits), uniforms)


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 5e-324, 1e-38, 1e-6, 0.5, 1.0, 2.0, 1e9]),
            st.sampled_from([-1, 0, 1, 3, 300, 10_000]),
            st.sampled_from([1e-6, 0.3, 0.95, 1.0]),
            st.sampled_from([0.0, 1e-3, 0.2, 1.0]),
        ),
        min_size=1,
        max_size=12,
    ),
    seed=st.integers(0, 2**31),
)
def test_rows_are_drawn_each_by_its_own_controls(rows, seed):
    temperature, top_k, top_p, min_p = (np.array(x) for x in zip(*rows, strict=True))
    logits = random_logits(len(rows), 300, seed=seed)
    uniforms = np.random.default_rng(seed).random(len(rows))
    limits = controls(len(rows), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert_same_draw(logits, limits, uniforms)


# Few distinct values, so that the edge of what is kept falls among equals; impossible tokens; and rows where a token is
# far likelier than all others.
VALUES = [0.0, 1.0, 2.5, -1.5, -40.0, 30.0, -3e38, 1000.0, -np.inf]


@given(
    width=st.sampled_from([1, 2, 3, 17, 129, 130, 131, 600]),
    values=st.lists(st.sampled_from(VALUES), min_size=1, max_size=5),
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([5e-324, 1e-6, 0.5, 1.0, 7.0, 1e9]),
    top_k=st.sampled_from([0, 1, 2, 5, 128, 129, 130, 400]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.6, 0.5, 0.25, 0.01]),
    min_p=st.sampled_from([0.0, 1e-9, 0.01, 0.1, 0.3, 1.0]),
    uniform=st.floats(0, 1, exclude_max=True),
    broken=st.sampled_from([None, None, np.nan, np.inf]),
    num_likeliest=st.sampled_from([1, 4, 128]),
)
def test_ties_extremes_and_broken_rows_are_drawn_like_the_references(
    width, values, seed, temperature, top_k, top_p, min_p, uniform, broken, num_likeliest
):
    """All but greedy rows and those that keep all: bit for bit the same masses, so a number that falls on a boundary
    falls on the same side. However few of the likeliest tokens are looked at first."""
    logits = np.random.default_rng(seed).choice(np.array(values, np.float32), (4, width))
    if broken is not None:
        logits[0, 0] = broken
    limits = controls(
        4, temperature=temperature, top_k=top_k, top_p=top_p, min_p=max(min_p, 1e-300)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncation, "_NUM_LIKELIEST", num_likeliest)
        assert_same_draw(logits, limits, np.full(4, uniform))


def test_a_nucleus_of_what_top_k_leaves_is_not_taken_for_one_of_everything():
    """One token of mass 1, 599 of e^-1.5: a hundredth of 400 of them is .90, of all of them 1.34."""
    logits = np.full((50, 600), -1.5, np.float32)
    logits[:, 300] = 0
    uniforms = (np.arange(50) + 0.5) / 50
    limits = controls(50, top_k=400, top_p=0.01)
    assert_same_draw(logits, limits, uniforms)
    tokens, _ = torch_sampling.draw(torch.from_numpy(logits), limits, uniforms)
    assert set(tokens.tolist()) == {300}


@pytest.mark.parametrize("error", [-0.9e-6, 0.0, 0.9e-6])
def test_a_total_that_is_rough_decides_no_close_call(error):
    """top_p so that the nucleus ends within a millionth of its second token, on either side of it."""
    logits = random_logits(40, 500, seed=5)
    shifted = torch.from_numpy(logits - logits.max(axis=1, keepdims=True))
    masses = np.exp(shifted.double().numpy())
    totals = masses.sum(axis=1)
    two = -np.sort(-masses, axis=1)[:, :2].sum(axis=1) / totals
    sides = np.tile([1 - 4e-7, 1 + 4e-7], 20)
    clear = np.tile([0.99, 1.01], 20)
    uniforms = np.random.default_rng(0).random(40)
    rough = totals * (1 + error)
    close = controls(40, top_p=two * sides)
    tokens, is_drawn = truncation.draw_among_likeliest(shifted, rough, close, uniforms)
    would_err = (sides - 1) * (sides * (1 + error) - 1) < 0
    assert not is_drawn[would_err].any()
    assert error == 0 or would_err.any()
    expected, _ = sampling.draw(logits, close, uniforms)
    assert tokens[is_drawn].tolist() == expected[is_drawn].tolist()
    limits = controls(40, top_p=two * clear)
    tokens, is_drawn = truncation.draw_among_likeliest(shifted, rough, limits, uniforms)
    assert is_drawn.all()
    assert tokens.tolist() == sampling.draw(logits, limits, uniforms)[0].tolist()
    assert_same_draw(logits, close, uniforms)


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.3, 1.0, 3.0])
@pytest.mark.parametrize(
    "limits",
    [
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"top_p": 1e-5},
        {"top_p": 0.6, "temperature": 0.7},
        {"top_p": 0.95, "temperature": 20.0},
        {"top_k": 3000, "top_p": 0.9},
        {"top_k": 15_000},
        {"min_p": 0.3, "top_p": 0.8},
    ],
)
def test_nuclei_of_flat_distributions_over_large_vocabularies_are_the_references(spread, limits):
    """20,000 tokens, from all equally likely to a nucleus of a few dozen."""
    logits = random_logits(6, 20_000, seed=3, spread=spread)
    logits[4] = np.round(logits[4], 1)  # many equal tokens in one bucket, the edge among them
    logits[5, ::3] = -np.inf
    assert_same_draw(logits, controls(6, **limits), np.random.default_rng(1).random(6))


def test_a_broken_row_does_not_touch_how_others_are_truncated():
    logits = random_logits(4, 5000, spread=0.5)
    logits[2, 17] = np.nan
    limits = controls(4, top_p=[0.5, 0.9, 0.9, 1.0], top_k=[0, 0, 0, 20])
    assert_same_draw(logits, limits, np.random.default_rng(2).random(4))


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 0.6, 1.0, 5.0])
@pytest.mark.parametrize("num", [1, 16, 17, 100])
def test_many_draws_of_a_row_are_the_references(temperature, num):
    logits = random_logits(7, 1000)
    logits[3, 5] = np.nan
    logits[4, 1:] = -np.inf
    uniforms = np.random.default_rng(num).random((7, num))
    many = torch_sampling.draw_many(torch.from_numpy(logits), temperature, uniforms)
    assert many.dtype == np.int64
    assert many.tolist() == sampling.draw_many(logits, temperature, uniforms).tolist()


@pytest.mark.parametrize(
    "limits", [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 70}, {"min_p": 0.01}]
)
def test_the_ends_of_the_interval_draw_tokens_that_can_occur(limits):
    """The first and the last ids cannot occur, nor can two whole blocks in the middle."""
    logits = random_logits(20, 2000)
    logits[:, [0, 1, -2, -1]] = -np.inf
    logits[:, 500:1100] = -np.inf
    limits = controls(20, **limits)
    for uniform in (0.0, np.nextafter(1.0, 0.0)):
        assert_same_draw(logits, limits, np.full(20, uniform))


def test_rare_tokens_keep_their_share():
    """65,536 equally likely tokens: a cumulative sum in float32 would merge many of them."""
    vocab_size = 2**16
    logits = np.zeros((64, vocab_size), np.float32)
    uniforms = np.random.default_rng(0).random(64)
    tokens, logprobs = torch_sampling.draw(torch.from_numpy(logits), controls(64), uniforms)
    assert tokens.tolist() == np.floor(uniforms * vocab_size).astype(int).tolist()
    np.testing.assert_allclose(logprobs, -np.log(vocab_size), atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_row_is_told_by_nan_and_spares_its_neighbours(bad):
    logits = random_logits(3, 50)
    logits[1, 7] = bad
    tokens, logprobs = torch_sampling.draw(
        torch.from_numpy(logits), controls(3), np.array([0.1, 0.5, 0.9])
    )
    expected, _ = sampling.draw(logits, controls(3), np.array([0.1, 0.5, 0.9]))
    assert tokens.tolist() == expected.tolist()
    assert np.isnan(logprobs).tolist() == [False, True, False]


def test_logits_are_left_alone():
    logits = torch.from_numpy(random_logits(4, 300))
    before = logits.clone()
    torch_sampling.draw(
        logits, controls(4, temperature=[0, 1, 2, 1], top_k=[0, 0, 0, 9]), np.zeros(4)
    )
    torch_sampling.topk(logits, 5)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("k", [1, 2, 7, 8, 9, 12])
@pytest.mark.parametrize("values", [[0.0], [0.0, 1.0], [0.0, 1.0, 2.0, 5.0], None])
def test_topk_is_the_references(k, values):
    """8 tokens; of few different logits, so that many are equal, or of all different ones."""
    logits = random_logits(30, 8)
    if values is not None:
        logits = np.random.default_rng(1).choice(np.array(values, np.float32), (30, 8))
    got, expected = torch_sampling.topk(torch.from_numpy(logits), k), sampling.topk(logits, k)
    assert got.token_ids.dtype == np.int32
    assert got.logprobs.dtype == np.float32
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(got.logprobs, expected.logprobs, rtol=1e-6, atol=1e-6)
