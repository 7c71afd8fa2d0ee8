"""Prompts are scored in pieces that do not show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from backend.generator.base import SampleCall
from backend.generator.prompt_scores import NumpyRows, PromptScores
from backend.generator.scoring import score_part
from tests.generator.calls import call

VOCAB_SIZE, NUM_TOKENS = 30, 10
GENERATOR = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(NUM_TOKENS, 4, generator=GENERATOR)
HEAD = torch.randn(VOCAB_SIZE, 4, generator=GENERATOR)
TOKENS = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=GENERATOR)
# log p of everything at positions 1 to 9.
EXPECTED = (HIDDEN @ HEAD.T).double().log_softmax(dim=1)[:-1].numpy()
TARGETS = np.random.default_rng(0).integers(-1, VOCAB_SIZE, (NUM_TOKENS - 1, 3))


def asked(**options: Any) -> SampleCall:
    return call(TOKENS.numpy(), max_tokens=0, **options)


def scored(
    asked: SampleCall, *, chunk_rows: int = 1000, parts: tuple[int, ...] = (NUM_TOKENS,)
) -> tuple[PromptScores, int]:
    """What is found when the prompt is read in parts of these lengths, and how many rows of logits it took."""
    num_rows = 0

    def head(rows: torch.Tensor) -> torch.Tensor:
        nonlocal num_rows
        assert len(rows) <= chunk_rows
        num_rows += len(rows)
        return rows @ HEAD.T

    scores = PromptScores(asked)
    first = 0
    for hidden in HIDDEN[: sum(parts)].split(parts):
        score_part(scores, hidden, head, first_token=first, chunk_rows=chunk_rows)
        first += len(hidden)
    assert scores.is_complete
    return scores, num_rows


EVERYTHING = {
    "prompt_logprobs": True,
    "topk_prompt_logprobs": 4,
    "target_prompt_tokens": TARGETS,
    "prompt_alt_tokens": 5,
    "temperature": 0.7,
}


@pytest.mark.parametrize("parts", [(10,), (1,) * 10, (3, 3, 4), (9, 1), (1, 9)])
@pytest.mark.parametrize("chunk_rows", [1, 2, 9, 1000])
def test_scores_do_not_depend_on_the_size_of_the_pieces(chunk_rows, parts):
    scores, num_rows = scored(asked(**EVERYTHING), chunk_rows=chunk_rows, parts=parts)
    assert num_rows == 9
    assert scores.logprobs is not None
    assert scores.topk is not None
    assert scores.alt is not None
    assert np.isnan(scores.logprobs[0])
    at_tokens = np.take_along_axis(EXPECTED, TOKENS[1:, None].numpy(), axis=1)[:, 0]
    np.testing.assert_allclose(scores.logprobs[1:], at_tokens, rtol=0, atol=1e-6)
    best = -np.sort(-EXPECTED, axis=1)[:, :4]
    np.testing.assert_allclose(scores.topk.logprobs[1:], best, rtol=0, atol=1e-6)
    assert (scores.topk.logprobs[0] == -99999).all()
    named = np.take_along_axis(EXPECTED, np.maximum(TARGETS, 0), axis=1)
    wanted = np.where(TARGETS < 0, 0, named)
    assert scores.target is not None
    np.testing.assert_allclose(scores.target, wanted, rtol=0, atol=1e-6)
    assert (scores.target[TARGETS < 0] == 0).all()
    whole, _ = scored(asked(**EVERYTHING))
    assert whole.alt is not None
    assert scores.alt.tokens.tolist() == whole.alt.tokens.tolist()
    drawn = np.take_along_axis(EXPECTED, scores.alt.tokens, axis=1)
    np.testing.assert_allclose(scores.alt.logprobs, drawn, rtol=0, atol=1e-6)


def test_both_kinds_of_rows_say_the_same():
    scores, _ = scored(asked(**EVERYTHING))
    plain = PromptScores(asked(**EVERYTHING))
    plain.add(NumpyRows((HIDDEN @ HEAD.T)[:-1].numpy()), NUM_TOKENS)
    assert scores.alt is not None
    assert plain.alt is not None
    assert scores.alt.tokens.tolist() == plain.alt.tokens.tolist()
    for got, wanted in (
        (scores.logprobs, plain.logprobs),
        (scores.target, plain.target),
        (scores.alt.logprobs, plain.alt.logprobs),
    ):
        assert got is not None
        assert wanted is not None
        assert got.dtype == wanted.dtype == np.float32
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_scored", [1, 3, 9])
@pytest.mark.parametrize("parts", [(10,), (4, 6), (8, 2)])
def test_only_the_last_tokens_are_scored_and_computed(num_scored, parts):
    every, _ = scored(asked(prompt_logprobs=True, topk_prompt_logprobs=2))
    some, num_rows = scored(
        asked(prompt_logprobs=True, topk_prompt_logprobs=2, num_scored=num_scored), parts=parts
    )
    assert num_rows == num_scored
    assert some.logprobs is not None
    assert every.logprobs is not None
    assert some.topk is not None
    assert every.topk is not None
    first = NUM_TOKENS - num_scored
    assert np.isnan(some.logprobs[:first]).all()
    np.testing.assert_allclose(some.logprobs[first:], every.logprobs[first:], rtol=0, atol=1e-6)
    assert (some.topk.token_ids[:first] == 0).all()
    assert (some.topk.logprobs[:first] == -99999).all()
    assert some.topk.token_ids[first:].tolist() == every.topk.token_ids[first:].tolist()
    assert some.are_finite


def test_rows_before_the_first_that_names_a_token_are_not_computed():
    targets = np.full((NUM_TOKENS - 1, 2), -1)
    targets[6, 1] = 5
    scores, num_rows = scored(asked(target_prompt_tokens=targets))
    assert num_rows == 3
    assert scores.target is not None
    assert scores.target[6, 1] == pytest.approx(EXPECTED[6, 5], abs=1e-6)
    assert np.count_nonzero(scores.target) == 1


def test_the_last_tokens_do_not_narrow_targets_and_alternatives():
    some, _ = scored(asked(**EVERYTHING, num_scored=2))
    every, _ = scored(asked(**EVERYTHING))
    np.testing.assert_array_equal(some.target, every.target)
    assert some.alt is not None
    assert every.alt is not None
    np.testing.assert_array_equal(some.alt.tokens, every.alt.tokens)
    assert some.topk is not None
    assert every.topk is not None
    np.testing.assert_array_equal(some.topk.token_ids[-2:], every.topk.token_ids[-2:])
    np.testing.assert_array_equal(some.topk.logprobs[-2:], every.topk.logprobs[-2:])
    assert some.logprobs is not None
    assert every.logprobs is not None
    np.testing.assert_array_equal(some.logprobs[-2:], every.logprobs[-2:])


def test_tokens_before_the_first_scored_may_come_from_a_cache():
    scores = PromptScores(asked(prompt_logprobs=True, num_scored=3))
    assert scores.next == 7
    score_part(scores, HIDDEN[6:], lambda rows: rows @ HEAD.T, first_token=6, chunk_rows=9)
    assert scores.is_complete
    hasty = PromptScores(asked(prompt_logprobs=True, num_scored=3))
    with pytest.raises(AssertionError, match="left out"):
        score_part(hasty, HIDDEN[7:], lambda rows: rows @ HEAD.T, first_token=7, chunk_rows=9)


def test_what_follows_the_prompt_and_what_is_known_is_not_scored_again():
    scores, _ = scored(asked(prompt_logprobs=True))
    longer = torch.cat([HIDDEN, HIDDEN])
    score_part(scores, longer, lambda rows: pytest.fail("again"), first_token=0, chunk_rows=9)
    fresh = PromptScores(asked(prompt_logprobs=True))
    score_part(fresh, longer, lambda rows: rows @ HEAD.T, first_token=0, chunk_rows=9)
    np.testing.assert_array_equal(fresh.logprobs, scores.logprobs)


def test_a_prompt_of_one_token_has_nothing_to_score():
    scores = PromptScores(call([3], max_tokens=0, prompt_logprobs=True, prompt_alt_tokens=2))
    assert scores.is_complete
    np.testing.assert_equal(scores.logprobs, [np.nan])
    assert scores.alt is not None
    assert scores.alt.tokens.shape == (0, 2)
    assert scores.are_finite


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_logprobs": True},
        {"topk_prompt_logprobs": 2},
        {"target_prompt_tokens": np.zeros((NUM_TOKENS - 1, 1), np.int64)},
        {"prompt_alt_tokens": 1},
    ],
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_told_by_everything_that_is_asked(options, bad):
    def head(rows: torch.Tensor) -> torch.Tensor:
        logits = rows @ HEAD.T
        logits[3, 4] = bad
        return logits

    scores = PromptScores(asked(**options))
    score_part(scores, HIDDEN, head, first_token=0, chunk_rows=1000)
    assert not scores.are_finite
