"""Full weights: the numbers of plain transformers, and sessions that keep to themselves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from backend.trainer import base_model
from backend.trainer.base import (
    AdamParams,
    FullConfig,
    FullWeights,
    LoraConfig,
    MuonParams,
    OptimizerConfig,
    Trainer,
)
from backend.trainer.base_model import BaseModel
from backend.trainer.full_slot import FullSlot
from backend.trainer.model_layout import ModelLayout
from backend.trainer.torch_trainer import TorchTrainer
from tests.conformance.data import changed, forward, random_sample, run, train
from tests.trainer import full_oracle
from tests.trainer.sessions import relative_error, take_gradient
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.samples import Sample

Base = Callable[..., BaseModel]
Directory = Callable[..., Path]

# Tied and not, with norms of heads, with sliding windows, with experts that the files hold one by one.
MODELS = ["llama", "qwen3-tied", "gemma3_text-tied", "gpt2-tied", "qwen3_moe", "mixtral"]
ADAM = AdamParams(learning_rate=1e-3, weight_decay=0.01, eps=1e-8)
LORA = LoraConfig(rank=4, alpha=32.0, seed=3)


@pytest.fixture(params=MODELS)
def kind(request: pytest.FixtureRequest) -> tuple[str, bool]:
    """(model type, whether the head is the embedding)"""
    model_type, _, tied = request.param.partition("-")
    return model_type, bool(tied)


@pytest.fixture
def llama(base_of: Base) -> TorchTrainer:
    trainer = TorchTrainer(base_of("llama"))
    trainer.create_session("full", FullConfig())
    return trainer


def data(num_samples: int = 6, *, seed: int = 0) -> list[Sample]:
    """Of mixed lengths, two of them equal, with weights of which some are 0."""
    rng = np.random.default_rng(seed)
    lengths = [9, 9, 5, 24, 17, 40][:num_samples]
    return [
        random_sample(
            seed * 100 + i,
            128,
            length,
            weights=rng.choice([0.0, 0.5, 1.0], length).astype(np.float32),
        )
        for i, length in enumerate(lengths)
    ]


def full_tensors(trainer: Trainer, session: str = "full") -> dict[str, np.ndarray]:
    weights = trainer.weights(session)
    assert isinstance(weights, FullWeights)
    return dict(weights.tensors)


def test_full_weights_gradient_equals_plain_transformers_in_float64(
    kind: tuple[str, bool], base_of: Base, directory_of: Directory
):
    model_type, tied = kind
    trainer = TorchTrainer(base_of(model_type, tied=tied))
    trainer.create_session("full", FullConfig())
    oracle = full_oracle.load(directory_of(model_type, tied=tied))
    samples = data()
    wanted = oracle.logprobs(samples)
    oracle.backward(samples)
    got = run(trainer, "full", samples, backward=True).logprobs
    for ours, theirs in zip(got, wanted, strict=True):
        # float32 against float64, on weights so large that a fault shows as whole nats.
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert relative_error(take_gradient(trainer, "full"), oracle.gradient()) < 2e-5


def test_full_weights_follow_torch_adamw(
    kind: tuple[str, bool], base_of: Base, directory_of: Directory
):
    model_type, tied = kind
    trainer = TorchTrainer(base_of(model_type, tied=tied))
    trainer.create_session("full", FullConfig())
    oracle = full_oracle.load(directory_of(model_type, tied=tied))
    # With this eps a gradient near 0, whose sign rounding decides, moves its weight by next to nothing.
    params = replace(ADAM, eps=1e-2)
    for step in range(4):
        train(trainer, "full", data(seed=step), adam=params)
        oracle.backward(data(seed=step))
        oracle.step(params)
    assert relative_error(full_tensors(trainer), oracle.weights()) < 1e-5


def test_full_weights_all_move(kind: tuple[str, bool], base_of: Base):
    model_type, tied = kind
    trainer = TorchTrainer(base_of(model_type, tied=tied))
    trainer.create_session("full", FullConfig())
    before = trainer.weights("full")
    train(trainer, "full", data(), adam=ADAM)
    assert changed(before, trainer.weights("full")) == set(before.tensors)


def test_full_weights_are_named_as_the_models_own_files_name_them(
    kind: tuple[str, bool], base_of: Base, directory_of: Directory
):
    from safetensors import safe_open

    model_type, tied = kind
    trainer = TorchTrainer(base_of(model_type, tied=tied))
    trainer.create_session("full", FullConfig())
    got = full_tensors(trainer)
    path = directory_of(model_type, tied=tied) / "model.safetensors"
    with safe_open(path, framework="np") as file:
        assert set(got) == set(file.keys())
        for name, tensor in got.items():
            np.testing.assert_array_equal(tensor, file.get_tensor(name), err_msg=name)


def test_law_10_full_weights_start_as_the_base_exactly(kind: tuple[str, bool], base_of: Base):
    model_type, tied = kind
    trainer = TorchTrainer(base_of(model_type, tied=tied))
    trainer.create_session("full", FullConfig())
    trainer.create_session("lora", LORA)
    for ours, base in zip(
        forward(trainer, "full", data()), forward(trainer, "lora", data()), strict=True
    ):
        np.testing.assert_array_equal(ours, base)


def test_law_9_adapters_beside_full_weights_train_as_if_alone(base_of: Base):
    base = base_of("llama")
    before = {n: p.clone() for n, p in base.module.named_parameters()}
    alone, beside = TorchTrainer(base), TorchTrainer(base)
    beside.create_session("full", FullConfig())
    for trainer in (alone, beside):
        trainer.create_session("lora", LORA)
    for step in range(3):
        train(beside, "full", data(seed=step), adam=ADAM)
        for trainer in (alone, beside):
            train(trainer, "lora", data(seed=step + 10), adam=ADAM)
    assert changed(alone.weights("lora"), beside.weights("lora")) == set()
    assert all(torch.equal(p, before[n]) for n, p in base.module.named_parameters())


def test_law_9_full_weights_in_a_batch_with_adapters_get_what_they_get_alone(base_of: Base):
    from backend.trainer.base import Pass, PassResult

    alone, together = TorchTrainer(base_of("llama")), TorchTrainer(base_of("llama"))
    for trainer in (alone, together):
        trainer.create_session("full", FullConfig())
    together.create_session("lora", LORA)
    passes = [Pass(session=name, samples=data(seed=1), backward=True) for name in ("lora", "full")]
    outcomes = together.run_batch(passes)
    assert all(isinstance(outcome, PassResult) for outcome in outcomes)
    run(alone, "full", data(seed=1), backward=True)
    for trainer in (alone, together):
        trainer.optim_step("full", ADAM)
    assert changed(alone.weights("full"), together.weights("full")) == set()


def test_law_6_two_passes_add_up_to_one(llama: TorchTrainer, base_of: Base):
    samples = data()
    run(llama, "full", samples, backward=True)
    whole = take_gradient(llama, "full")
    for half in (samples[:2], samples[2:3], samples[3:]):
        run(llama, "full", half, backward=True)
    assert relative_error(take_gradient(llama, "full"), whole) < 1e-5
    # And nothing of the first windows is left in the next one.
    run(llama, "full", samples, backward=True)
    again = take_gradient(llama, "full")
    assert all(np.array_equal(again[name], whole[name]) for name in whole)


def test_law_4_micro_batches_change_no_gradient(base_of: Base):
    gradients = []
    for budget in (8, 4096):
        trainer = TorchTrainer(base_of("llama"), token_budget=budget)
        trainer.create_session("full", FullConfig())
        run(trainer, "full", data(), backward=True)
        gradients.append(take_gradient(trainer, "full"))
    assert relative_error(*gradients) < 1e-5


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_failed_pass_adds_nothing_to_the_window(llama: TorchTrainer, num_before: int):
    samples = data()
    for _ in range(num_before):
        run(llama, "full", samples, backward=True)
    bad = [np.full(s.num_tokens, 1e38, np.float32) for s in samples]
    with pytest.raises(PostTrainingError) as caught:
        run(llama, "full", samples, gradients=bad, backward=True)
    assert caught.value.reason == Reason.NON_FINITE_LOSS
    assert llama.has_gradients("full") == (num_before > 0)
    before = llama.weights("full")
    for _ in range(2 - num_before):
        run(llama, "full", samples, backward=True)
    got = take_gradient(llama, "full")
    for _ in range(2):
        run(llama, "full", samples, backward=True)
    wanted = take_gradient(llama, "full")
    assert all(np.array_equal(got[name], wanted[name]) for name in wanted)
    assert changed(before, llama.weights("full")) == set()


def test_forward_between_passes_leaves_the_window_alone(llama: TorchTrainer):
    run(llama, "full", data(), backward=True)
    wanted = take_gradient(llama, "full")
    run(llama, "full", data(), backward=True)
    run(llama, "full", data(seed=5))
    got = take_gradient(llama, "full")
    assert all(np.array_equal(got[name], wanted[name]) for name in wanted)


def test_load_clears_the_window(llama: TorchTrainer):
    wanted, weights = [], llama.weights("full")
    for num_before in (0, 2):
        for _ in range(num_before):
            run(llama, "full", data(seed=5), backward=True)
        llama.load("full", weights, None)
        assert not llama.has_gradients("full")
        run(llama, "full", data(), backward=True)
        wanted.append(take_gradient(llama, "full"))
    assert all(np.array_equal(wanted[0][name], wanted[1][name]) for name in wanted[0])


def test_a_windows_second_pass_takes_memory_until_the_step(base_of: Base):
    """As large as the weights."""
    trainer = TorchTrainer(base_of("llama"))
    trainer.create_session("full", FullConfig())
    sizes = []
    for num_passes in (1, 2):
        for _ in range(num_passes):
            run(trainer, "full", data(), backward=True)
        sizes.append(num_buffers(base_of("llama")))
        trainer.optim_step("full", AdamParams())
        sizes.append(num_buffers(base_of("llama")))
    first, after_first, second, after_second = sizes
    assert (second - first, after_first, after_second) == (1, first, first)


def num_buffers(base: BaseModel) -> int:
    """Buffers as large as the whole model."""
    gc.collect()
    size = 4 * ModelLayout(base.module).tensors.size
    found = (o.untyped_storage() for o in gc.get_objects() if isinstance(o, torch.Tensor))
    return len({storage.data_ptr() for storage in found if storage.nbytes() == size})


def test_second_session_of_full_weights_is_refused_until_the_first_ends(llama: TorchTrainer):
    with pytest.raises(PostTrainingError) as caught:
        llama.create_session("second", FullConfig())
    assert caught.value.reason == Reason.RESOURCE_EXHAUSTED
    assert "'full'" in caught.value.message
    assert caught.value.metadata["session"] == "full"
    llama.delete_session("full")
    llama.create_session("second", FullConfig())


@pytest.mark.parametrize("backward", [False, True])
def test_session_that_ended_leaves_nothing_in_memory(base_of: Base, backward: bool):
    def large() -> int:
        """Tensors as large as the whole model, or cut from one. Python's collector does not see all that keeps them."""
        gc.collect()
        tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
        return sum(tensor.untyped_storage().nbytes() >= 4 * size for tensor in tensors)

    base = base_of("llama")
    size = ModelLayout(base.module).tensors.size
    trainer = TorchTrainer(base)
    before = large()
    trainer.create_session("full", FullConfig())
    run(trainer, "full", data(), backward=backward)
    assert large() > before
    trainer.delete_session("full")
    assert large() == before


