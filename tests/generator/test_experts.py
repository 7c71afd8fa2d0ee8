"""Experts at inference: what the trainer computes, for many snapshots at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from backend.trainer.base import LoraConfig
from backend.trainer.torch_trainer import TorchTrainer
from tests.conformance.data import forward, sample
from tests.generator.calls import call, random_prompt
from tests.generator.oracle import TOLERANCE, publish
from tests.trainer.sessions import random_adapter

TARGETS = {
    "all": (),
    "experts": ("experts.gate_up_proj", "experts.down_proj"),
    "down": ("experts.down_proj",),
    "one layer": ("layers.1.mlp.experts.gate_up_proj",),
}


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "qwen2_moe", "olmoe"])
def test_sampled_logprobs_are_the_trainers_forward(base_of, generator_of, sample_all, model_type):
    """Law 15, four adapters of other ranks and targets and the base in one batch."""
    trainer, generator = TorchTrainer(base_of(model_type)), generator_of(model_type)
    trainer.create_session("base", LoraConfig(rank=1, alpha=1, seed=0))
    snapshots: dict[str, str | None] = {"base": None}
    for rank, (name, given) in enumerate(TARGETS.items(), start=2):
        trainer.create_session(name, LoraConfig(rank=rank, alpha=6, seed=0, target_modules=given))
        adapter = random_adapter(trainer, name, seed=rank)
        trainer.load(name, adapter, None)
        snapshots[name] = publish(generator, adapter)
    calls = [
        call(random_prompt(5 + i, seed=i), max_tokens=30, num_samples=2, seed=i, snapshot=snapshot)
        for i, snapshot in enumerate(snapshots.values())
    ]
    for name, asked, result in zip(snapshots, calls, sample_all(generator, *calls), strict=True):
        for sequence in result.sequences:
            whole = [*asked.prompt.tolist(), *sequence.tokens.tolist()]
            (logprobs,) = forward(trainer, name, [sample(whole[:-1], whole[1:])])
            np.testing.assert_allclose(
                sequence.logprobs, logprobs[len(asked.prompt) - 1 :], rtol=0, atol=TOLERANCE
            )


def test_snapshot_of_experts_is_a_copy(base_of, generator_of, sample_all):
    """Law 14: what is trained later does not reach it."""
    trainer, generator = TorchTrainer(base_of("qwen3_moe")), generator_of("qwen3_moe")
    trainer.create_session("s", LoraConfig(rank=2, alpha=4, seed=0))
    adapter = random_adapter(trainer, "s")
    snapshot = publish(generator, adapter)
    asked = call(random_prompt(6, seed=1), max_tokens=20, snapshot=snapshot)
    (before,) = sample_all(generator, asked)
    for tensor in adapter.tensors.values():
        tensor[:] = 0
    (after,) = sample_all(generator, asked)
    assert torch.equal(*(torch.tensor(r.sequences[0].logprobs) for r in (before, after)))
    changed = publish(generator, replace(adapter))
    (other,) = sample_all(generator, replace(asked, snapshot=changed))
    assert not np.array_equal(other.sequences[0].logprobs, before.sequences[0].logprobs)
