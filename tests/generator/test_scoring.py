"""Prompts are scored in pieces that do not show."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backend.generator.scoring import score_prompt

GENERATOR = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(10, 4, generator=GENERATOR)
HEAD = torch.randn(30, 4, generator=GENERATOR)
TOKENS = torch.randint(30, (10,), generator=GENERATOR)


@pytest.mark.parametrize("chunk_rows", [1, 2, 9, 10, 1000])
def test_scores_do_not_depend_on_the_size_of_the_pieces(chunk_rows):
    sizes = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows @ HEAD.T

    logprobs, topk = score_prompt(HIDDEN, TOKENS, head, chunk_rows=chunk_rows, k=4)
    expected = (HIDDEN @ HEAD.T).double().log_softmax(dim=1)[:-1]
    at_tokens = expected.gather(1, TOKENS[1:, None])[:, 0]
    assert np.isnan(logprobs[0])
    np.testing.assert_allclose(logprobs[1:], at_tokens, rtol=0, atol=1e-6)
    assert topk is not None
    np.testing.assert_allclose(topk.logprobs[1:], expected.topk(4).values, rtol=0, atol=1e-6)
    assert (topk.logprobs[0] == -99999).all()
    assert max(sizes) <= chunk_rows
    assert sum(sizes) == 9


def test_a_prompt_of_one_token_has_nothing_to_score():
    logprobs, topk = score_prompt(HIDDEN[:1], TOKENS[:1], lambda _: HIDDEN, chunk_rows=5, k=0)
    np.testing.assert_equal(logprobs, [np.nan])
    assert topk is None
