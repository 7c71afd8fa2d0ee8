"""The numbers of the embedded generator: those of plain transformers, whatever the architecture."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backend.generator import attention
from backend.generator.embedded import EmbeddedGenerator
from backend.generator.sampling import TokenStream
from backend.trainer import base_model, families
from tests import models
from tests.generator.calls import call, random_prompt
from tests.generator.oracle import (
    TOLERANCE,
    assert_logprobs_are_of,
    distributions,
    merged,
    publish,
    random_adapter,
    score,
)
from together_post_training.errors import PostTrainingError, Reason

# Some have windows of 8 tokens, far shorter than what is sampled here.
FAMILIES = [*sorted(families.FAMILIES), "llama-tied"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_adapted", [False, True])
def test_sampled_logprobs_are_those_of_transformers(
    base_of, generator_of, sample_all, name, is_adapted
):
    base, generator = base_of(name), generator_of(name)
    adapter = random_adapter(base, seed=3) if is_adapted else None
    snapshot = None if adapter is None else publish(generator, adapter)
    calls = [
        call(
            random_prompt(length, seed=length),
            max_tokens=64 - length,
            snapshot=snapshot,
            num_samples=2,
            seed=length,
        )
        for length in (1, 5, 20)
    ]
    module = merged(base, adapter)
    for asked, result in zip(calls, sample_all(generator, *calls), strict=True):
        for sequence in result.sequences:
            assert_logprobs_are_of(module, asked, sequence)
            assert sequence.logprobs.std() > 0.5, "too flat to show a fault"


def test_each_token_is_drawn_by_the_number_of_its_position(base_of, generator, sample_all):
    """Of the stream of seed + i: what is sampled for a seed stays the same from one release to the next."""
    asked = call(random_prompt(6), max_tokens=40, num_samples=3, seed=11)
    (result,) = sample_all(generator, asked)
    module = merged(base_of("qwen3"), None)
    for i, sequence in enumerate(result.sequences):
        numbers = TokenStream(11 + i)
        rows = distributions(module, [*asked.prompt.tolist(), *sequence.tokens.tolist()])[5:]
        for position, token in enumerate(sequence.tokens.tolist()):
            reached = np.exp(rows[position]).cumsum()
            low = reached[token - 1] if token else 0.0
            # The sums of float32 and float64 differ by less.
            assert low - 1e-4 <= numbers.uniform(position) < reached[token] + 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_is_that_of_transformers(base_of, generator_of, sample_all, name):
    base = base_of(name)
    prompts = [random_prompt(length, seed=length) for length in (3, 7, 12)]
    calls = [call(prompt, max_tokens=40, temperature=0.0) for prompt in prompts]
    for prompt, result in zip(prompts, sample_all(generator_of(name), *calls), strict=True):
        expected = base.module.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=40, pad_token_id=0
        )
        assert result.sequences[0].tokens.tolist() == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_logprobs_are_those_of_transformers(base_of, generator_of, sample_all, name):
    base, generator = base_of(name), generator_of(name)
    adapter = random_adapter(base, seed=4)
    snapshots = {None: None, publish(generator, adapter): adapter}
    for snapshot, weights in snapshots.items():
        prompts = [random_prompt(length, seed=length) for length in (1, 2, 64, 17)]
        calls = [
            call(p, max_tokens=0, snapshot=snapshot, prompt_logprobs=True, topk_prompt_logprobs=3)
            for p in prompts
        ]
        module = merged(base, weights)
        for prompt, result in zip(prompts, sample_all(generator, *calls), strict=True):
            assert result.sequences == []
            assert result.prompt_logprobs is not None
            assert result.prompt_logprobs.dtype == np.float32
            np.testing.assert_allclose(
                result.prompt_logprobs, score(module, prompt), rtol=0, atol=TOLERANCE
            )
            _assert_topk(result.topk_prompt, distributions(module, prompt)[:-1])


def _assert_topk(topk, rows: np.ndarray) -> None:
    """Row i + 1 lists the likeliest of rows[i]; row 0 is empty."""
    assert topk.token_ids.shape == topk.logprobs.shape == (len(rows) + 1, 3)
    assert (topk.token_ids[0] == 0).all()
    assert (topk.logprobs[0] == -99999).all()
    np.testing.assert_allclose(
        topk.logprobs[1:], -np.sort(-rows, axis=1)[:, :3], rtol=0, atol=TOLERANCE
    )
    picked = np.take_along_axis(rows, topk.token_ids[1:].astype(np.int64), axis=1)
    np.testing.assert_allclose(topk.logprobs[1:], picked, rtol=0, atol=TOLERANCE)


def test_logprobs_are_raw_whatever_the_controls(base_of, generator, sample_all):
    asked = call(
        random_prompt(6), max_tokens=30, num_samples=3, temperature=0.6, top_k=9, top_p=0.8
    )
    for sequence in sample_all(generator, asked)[0].sequences:
        assert_logprobs_are_of(merged(base_of("qwen3"), None), asked, sequence)


def test_the_whole_vocabulary_adds_up_to_one(generator, sample_all):
    """LG-07."""
    asked = call(random_prompt(9), max_tokens=4, topk_prompt_logprobs=128, topk_sample_logprobs=128)
    (result,) = sample_all(generator, asked)
    assert result.topk_prompt is not None
    topk = result.sequences[0].topk
    assert topk is not None
    for logprobs in (result.topk_prompt.logprobs[1:], topk.logprobs):
        assert logprobs.max() <= 1e-6
        np.testing.assert_allclose(np.exp(logprobs.astype(float)).sum(axis=1), 1, atol=1e-5)


def test_topk_of_sampled_tokens_holds_their_logprobs(generator, sample_all):
    (result,) = sample_all(
        generator, call(random_prompt(4), max_tokens=12, topk_sample_logprobs=128)
    )
    (sequence,) = result.sequences
    topk = sequence.topk
    assert topk is not None
    for token, logprob, ids, row in zip(
        sequence.tokens, sequence.logprobs, topk.token_ids, topk.logprobs, strict=True
    ):
        assert row[ids == token] == pytest.approx([logprob], abs=TOLERANCE)


def test_each_call_gets_as_many_likeliest_tokens_as_it_asks_for(generator, sample_all):
    calls = [call(random_prompt(4), max_tokens=5, topk_sample_logprobs=k) for k in (3, 0, 1, 8)]
    few, none, one, many = (r.sequences[0].topk for r in sample_all(generator, *calls))
    assert none is None
    for topk, k in ((few, 3), (one, 1), (many, 8)):
        assert topk.token_ids.shape == topk.logprobs.shape == (5, k)
        np.testing.assert_array_equal(topk.token_ids, many.token_ids[:, :k])


@pytest.mark.parametrize("length", [7, 8, 9])
def test_the_edge_of_a_window_is_where_transformers_has_it(
    base_of, generator_of, sample_all, length
):
    """Prompts one shorter than, as long as, and one longer than the window of 8."""
    asked = call(random_prompt(length, seed=1), max_tokens=6, prompt_logprobs=True)
    (result,) = sample_all(generator_of("mistral"), asked)
    module = merged(base_of("mistral"), None)
    assert_logprobs_are_of(module, asked, result.sequences[0])
    np.testing.assert_allclose(
        result.prompt_logprobs, score(module, asked.prompt), rtol=0, atol=TOLERANCE
    )


def test_learned_positions_do_not_depend_on_neighbours(tmp_path, wait, sample_all):
    """GPT-2, whose layers take no adapter here: its base model samples and scores like any other. LG-09."""
    base = base_model.load("gpt2", str(models.rand(tmp_path / "gpt2", "gpt2", n_inner=48)))
    generator = EmbeddedGenerator(base)
    calls = [
        call(
            random_prompt(length, seed=length), max_tokens=10, temperature=0.0, prompt_logprobs=True
        )
        for length in (3, 20)
    ]
    alone = [sample_all(generator, c)[0] for c in calls]
    together = sample_all(generator, *calls)
    for asked, one, other in zip(calls, alone, together, strict=True):
        assert one.sequences[0].tokens.tolist() == other.sequences[0].tokens.tolist()
        np.testing.assert_allclose(one.prompt_logprobs, other.prompt_logprobs, atol=1e-5)
        np.testing.assert_allclose(
            one.prompt_logprobs, score(merged(base, None), asked.prompt), atol=TOLERANCE
        )
        assert_logprobs_are_of(merged(base, None), asked, other.sequences[0])
    wait(generator.close())


def test_a_long_prompt_is_read_and_continued_right(tmp_path, wait, sample_all):
    """1,500 tokens through windows of 400: several blocks of masked attention, and a row that moves three times."""
    directory = models.rand(
        tmp_path / "long",
        "mistral",
        max_position_embeddings=2048,
        sliding_window=400,
        num_hidden_layers=1,
        initializer_range=0.3,
    )
    base = base_model.load("long", str(directory))
    generator = EmbeddedGenerator(base, max_prefill_tokens=256)
    asked = call(random_prompt(1500), max_tokens=100, prompt_logprobs=True)
    short = call(random_prompt(9), max_tokens=300)
    long_result, short_result = sample_all(generator, asked, short)
    np.testing.assert_allclose(
        long_result.prompt_logprobs, score(merged(base, None), asked.prompt), rtol=0, atol=TOLERANCE
    )
    assert_logprobs_are_of(merged(base, None), asked, long_result.sequences[0])
    assert_logprobs_are_of(merged(base, None), short, short_result.sequences[0])
    wait(generator.close())


def test_a_model_that_would_be_computed_differently_is_refused(base_of, monkeypatch):
    """As a model would be whose attention has a feature that this engine leaves out."""
    plain = attention._causal
    monkeypatch.setattr(attention, "_causal", lambda q, k, v, scale: 1.01 * plain(q, k, v, scale))
    with pytest.raises(PostTrainingError, match="cannot be sampled from yet") as error:
        EmbeddedGenerator(base_of("llama"))
    assert error.value.reason is Reason.UNIMPLEMENTED
