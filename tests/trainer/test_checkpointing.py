"""Layers that are computed again in backward give, to the bit, what stored ones give."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from backend.trainer.base import AdamParams, FullConfig, LoraConfig, Pass, PassResult, WeightsConfig
from backend.trainer.base_model import BaseModel
from backend.trainer.checkpointing import decoder_layers
from backend.trainer.dropout import Dropout, SampleRows
from backend.trainer.families import FAMILIES
from backend.trainer.packed_model import pack
from backend.trainer.torch_trainer import TorchTrainer
from tests.conformance.data import random_sample
from tests.trainer.sessions import random_adapter, take_gradient
from together_post_training.samples import Sample

LORA = LoraConfig(rank=4, alpha=8, seed=0)
SAMPLES = [random_sample(i, 128, n) for i, n in enumerate((20, 20, 7, 33))]


def trainers(base: BaseModel, config: WeightsConfig) -> tuple[TorchTrainer, TorchTrainer]:
    """One that stores every layer and one that computes every layer again, each with a session "s"."""
    made = [TorchTrainer(base, token_budget=128, activation_bytes=n) for n in (2**30, 1)]
    for trainer in made:
        trainer.create_session("s", config)
    return made[0], made[1]


def run(trainer: TorchTrainer, **options) -> list[np.ndarray]:
    return list(trainer.run(Pass(session="s", samples=SAMPLES, backward=True, **options)).logprobs)


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_recomputed_gradients_are_those_of_stored_layers(base_of, model_type):
    base = base_of(model_type)
    assert len(decoder_layers(base.module)) == base.module.config.num_hidden_layers
    stored, recomputed = trainers(base, LORA)
    adapter = random_adapter(stored, "s")
    results = []
    for trainer in (stored, recomputed):
        trainer.load("s", adapter, None)
        results.append((run(trainer), take_gradient(trainer, "s")))
    (lp, gradient), (lp_again, gradient_again) = results
    assert all(np.array_equal(a, b) for a, b in zip(lp, lp_again, strict=True))
    assert_same(gradient, gradient_again)
    assert all(np.abs(g).max() > 0 for g in gradient.values())


def test_layers_are_computed_twice_only_where_memory_is_short(base_of):
    """Counted where a layer's work begins: the first product of its attention."""
    counts = []
    for trainer in trainers(base_of("llama"), LORA):
        seen = []
        layer = trainer._packed._view.get_submodule("model.layers.0.self_attn.q_proj")
        layer.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        run(trainer)
        trainer.run(Pass(session="s", samples=SAMPLES))
        counts.append(len(seen))
    assert counts == [2, 3]


def test_frozen_base_does_not_stop_gradients(base_of):
    """Checkpointing on a frozen base is known to give no gradients elsewhere: every B moves at the first step, every A
    at the second, since the gradient of A is 0 while B is."""
    stored, recomputed = trainers(base_of("llama"), LORA)
    fresh = recomputed.weights("s").tensors
    steps = []
    for trainer in (stored, recomputed):
        taken = []
        for _ in range(2):
            run(trainer)
            trainer.optim_step("s", AdamParams(learning_rate=0.1))
            taken.append(trainer.weights("s").tensors)
        steps.append(taken)
    first, second = steps[1]
    for name in fresh:
        if ".lora_B." in name:
            assert np.abs(first[name]).max() > 0, name
        else:
            assert np.array_equal(first[name], fresh[name]), name
            assert not np.array_equal(second[name], fresh[name]), name
    for one, other in zip(*steps, strict=True):
        assert_same(dict(one), dict(other))


def test_dropout_is_the_same_when_it_is_computed_again(base_of):
    dropped = LoraConfig(rank=4, alpha=8, seed=0, dropout=0.5)
    stored, recomputed = trainers(base_of("llama"), dropped)
    adapter = random_adapter(stored, "s")
    gradients = []
    for trainer in (stored, recomputed):
        trainer.load("s", adapter, None)
        run(trainer)
        gradients.append(take_gradient(trainer, "s"))
    assert_same(*gradients)


