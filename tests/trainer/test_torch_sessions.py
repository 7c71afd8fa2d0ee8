"""Sessions of the torch trainer: what they train, where they start, what they leave alone."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch

from backend.trainer.adapter_slot import AdapterSlot
from backend.trainer.base import AdamParams, LoraConfig
from backend.trainer.torch_trainer import TorchTrainer
from tests.conformance.data import changed, forward, random_sample, train
from together_post_training.errors import PostTrainingError, Reason

LORA = LoraConfig(rank=4, alpha=8, seed=0)
ATTN = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


def modules(trainer: TorchTrainer, lora: LoraConfig) -> set[str]:
    trainer.create_session("m", lora)
    names = trainer.weights("m").tensors
    assert all(name.startswith("base_model.model.") for name in names)
    return {name.rsplit(".lora_", 1)[0].rsplit(".", 1)[-1] for name in names}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((True, False, False), ATTN),
        ((False, True, False), MLP),
        ((False, False, True), {"lm_head"}),
        ((True, True, True), {*ATTN, *MLP, "lm_head"}),
    ],
)
def test_adapter_holds_the_wanted_modules_alone(trainer: TorchTrainer, flags, expected):
    attn, mlp, unembed = flags
    lora = replace(LORA, train_attn=attn, train_mlp=mlp, train_unembed=unembed)
    assert modules(trainer, lora) == expected


@pytest.mark.parametrize("tied", [False, True])
def test_head_is_trained_apart_from_the_embedding(base_of, tied):
    base = base_of("llama", tied=tied)
    embedding = base.module.get_input_embeddings().weight
    before = embedding.clone()
    trainer = TorchTrainer(base)
    trainer.create_session("s", replace(LORA, train_attn=False, train_mlp=False))
    train(trainer, "s", [random_sample(1, 128, 9)], adam=AdamParams(learning_rate=0.1))
    assert set(trainer.weights("s").tensors) == {
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.lm_head.lora_B.weight",
    }
    assert torch.equal(embedding, before)


def test_nothing_to_train_is_refused(trainer: TorchTrainer):
    with pytest.raises(PostTrainingError, match="train_attn"):
        trainer.create_session(
            "s", replace(LORA, train_attn=False, train_mlp=False, train_unembed=False)
        )


def test_seed_gives_each_layer_a_stream_of_its_own(trainer: TorchTrainer):
    """The same for the same seed, whatever was made between; torch's own stream does not move."""
    state = torch.get_rng_state()
    trainer.create_session("a", LORA)
    trainer.create_session("b", replace(LORA, seed=1, rank=7))
    trainer.create_session("c", LORA)
    assert torch.equal(torch.get_rng_state(), state)
    first, second = trainer.weights("a"), trainer.weights("c")
    assert not changed(first, second)
    a = {n: t for n, t in first.tensors.items() if n.endswith("lora_A.weight")}
    assert len({t.tobytes() for t in a.values()}) == len(a)
    only_attn = replace(LORA, train_mlp=False, train_unembed=False)
    trainer.create_session("d", only_attn)
    for name, tensor in trainer.weights("d").tensors.items():
        assert np.array_equal(tensor, first.tensors[name])
    trainer.create_session("e", replace(LORA, seed=-1))
    trainer.create_session("f", replace(LORA, seed=2**63))
    assert changed(trainer.weights("e"), trainer.weights("f")) == set(a)


def test_a_is_uniform_within_one_over_the_root_of_its_width(trainer: TorchTrainer):
    trainer.create_session("s", replace(LORA, rank=64))
    for name, tensor in trainer.weights("s").tensors.items():
        if name.endswith("lora_A.weight"):
            bound = tensor.shape[1] ** -0.5
            assert np.abs(tensor).max() <= bound
            # A uniform variable's standard deviation; 2,000 values or more, so 5 % is 3 sigma.
            assert tensor.std() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_sessions_of_different_rank_each_equal_their_solo_run(base_of):
    lora = {"small": replace(LORA, rank=1), "large": replace(LORA, rank=64, alpha=32)}
    together = TorchTrainer(base_of("succ16"))
    for name, config in lora.items():
        together.create_session(name, config)
    adam = AdamParams(learning_rate=0.05)
    data = {"small": [random_sample(1, 16, 9)], "large": [random_sample(2, 16, 12)]}
    for _ in range(3):
        for name in lora:
            train(together, name, data[name], adam=adam)
    for name, config in lora.items():
        alone = TorchTrainer(base_of("succ16"))
        alone.create_session(name, config)
        for _ in range(3):
            train(alone, name, data[name], adam=adam)
        assert not changed(together.weights(name), alone.weights(name))