@pytest.mark.parametrize("family", ["adamw", "muon"])
def test_law_13_full_weights_resume_bit_for_bit(base_of: Base, family: str):
    optimizer = OptimizerConfig(family="muon" if family == "muon" else "adamw")
    params = ADAM if family == "adamw" else MuonParams(learning_rate=1e-3)

    def step(trainer: Trainer, number: int) -> None:
        run(trainer, "full", data(seed=number), backward=True)
        trainer.optim_step("full", params)

    first, second = TorchTrainer(base_of("qwen3")), TorchTrainer(base_of("qwen3"))
    for trainer in (first, second):
        trainer.create_session("full", FullConfig(), optimizer)
    step(first, 0)
    second.load("full", first.weights("full"), first.optimizer_state("full"))
    for trainer in (first, second):
        step(trainer, 1)
    assert changed(first.weights("full"), second.weights("full")) == set()


def test_weights_that_were_handed_out_stay_as_they_were(llama: TorchTrainer):
    weights = full_tensors(llama)
    kept = {name: tensor.copy() for name, tensor in weights.items()}
    train(llama, "full", data(), adam=ADAM)
    assert all(np.array_equal(weights[name], kept[name]) for name in kept)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing: model.norm.weight"),
        (lambda t: t.update(extra=np.zeros(2, np.float32)), "unexpected: extra"),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(3, np.float32)}),
            "misshapen: model.norm.weight is [3], must be [32]",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.full(32, np.nan, np.float32)}),
            "not finite: model.norm.weight",
        ),
    ],
    ids=["missing", "unexpected", "misshapen", "not-finite"],
)
def test_weights_that_do_not_fit_the_model_are_refused_by_name(
    llama: TorchTrainer, spoil: Callable, named: str
):
    before = llama.weights("full")
    tensors = full_tensors(llama)
    spoil(tensors)
    with pytest.raises(PostTrainingError) as caught:
        llama.load("full", FullWeights(tensors=tensors), None)
    assert caught.value.reason == Reason.INCOMPATIBLE_CHECKPOINT
    assert named in caught.value.message
    assert changed(before, llama.weights("full")) == set()


