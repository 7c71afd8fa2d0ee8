"""Weights that overflow fail their own calls, and leave nothing behind for the calls that come after."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backend.generator.embedded import EmbeddedGenerator
from tests.generator.calls import call, random_prompt
from tests.generator.oracle import publish, random_adapter
from together_post_training.errors import PostTrainingError, Reason


@pytest.fixture
def overflowing(base_of, generator) -> str:
    adapter = random_adapter(base_of("qwen3"), seed=1, rank=2)
    huge = {name: np.full_like(values, 1e38) for name, values in adapter.tensors.items()}
    return publish(generator, replace(adapter, tensors=huge))


@pytest.mark.parametrize("options", [{"max_tokens": 5}, {"max_tokens": 0, "prompt_logprobs": True}])
def test_weights_that_overflow_are_refused_by_name(
    overflowing, generator: EmbeddedGenerator, wait, options
):
    with pytest.raises(PostTrainingError) as caught:
        wait(generator.sample(call([1, 2, 3], snapshot=overflowing, **options)))
    assert caught.value.reason is Reason.NON_FINITE_LOGITS


def test_rows_of_the_cache_are_clean_after_weights_that_overflowed(
    overflowing, generator: EmbeddedGenerator, wait, sample_all
):
    """Prompts of different lengths, so that attention masks what the shorter ones do not hold."""
    calls = [call(random_prompt(n, seed=n), max_tokens=8) for n in (3, 9, 20)]
    before = sample_all(generator, *calls)
    for seed in range(6):
        with pytest.raises(PostTrainingError):
            wait(
                generator.sample(
                    call(random_prompt(30), snapshot=overflowing, max_tokens=20, seed=seed)
                )
            )
    for clean, again in zip(before, sample_all(generator, *calls), strict=True):
        np.testing.assert_array_equal(again.sequences[0].tokens, clean.sequences[0].tokens)
        np.testing.assert_allclose(
            again.sequences[0].logprobs, clean.sequences[0].logprobs, atol=1e-4
        )