def test_rank_above_the_models_limit_is_refused_with_the_limit(trainer: TorchTrainer):
    limit = trainer.model.max_lora_rank
    with pytest.raises(PostTrainingError, match=str(limit)) as error:
        trainer.create_session("s", replace(LORA, rank=limit + 1))
    assert error.value.reason is Reason.INVALID_ARGUMENT
    trainer.create_session("s", replace(LORA, rank=limit))


def test_training_leaves_the_base_as_it_was(base_of):
    base = base_of("qwen3")
    before = {name: p.clone() for name, p in base.module.named_parameters()}
    trainer = TorchTrainer(base)
    trainer.create_session("a", LORA)
    trainer.create_session("b", replace(LORA, seed=1))
    for session in ("a", "b", "a"):
        train(trainer, session, [random_sample(1, 128, 20)], adam=AdamParams(learning_rate=0.1))
    for name, parameter in base.module.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
        assert not parameter.requires_grad


def test_two_trainers_on_one_base_do_not_meet(base_of):
    """Views have modules of their own: one's adapters and routing are nothing to the other."""
    first, second = (TorchTrainer(base_of("llama")) for _ in range(2))
    for trainer in (first, second):
        trainer.create_session("s", LORA)
    samples = [random_sample(1, 128, 20)]
    before = forward(second, "s", samples)
    train(first, "s", samples, adam=AdamParams(learning_rate=0.1))
    assert np.abs(forward(first, "s", samples)[0] - before[0]).max() > 0.1
    assert np.array_equal(forward(second, "s", samples)[0], before[0])


def test_unknown_and_duplicate_sessions_are_refused(trainer: TorchTrainer):
    trainer.create_session("s", LORA)
    with pytest.raises(PostTrainingError) as error:
        trainer.create_session("s", LORA)
    assert error.value.reason is Reason.SESSION_EXISTS
    trainer.delete_session("s")
    for call in (trainer.delete_session, trainer.weights, trainer.has_gradients):
        with pytest.raises(PostTrainingError) as error:
            call("s")
        assert error.value.reason is Reason.SESSION_NOT_FOUND


def test_checkpoint_of_another_shape_is_refused_by_tensor_and_changes_nothing(
    trainer: TorchTrainer,
):
    trainer.create_session("s", LORA)
    trainer.create_session("other", replace(LORA, rank=5))
    trainer.create_session("head", replace(LORA, train_attn=False, train_mlp=False))
    train(trainer, "s", [random_sample(1, 128, 9)], adam=AdamParams(learning_rate=0.1))
    before, moments = trainer.weights("s"), trainer.optimizer_state("s")
    for session, fault in (("other", r"misshapen: .*lora_A"), ("head", r"missing: .*down_proj")):
        foreign = replace(trainer.weights(session), lora=LORA)
        with pytest.raises(PostTrainingError, match=fault) as error:
            trainer.load("s", foreign, None)
        assert error.value.reason is Reason.INCOMPATIBLE_CHECKPOINT
    assert not changed(before, trainer.weights("s"))
    assert trainer.optimizer_state("s").num_steps == moments.num_steps == 1


def test_resuming_with_moments_equals_never_stopping(trainer: TorchTrainer):
    adam = AdamParams(learning_rate=0.05, weight_decay=0.1)
    for session in ("whole", "first"):
        trainer.create_session(session, LORA)
        for seed in (1, 2):
            train(trainer, session, [random_sample(seed, 128, 9)], adam=adam)
    trainer.create_session("resumed", replace(LORA, seed=9))
    trainer.load("resumed", trainer.weights("first"), trainer.optimizer_state("first"))
    for session in ("whole", "resumed"):
        train(trainer, session, [random_sample(3, 128, 9)], adam=adam)
    assert not changed(trainer.weights("whole"), trainer.weights("resumed"))


def test_deleted_session_frees_its_memory(trainer: TorchTrainer):
    trainer.create_session("s", LORA)
    train(trainer, "s", [random_sample(1, 128, 9)], adam=AdamParams())
    weights = weakref.ref(cast(AdapterSlot, trainer._slots["s"]).weights)
    trainer.delete_session("s")
    gc.collect()
    assert weights() is None