def test_adapter_and_full_weights_are_not_loaded_into_each_other(llama: TorchTrainer):
    llama.create_session("lora", LORA)
    for session, other, named in (
        ("full", "lora", "holds a LoRA adapter"),
        ("lora", "full", "holds full weights"),
    ):
        with pytest.raises(PostTrainingError) as caught:
            llama.load(session, llama.weights(other), None)
        assert caught.value.reason == Reason.INCOMPATIBLE_CHECKPOINT
        assert named in caught.value.message


def test_matrices_for_muon_leave_out_embeddings_norms_and_the_head(base_of: Base):
    layout = ModelLayout(base_of("qwen3_moe").module)
    assert "model.layers.0.self_attn.q_proj.weight" in layout.matrices
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in layout.matrices
    others = layout.tensors.shapes.keys() - layout.matrices
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} <= others
    assert all("norm" in n or n in ("lm_head.weight", "model.embed_tokens.weight") for n in others)


def test_model_whose_files_hold_more_than_parameters_is_refused_by_name(base_of: Base):
    with pytest.raises(PostTrainingError) as caught:
        TorchTrainer(base_of("glm4_moe")).create_session("full", FullConfig())
    assert caught.value.reason == Reason.UNIMPLEMENTED
    assert "glm4_moe" in caught.value.message
    assert "e_score_correction_bias" in caught.value.message


