"""Sampling from base models that are kept in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from backend.generator.embedded import EmbeddedGenerator
from backend.generator.kv_cache import bytes_per_token
from backend.trainer import base_model
from backend.trainer.base import Adapter, Pass
from backend.trainer.base_model import BaseModel
from backend.trainer.torch_trainer import TorchTrainer
from tests import models
from tests.generator.calls import call, random_prompt
from tests.generator.oracle import publish, random_adapter, score
from together_post_training.samples import Sample

# The head of a random model times this: logits of about 20.
SHARPER = 2.0
PROMPT = random_prompt(5)
FAMILIES = ["llama", "llama-tied", "qwen3", "mistral", "gemma3_text", "qwen3_moe"]


@pytest.fixture(scope="module")
def sharp(tmp_path_factory) -> Callable[[str], Path]:
    """A random model with logits of about 20, saved in bfloat16."""

    @cache
    def make(name: str) -> Path:
        directory = tmp_path_factory.mktemp(name) / "model"
        model_type, _, tied = name.partition("-")
        models.rand(directory, model_type, tied=bool(tied))
        module = AutoModelForCausalLM.from_pretrained(directory)
        if not tied:
            with torch.no_grad():
                module.get_parameter("lm_head.weight").mul_(SHARPER)
        module.bfloat16().save_pretrained(directory)
        return directory

    return make


@pytest.fixture
def generators(wait) -> Iterator[Callable[[BaseModel], EmbeddedGenerator]]:
    made: list[EmbeddedGenerator] = []

    def make(base: BaseModel) -> EmbeddedGenerator:
        made.append(EmbeddedGenerator(base))
        return made[-1]

    yield make
    for generator in made:
        wait(generator.close())


def load(directory: Path, **options) -> BaseModel:
    return base_model.load("half", str(directory), dtype="bfloat16", **options)


def forward(base: BaseModel, adapter: Adapter, tokens: np.ndarray) -> np.ndarray:
    """The trainer's logprobs of all tokens but the first."""
    trainer = TorchTrainer(base)
    trainer.create_session("s", adapter.lora)
    trainer.load("s", adapter, None)
    sample = Sample(tokens=tokens[:-1], inputs={"target_tokens": tokens[1:]})
    return trainer.run(Pass(session="s", samples=[sample])).logprobs[0]


def gaps(base: BaseModel, generator: EmbeddedGenerator, sample_all) -> np.ndarray:
    """Sampled minus forward's logprobs of 4 times 50 tokens, under an adapter."""
    adapter = random_adapter(base, seed=3)
    asked = call(PROMPT, max_tokens=50, num_samples=4, snapshot=publish(generator, adapter))
    (result,) = sample_all(generator, asked)
    found = []
    for sequence in result.sequences:
        whole = np.array([*PROMPT, *sequence.tokens])
        found.append(sequence.logprobs - forward(base, adapter, whole)[len(PROMPT) - 1 :])
    return np.concatenate(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_logprobs_are_forwards_on_a_cpu(sharp, generators, sample_all, name):
    """200 tokens. Computed in float32, trainer and generator agree as they do over float32 weights, far closer than the
    mean of 0.005 and the 0.05 at most that bfloat16 weights are allowed."""
    base = load(sharp(name))
    assert np.abs(gaps(base, generators(base), sample_all)).max() < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_logprobs_are_near_forwards_where_all_is_bfloat16(
    sharp, generators, sample_all, name
):
    """As on a GPU. One token at a time or all at once, sums differ, and hidden states are rounded to 8 bits. Measured
    on these models, which amplify every rounding: a mean of 0.006 to 0.016, 0.5 at most, not to one side."""
    base = load(sharp(name), compute="bfloat16")
    found = gaps(base, generators(base), sample_all)
    assert np.abs(found).mean() < 0.05
    assert abs(found.mean()) < 0.02


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_prompt_logprobs_are_those_of_float32_on_the_same_weights(
    sharp, generators, sample_all, name
):
    generator = generators(load(sharp(name)))
    asked = call(random_prompt(40), max_tokens=0, prompt_logprobs=True)
    (result,) = sample_all(generator, asked)
    plain = AutoModelForCausalLM.from_pretrained(sharp(name), dtype=torch.bfloat16).double()
    np.testing.assert_allclose(
        result.prompt_logprobs, score(plain, asked.prompt), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("compute", ["auto", "bfloat16"])
def test_logprobs_of_the_vocabulary_are_never_positive(sharp, generators, sample_all, compute):
    """And add up to 1 to float32's precision, whatever hidden states are computed in. LG-07."""
    generator = generators(load(sharp("llama"), compute=compute))
    asked = call(random_prompt(20), max_tokens=4, topk_prompt_logprobs=128)
    (result,) = sample_all(generator, asked)
    assert result.topk_prompt is not None
    logprobs = result.topk_prompt.logprobs[1:].astype(np.float64)
    assert logprobs.max() <= 1e-6
    np.testing.assert_allclose(np.exp(logprobs).sum(1), 1, rtol=0, atol=1e-5)


def test_keys_and_values_take_half_the_room_where_all_is_bfloat16(sharp):
    bases = [load(sharp("llama"), compute=compute) for compute in ("auto", "bfloat16")]
    wide, half = (bytes_per_token(base.module.config, base.dtype) for base in bases)
    assert wide == 2 * half
