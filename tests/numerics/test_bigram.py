"""The numpy bigram against the same model in float64 torch, trained by autograd and torch.optim.AdamW."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backend.trainer.base import AdamParams, LoraConfig, Pass
from backend.trainer.bigram import LORA_A, LORA_B, BigramModel, load
from backend.trainer.bigram_trainer import BigramTrainer
from tests.numerics import references
from together_post_training import losses
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.samples import Sample

LORA = LoraConfig(rank=3, alpha=5.0, seed=2)
VOCAB = 11


def model() -> BigramModel:
    head = np.random.default_rng(0).normal(size=(VOCAB, VOCAB))
    return BigramModel(name="random", head=head, hidden_scale=1.7)


class TorchBigram:
    """Weights are rounded to float32 after each step, as the numpy model keeps them."""

    def __init__(self, base: BigramModel, trainer: BigramTrainer, session: str) -> None:
        tensors = trainer.weights(session).tensors
        self.a = torch.nn.Parameter(torch.tensor(tensors[LORA_A], dtype=torch.float64))
        self.b = torch.nn.Parameter(torch.tensor(tensors[LORA_B], dtype=torch.float64))
        self._head = torch.tensor(base.head)
        self._hidden_scale = base.hidden_scale

    def logprobs(self, sample: Sample) -> torch.Tensor:
        weight = self._head + LORA.alpha / LORA.rank * self.b @ self.a
        hidden = self._hidden_scale * torch.eye(VOCAB, dtype=torch.float64)
        rows = torch.log_softmax(hidden[torch.tensor(sample.tokens)] @ weight.T, dim=-1)
        targets = torch.tensor(sample.inputs["target_tokens"])
        flat = rows.gather(1, targets.reshape(len(rows), -1))
        return flat.reshape(targets.shape)


def random_sample(seed: int, loss: str, width: int | None = None) -> Sample:
    random = np.random.default_rng(seed)
    shape = (6,) if width is None else (6, width)
    inputs: dict[str, np.ndarray] = {"target_tokens": random.integers(0, VOCAB, shape)}
    inputs["weights"] = random.normal(size=shape).astype(np.float32)
    if loss != "cross_entropy":
        inputs["advantages"] = random.normal(size=shape).astype(np.float32)
        inputs["logprobs"] = random.uniform(-4, -1, size=shape).astype(np.float32)
    if loss == "grpo":
        inputs["reference_logprobs"] = random.uniform(-4, -1, size=shape).astype(np.float32)
    if loss in ("gspo", "stable_reinforce"):
        mask = "sampled" if loss == "stable_reinforce" else "sequence_ratio_mask"
        inputs[mask] = np.array([0, 1, 1, 1, 0, 1], np.float32)
    return Sample(tokens=random.integers(0, VOCAB, 6), inputs=inputs)


@pytest.mark.parametrize("width", [None, 1, 3])
@pytest.mark.parametrize(
    ("loss", "given"),
    [
        *((name, {}) for name in sorted(losses.CONTRACTS) if name != "grpo"),
        ("grpo", {"horizon": 4, "beta": 0.1}),
        ("grpo", {"agg_type": "TOKEN_MEAN", "ratio_type": "SEQUENCE"}),
        ("grpo", {"agg_type": "SEQUENCE_MEAN"}),
    ],
)
def test_training_equals_autograd_and_torch_adamw(
    loss: str, given: dict[str, float | str], width: int | None
):
    """Ten windows of two passes.

    The reference differentiates the same float32-rounded logprobs only approximately (its own are
    float64), and both round weights to float32: 2e-6 after moves of 0.05.
    """
    if width is not None and not losses.contract(loss).takes_2d:
        return
    base = model()
    trainer = base.trainer()
    trainer.create_session("s", LORA)
    twin = TorchBigram(base, trainer, "s")
    params = losses.complete_params(loss, given)
    adam = AdamParams(learning_rate=0.005, weight_decay=0.05, eps=1e-4)
    optimizer = torch.optim.AdamW(
        [twin.a, twin.b], lr=0.005, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.05
    )
    for window in range(10):
        for one in (random_sample(2 * window, loss, width), random_sample(99, loss, width)):
            result = trainer.run(
                Pass(session="s", samples=[one], loss=loss, params=given, backward=True)
            )
            logprobs = twin.logprobs(one)
            prepared = losses.prepare(loss, params, [one.inputs])
            total = references.terms(loss, logprobs, one.inputs, prepared).sum()
            total.backward()
            np.testing.assert_allclose(result.logprobs[0], logprobs.detach(), atol=2e-6)
            assert result.metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-5)
        norm = trainer.optim_step("s", adam)["unclipped_grad_l2:mean"]
        gradients = [p.grad for p in (twin.a, twin.b) if p.grad is not None]
        assert norm == pytest.approx(
            float(torch.cat([g.ravel() for g in gradients]).norm()), rel=1e-5
        )
        optimizer.step()
        optimizer.zero_grad()
    tensors = trainer.weights("s").tensors
    assert np.abs(tensors[LORA_B]).max() > 0.02
    np.testing.assert_allclose(tensors[LORA_A], twin.a.detach(), atol=2e-6)
    np.testing.assert_allclose(tensors[LORA_B], twin.b.detach(), atol=2e-6)


@pytest.mark.parametrize("agg_type", ["TOKEN_MEAN", "SEQUENCE_MEAN", "FIXED_HORIZON"])
def test_grpo_is_divided_by_the_whole_pass(agg_type: str):
    base = model()
    trainer = base.trainer()
    trainer.create_session("s", LORA)
    twin = TorchBigram(base, trainer, "s")
    batch = [random_sample(seed, "grpo") for seed in range(3)]
    given = {"agg_type": agg_type, "horizon": 4.0}
    result = trainer.run(Pass(session="s", samples=batch, loss="grpo", params=given))
    # Every position has a weight.
    denominator = 18.0 if agg_type == "TOKEN_MEAN" else 3.0
    params = {**losses.complete_params("grpo", given), "denominator": denominator}
    total = sum(
        references.terms("grpo", twin.logprobs(one), one.inputs, params).sum().item()
        for one in batch
    )
    assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


def test_bigram16_is_the_closed_form():
    table = load("builtin:bigram16").logprobs(None)
    hit = 4 - np.log(np.exp(4) + 15)
    for token in range(16):
        expected = np.full(16, hit - 4)
        expected[(token + 1) % 16] = hit
        np.testing.assert_allclose(table[token], expected, rtol=1e-14)


def test_unknown_bigram_is_refused_by_name():
    with pytest.raises(PostTrainingError, match="bigram17") as error:
        load("builtin:bigram17")
    assert error.value.reason is Reason.MODEL_NOT_FOUND


def test_session_without_the_head_is_refused():
    trainer = load("builtin:bigram16").trainer()
    lora = LoraConfig(rank=4, alpha=8.0, seed=0, train_unembed=False)
    with pytest.raises(PostTrainingError, match="train_unembed") as error:
        trainer.create_session("s", lora)
    assert error.value.reason is Reason.INVALID_ARGUMENT