def test_full_weights_that_memory_does_not_hold_are_refused_with_both_numbers(base_of: Base):
    base = base_of("llama")
    needed = 16 * sum(p.numel() for p in base.module.parameters())
    FullSlot(base, available=lambda _: needed)
    with pytest.raises(PostTrainingError) as caught:
        FullSlot(base, available=lambda _: needed - 1)
    assert caught.value.reason == Reason.OUT_OF_MEMORY
    assert caught.value.metadata["needed_bytes"] == str(needed)
    assert caught.value.metadata["available_bytes"] == str(needed - 1)


def test_full_weights_of_a_bfloat16_model_are_float32_and_start_as_the_model_is(
    directory_of: Directory,
):
    base = base_model.load("bf16", str(directory_of("llama")), dtype="bfloat16", device="cpu")
    trainer = TorchTrainer(base)
    trainer.create_session("full", FullConfig())
    trainer.create_session("lora", LORA)
    for ours, wanted in zip(
        forward(trainer, "full", data()), forward(trainer, "lora", data()), strict=True
    ):
        # Products of the same numbers, in blocks there and whole here.
        np.testing.assert_allclose(ours, wanted, atol=1e-4)
    before = trainer.weights("full")
    # A step far below what bfloat16 could tell from none.
    train(trainer, "full", data(), adam=replace(ADAM, learning_rate=1e-6))
    assert changed(before, trainer.weights("full")) == set(before.tensors)