def test_masks_of_dropout_are_kept_only_where_layers_are(base_of, monkeypatch):
    """They are as large as what goes into every layer: several times what recomputing keeps."""
    lora = LoraConfig(rank=4, alpha=8, seed=0, dropout=0.5, train_unembed=False)
    num_layers = 2 * 7
    trainer, _ = trainers(base_of("llama"), lora)
    drawn: list[weakref.ref] = []
    plain = Dropout.kept

    def kept(self, path, width):
        mask = plain(self, path, width)
        drawn.append(weakref.ref(mask))
        return mask

    monkeypatch.setattr(Dropout, "kept", kept)
    row = pack(SAMPLES)
    rows = [SampleRows(number=i, num_tokens=s.num_tokens) for i, s in enumerate(SAMPLES)]
    segment = trainer._slots["s"].segment(0, rows, for_backward=True)
    for recompute, num_alive in ((False, num_layers), (True, 0)):
        drawn.clear()
        forward = trainer._packed.forward(row, [segment], for_backward=True, recompute=recompute)
        assert len(drawn) == num_layers
        assert sum(mask() is not None for mask in drawn) == num_alive
        del forward


def test_rows_that_sessions_share_are_recomputed_too(base_of):
    """Losses that are known before any logprob and others, dropout, and no adapter in the body at all."""
    configs = {
        "s": replace(LORA, dropout=0.3),
        "t": replace(LORA, rank=2, train_mlp=False),
        "u": replace(LORA, train_attn=False, train_mlp=False),
    }
    gradients, num_computed = [], []
    for trainer in trainers(base_of("llama"), configs["s"]):
        seen = []
        layer = trainer._packed._view.get_submodule("model.layers.0.self_attn.q_proj")
        layer.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        works = []
        for i, (name, config) in enumerate(configs.items()):
            if name != "s":
                trainer.create_session(name, config)
            trainer.load(name, random_adapter(trainer, name, seed=i), None)
            works.append(Pass(session=name, samples=SAMPLES[i : i + 2], backward=True))
        likely = [np.full(s.num_tokens, -4.0, np.float32) for s in works[1].samples]
        sampled = [
            Sample(tokens=s.tokens, inputs={**s.inputs, "logprobs": lp, "advantages": -lp})
            for s, lp in zip(works[1].samples, likely, strict=True)
        ]
        works[1] = replace(works[1], samples=sampled, loss="importance_sampling")
        results = trainer.run_batch(works)
        assert all(isinstance(result, PassResult) for result in results), results
        num_computed.append(len(seen))
        gradients.append({name: take_gradient(trainer, name) for name in configs})
    assert num_computed == [1, 2]
    for name in configs:
        assert_same(gradients[0][name], gradients[1][name])


def test_losses_that_need_the_logprobs_first_are_recomputed_too(base_of):
    stored, recomputed = trainers(base_of("qwen3"), LORA)
    samples = [
        type(s)(
            tokens=s.tokens,
            inputs={
                "target_tokens": s.inputs["target_tokens"],
                "logprobs": np.full(s.num_tokens, -4.0, np.float32),
                "advantages": np.linspace(-1, 1, s.num_tokens, dtype=np.float32),
            },
        )
        for s in SAMPLES
    ]
    gradients = []
    for trainer in (stored, recomputed):
        trainer.run(Pass(session="s", samples=samples, loss="importance_sampling", backward=True))
        gradients.append(take_gradient(trainer, "s"))
    assert_same(*gradients)


def test_full_weights_are_recomputed_too(base_of: Callable[..., BaseModel]):
    stored, recomputed = trainers(base_of("llama"), FullConfig())
    for trainer in (stored, recomputed):
        run(trainer)
        trainer.optim_step("s", AdamParams(learning_rate=0.01))
    assert_same(dict(stored.weights("s").tensors), dict(recomputed.weights("s").tensors))
