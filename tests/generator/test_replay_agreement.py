"""Routing replay from the sampler's engine to the trainer's: what moves where the router differs, and what does not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from backend.generator.base import SampleCall, SampledSequence, SampleResult
from backend.generator.embedded import EmbeddedGenerator
from backend.trainer import base_model
from backend.trainer.base import Adapter, LoraConfig, Pass
from backend.trainer.base_model import BaseModel
from backend.trainer.routers import routers_of
from backend.trainer.torch_trainer import TorchTrainer
from tests import models
from tests.conformance.data import sample
from tests.generator.calls import call, random_prompt
from tests.generator.oracle import TOLERANCE, merged, publish, random_adapter, score
from tests.trainer.routed import Forced
from together_post_training.samples import Sample

LORA = LoraConfig(rank=4, alpha=8, seed=0)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[[int], Path]:
    """The directory of a Qwen3-MoE whose tokens go through so many experts, of weights that add up to 1."""

    def make(per_token: int) -> Path:
        directory = tmp_path_factory.mktemp("moe") / "model"
        settings = {"num_experts_per_tok": per_token, "norm_topk_prob": True}
        return models.rand(directory, "qwen3_moe", **settings)

    return make


def perturbed(directory: Path, *, size: float) -> BaseModel:
    """With noise on every router's weights, relative to their size."""
    base = base_model.load("perturbed", str(directory))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for router in routers_of(base.module):
            weight = router.get_parameter("weight")
            weight += size * weight.std() * torch.randn(weight.shape, generator=generator)
    return base


def sampled(
    base: BaseModel, adapter: Adapter | None, sample_all, wait
) -> tuple[SampleCall, SampleResult]:
    generator = EmbeddedGenerator(base)
    one = call(
        random_prompt(9, seed=1),
        max_tokens=30,
        num_samples=4,
        return_routed_experts=True,
        snapshot=None if adapter is None else publish(generator, adapter),
    )
    (result,) = sample_all(generator, one)
    wait(generator.close())
    return one, result


def forward(
    base: BaseModel,
    adapter: Adapter | None,
    samples: Sequence[Sample],
    routed: Sequence[np.ndarray | None] | None,
) -> list[np.ndarray]:
    trainer = TorchTrainer(base)
    trainer.create_session("s", LORA if adapter is None else adapter.lora)
    if adapter is not None:
        trainer.load("s", adapter, None)
    return list(trainer.run(Pass(session="s", samples=samples, routed_experts=routed)).logprobs)


def as_sample(one: SampleCall, sequence: SampledSequence) -> Sample:
    whole = [*one.prompt.tolist(), *sequence.tokens.tolist()]
    return sample(whole[:-1], whole[1:])


def gaps(one: SampleCall, result: SampleResult, logprobs: Sequence[np.ndarray]) -> np.ndarray:
    """|trainer's - sampler's|, of all sampled tokens."""
    start = len(one.prompt) - 1
    return np.concatenate(
        [np.abs(lp[start:] - s.logprobs) for lp, s in zip(logprobs, result.sequences, strict=True)]
    )


def both_ways(
    trained: BaseModel, adapter: Adapter | None, one: SampleCall, result: SampleResult
) -> tuple[np.ndarray, np.ndarray]:
    """How far the trainer is off (with replay, without)."""
    samples = [as_sample(one, sequence) for sequence in result.sequences]
    routed = [sequence.routed_experts for sequence in result.sequences]
    with_replay, without = (
        gaps(one, result, forward(trained, adapter, samples, some)) for some in (routed, None)
    )
    return with_replay, without


def test_law_15_replayed_logprobs_are_the_samplers_though_the_router_is_another(
    made, sample_all, wait
):
    """One expert a token, of weight 1 whatever the router says: its choice is all that it has a say in."""
    directory = made(1)
    base = base_model.load("m", str(directory))
    adapter = random_adapter(base, seed=5)
    one, result = sampled(base, adapter, sample_all, wait)
    with_replay, without = both_ways(perturbed(directory, size=3.0), adapter, one, result)
    assert with_replay.max() < TOLERANCE
    assert without.max() > 0.5


def test_small_differences_of_a_router_stay_small_when_its_choice_is_replayed(
    made, sample_all, wait
):
    """Two experts a token. A router that is off by a fiftieth weighs a little otherwise, but chooses otherwise here and
    there, which is not a little."""
    directory = made(2)
    base = base_model.load("m", str(directory))
    one, result = sampled(base, None, sample_all, wait)
    with_replay, without = both_ways(perturbed(directory, size=0.02), None, one, result)
    assert without.max() > 5
    assert with_replay.max() < 0.5


def test_replay_on_a_perturbed_router_equals_a_float64_model_given_the_experts(
    made, sample_all, wait
):
    directory = made(2)
    base, other = base_model.load("m", str(directory)), perturbed(directory, size=1.0)
    adapter = random_adapter(base, seed=5)
    one, result = sampled(base, adapter, sample_all, wait)
    samples = [as_sample(one, sequence) for sequence in result.sequences]
    routed = [sequence.routed_experts for sequence in result.sequences]
    plain = merged(other, adapter)
    forced = Forced(plain)
    for logprobs, sequence in zip(
        forward(other, adapter, samples, routed), result.sequences, strict=True
    ):
        forced.experts = sequence.routed_experts
        wanted = score(plain, [*one.prompt.tolist(), *sequence.tokens.tolist()])[1:]
        np.testing.assert_allclose(logprobs, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("model_type", ["glm4_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_law_15_replay_of_the_samplers_own_weights_gives_its_logprobs(
    base_of, sample_all, wait, model_type
):
    base = base_of(model_type)
    adapter = random_adapter(base, seed=5)
    one, result = sampled(base, adapter, sample_all, wait)
    with_replay, _ = both_ways(base, adapter, one, result)
    assert with_replay.max() < TOLERANCE


def test_bias_that_moves_the_choice_alone_is_undone_by_replay(base_of, sample_all, wait):
    """GLM-4's routers have a bias that decides who is chosen and not how they are weighed."""
    base = base_of("glm4_moe")
    one, result = sampled(base, None, sample_all, wait)
    other = replace(base, module=copy.deepcopy(base.module))
    for router in routers_of(other.module):
        router.get_buffer("e_score_correction_bias")[:] = torch.tensor([0.0, 0.4, -0.4, 0.2])
    with_replay, without = both_ways(other, None, one, result)
    assert with_replay.max() < TOLERANCE
    assert without.max() > 0.5
