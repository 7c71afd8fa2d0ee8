"""SA-15: an output layer with more rows than the tokenizer has tokens, as padded vocabularies give.

The rule: a model's ids are the rows of its output layer. Trainer and sampler normalise over all of them, all can be
sampled and trained, and those that the tokenizer does not know have no text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from backend.generator.embedded import EmbeddedGenerator
from backend.trainer import base_model
from backend.trainer.base import LoraConfig
from backend.trainer.base_model import BaseModel
from backend.trainer.torch_trainer import TorchTrainer
from tests import models
from tests.conformance.data import forward, sample
from tests.generator.calls import call, random_prompt
from tests.generator.oracle import TOLERANCE

NUM_IDS, NUM_WORDS = 160, 128
EVERY_ID = list(range(NUM_IDS))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    directory: Path = tmp_path_factory.mktemp("padded") / "model"
    models.rand(directory, vocab_size=NUM_IDS)
    words = {f"w{i}": i for i in range(NUM_WORDS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return base_model.load("padded", str(directory))


@pytest.fixture(scope="module")
def padded(base: BaseModel, wait) -> Iterator[EmbeddedGenerator]:
    made = EmbeddedGenerator(base)
    yield made
    wait(made.close())


def test_ids_without_text_are_sampled_like_others_and_stop_strings_pass_over_them(
    padded: EmbeddedGenerator, sample_all
):
    """2,000 tokens at temperature 5, each of which is looked at as text."""
    asked = call([1], max_tokens=50, num_samples=40, temperature=5.0, stop_strings=["w999"])
    sequences = sample_all(padded, asked)[0].sequences
    tokens = np.concatenate([sequence.tokens for sequence in sequences])
    assert tokens.size == 2000
    assert tokens.max() < NUM_IDS
    # A fifth of the ids, nearly equally likely.
    assert 0.1 < np.mean(tokens >= NUM_WORDS) < 0.3
    assert {sequence.stop_reason for sequence in sequences} == {"length"}


def test_a_stop_string_is_found_behind_ids_without_text(padded: EmbeddedGenerator, sample_all):
    asked = call([1], max_tokens=60, temperature=5.0, seed=2)
    tokens = sample_all(padded, asked)[0].sequences[0].tokens.tolist()
    first_unknown = next(i for i, token in enumerate(tokens) if token >= NUM_WORDS)
    stop = next(token for token in tokens[first_unknown:] if token < NUM_WORDS)
    stopped = call([1], max_tokens=60, temperature=5.0, seed=2, stop_strings=[f"w{stop}"])
    (sequence,) = sample_all(padded, stopped)[0].sequences
    assert sequence.stop_reason == "stop"
    assert sequence.tokens.tolist() == tokens[: len(sequence.tokens)]


def test_trainer_and_sampler_normalise_over_the_same_ids(
    base: BaseModel, padded: EmbeddedGenerator, sample_all
):
    """Each distribution adds up to 1 over all rows, and to less without the padding; target 140 is one like others."""
    trainer = TorchTrainer(base)
    trainer.create_session("session", LoraConfig(rank=4, alpha=8.0, seed=1))
    prompt = [*random_prompt(6), 140, 3]
    every = sample(prompt[:-1], [EVERY_ID] * (len(prompt) - 1))
    (of_trainer,) = forward(trainer, "session", [every])
    targets = np.array([EVERY_ID] * (len(prompt) - 1))
    (scored,) = sample_all(
        padded,
        call(prompt, max_tokens=0, prompt_logprobs=True, target_prompt_tokens=targets),
    )
    np.testing.assert_allclose(scored.target_prompt_logprobs, of_trainer, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(np.exp(of_trainer.astype(float)).sum(axis=1), 1, atol=1e-5)
    assert np.exp(of_trainer[:, :NUM_WORDS].astype(float)).sum(axis=1).max() < 0.999
    (targeted,) = forward(trainer, "session", [sample(prompt[:6], [*prompt[1:6], 140])])
    assert np.isfinite(targeted).all()
    np.testing.assert_allclose(scored.prompt_logprobs[1:7], targeted, rtol=0, atol=TOLERANCE)
