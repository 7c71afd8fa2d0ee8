"""LoRA dropout: what is drawn, that the arithmetic is PEFT's, and that it can be drawn again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from backend.trainer.base import AdamParams, LoraConfig, PassResult
from backend.trainer.bigram import load
from backend.trainer.dropout import Dropout, SampleRows
from backend.trainer.torch_trainer import TorchTrainer
from tests.conformance.data import adapter_of, changed, forward, part, random_sample, run, train
from tests.trainer import oracle
from tests.trainer.sessions import random_adapter, relative_error, take_gradient
from together_post_training.samples import Sample

LORA = LoraConfig(rank=3, alpha=6, seed=5, dropout=0.25)
SAMPLES = [random_sample(i, 128, n) for i, n in enumerate((12, 5, 5, 20, 1))]
STEP = AdamParams(learning_rate=0.05)


def drawn(*samples: SampleRows, probability: float = 0.25, step: int = 0, seed: int = 5) -> Dropout:
    return Dropout(seed=seed, step=step, probability=probability, samples=samples)


def rows(number: int, num_tokens: int = 50) -> SampleRows:
    return SampleRows(number=number, num_tokens=num_tokens)


def session(trainer: TorchTrainer, name: str = "s", **lora) -> None:
    """With random weights, the same for each."""
    trainer.create_session(name, replace(LORA, **lora))
    trainer.load(name, random_adapter(trainer, name), None)


def same_bits(one: PassResult, other: PassResult) -> bool:
    return [a.tobytes() for a in one.logprobs] == [b.tobytes() for b in other.logprobs]


# What is drawn


@pytest.mark.parametrize("probability", [0.0, 1e-3, 0.25, 0.9])
def test_inputs_are_dropped_with_the_probability_that_was_asked_for(probability):
    kept = drawn(rows(0, 4000), probability=probability).kept("layer", 100)
    dropped = 1 - kept.mean()
    # Five standard deviations of the mean of 400,000 draws.
    assert dropped == pytest.approx(probability, abs=5 * (probability / 400_000) ** 0.5)
    assert drawn(probability=probability).factor == pytest.approx(
        1 / (1 - probability), rel=1e-4 / (1 - probability)
    )


def test_a_probability_close_to_one_keeps_a_finite_factor():
    assert drawn(probability=1 - 1e-12).factor == 2**16


def test_masks_differ_by_layer_sample_step_and_seed_and_are_uncorrelated():
    masks = [
        drawn(rows(0)).kept("a", 64),
        drawn(rows(0)).kept("b", 64),
        drawn(rows(1)).kept("a", 64),
        drawn(rows(0), step=1).kept("a", 64),
        drawn(rows(0), seed=6).kept("a", 64),
        drawn(rows(0), seed=-5).kept("a", 64),
    ]
    correlations = np.corrcoef([mask.ravel() for mask in masks])
    # Of 3,200 independent draws: 1 / sqrt(3200) is one standard deviation.
    assert np.abs(correlations - np.eye(len(masks))).max() < 5 / 3200**0.5
    # Nor do tokens or inputs of one sample repeat each other.
    within = np.corrcoef(masks[0])
    assert np.abs(within - np.eye(len(within))).max() < 5.5 / 64**0.5


def test_no_part_of_a_stream_is_drawn_again_for_another_sample_or_step():
    """Streams that overlap would give one sample the other's mask a few tokens later. Of 2**32 values that 32 inputs
    may have, 4,000 drawn at random have a pair of equal ones in 1 of 500 trials; and this is always the same trial."""
    chunks: list[bytes] = []
    for number in range(8):
        for step in range(4):
            kept = drawn(rows(number, 125), probability=0.5, step=step).kept("a", 32)
            chunks += [np.packbits(token).tobytes() for token in kept]
    assert len(set(chunks)) == len(chunks) == 4000


def test_a_mask_is_a_samples_own_whatever_lies_beside_it():
    together = drawn(rows(3, 7), rows(0, 2), rows(9, 5)).kept("layer", 33)
    for number, start, stop in ((3, 0, 7), (0, 7, 9), (9, 9, 14)):
        alone = drawn(rows(number, stop - start)).kept("layer", 33)
        assert np.array_equal(together[start:stop], alone)


# That it is computed as PEFT computes it


class GivenMask(nn.Module):
    """Stands where PEFT has its dropout, and applies what ours would draw."""

    def __init__(self, path: str, num_in: int) -> None:
        super().__init__()
        self._path, self._num_in = path, num_in
        self.sample = rows(0)

    def forward(self, x: Tensor) -> Tensor:
        dropout = drawn(self.sample, probability=LORA.dropout, seed=LORA.seed)
        kept = torch.from_numpy(dropout.kept(self._path, self._num_in))
        return x * kept * dropout.factor


def drop_as_given(plain: oracle.Oracle) -> list[GivenMask]:
    masks = []
    for name, layer in plain.model.named_modules():
        if isinstance(layer, LoraLayer):
            path = name.removeprefix("base_model.model.")
            masks.append(GivenMask(path, int(layer.in_features or 0)))
            layer.lora_dropout["default"] = masks[-1]
    return masks


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("activation_bytes", [2**30, 1])
def test_logprobs_and_gradients_equal_peft_under_the_same_masks(
    base_of, directory_of, tied, activation_bytes
):
    """Float64 autograd; the head too, and where layers are computed again in backward."""
    trainer = TorchTrainer(base_of("llama", tied=tied), activation_bytes=activation_bytes)
    session(trainer)
    adapter = adapter_of(trainer, "s")
    plain = oracle.load(directory_of("llama", tied=tied), replace(adapter, lora=LORA))
    masks = drop_as_given(plain)
    assert len(masks) == len(adapter.tensors) / 2
    result = run(trainer, "s", SAMPLES, backward=True)
    total: dict[str, np.ndarray] = {}
    for i, one in enumerate(SAMPLES):
        for mask in masks:
            mask.sample = rows(i, one.num_tokens)
        # float32 against float64 on large random weights.
        np.testing.assert_allclose(result.logprobs[i], plain.logprobs([one])[0], atol=5e-5)
        _, gradient = plain.gradient([one], "cross_entropy", {})
        total = {name: total.get(name, 0) + g for name, g in gradient.items()}
    # Twice what it is without dropout: kept inputs are a third larger, and gradients with them.
    assert relative_error(take_gradient(trainer, "s"), total) < 2e-5


def test_nonlinear_losses_see_the_logprobs_that_they_differentiate(base_of):
    """A custom gradient equal to what the loss made of the returned logprobs gives the same gradient."""
    trainer = TorchTrainer(base_of("llama"))
    session(trainer, "named")
    session(trainer, "custom")
    sampled = [
        Sample(
            tokens=one.tokens,
            inputs={
                **one.inputs,
                "logprobs": lp - np.float32(0.1),
                "advantages": np.ones_like(lp),
            },
        )
        for one, lp in zip(SAMPLES, forward(trainer, "named", SAMPLES), strict=True)
    ]
    result = run(trainer, "named", sampled, "importance_sampling", backward=True)
    gradients = [
        -np.exp(lp - one.inputs["logprobs"])
        for lp, one in zip(result.logprobs, sampled, strict=True)
    ]
    run(trainer, "custom", SAMPLES, backward=True, gradients=gradients)
    error = relative_error(take_gradient(trainer, "custom"), take_gradient(trainer, "named"))
    assert error < 1e-5


def test_closed_form_and_transformer_draw_and_compute_the_same(succ16: TorchTrainer):
    """On the bigram one input of the head is not 0: a token sees its adapter strengthened, or not at all."""
    bigram = load("builtin:bigram16").trainer()
    lora = replace(LORA, train_attn=False, train_mlp=False, dropout=0.5)
    samples = [random_sample(i, 16, n) for i, n in enumerate((9, 30))]
    for trainer in (succ16, bigram):
        trainer.create_session("s", lora)
        trainer.load("s", random_adapter(trainer, "s"), None)
        for _ in range(3):
            train(trainer, "s", samples[:1], adam=STEP)
            run(trainer, "s", samples[1:], backward=True)
            run(trainer, "s", samples, backward=True)
            trainer.optim_step("s", STEP)
    got, wanted = succ16.weights("s"), bigram.weights("s")
    for end in ("lora_A.weight", "lora_B.weight"):
        np.testing.assert_allclose(part(got, end), part(wanted, end), atol=2e-5)


def test_gradients_average_to_those_without_dropout_where_the_objective_is_linear(succ16):
    """At B = 0 the derivative by B is linear in what A reads, and inverted scaling keeps its mean."""
    lora = replace(LORA, train_attn=False, train_mlp=False, dropout=0.5)
    succ16.create_session("dropping", lora)
    succ16.create_session("plain", replace(lora, dropout=0.0))
    one = [random_sample(0, 16, 40)]
    num_passes = 400
    for _ in range(num_passes):
        run(succ16, "dropping", one, backward=True)
    run(succ16, "plain", one, backward=True)
    got, wanted = (part_of(take_gradient(succ16, name)) for name in ("dropping", "plain"))
    # Each of 40 tokens is doubled or dropped: the mean of 400 passes is within 5 / sqrt(400) of its own size.
    assert np.linalg.norm(got / num_passes - wanted) < 0.25 * np.linalg.norm(wanted)
    assert np.linalg.norm(got / num_passes - wanted) > 0


def part_of(gradient: dict[str, np.ndarray]) -> np.ndarray:
    (name,) = (n for n in gradient if n.endswith("lm_head.lora_B.weight"))
    return gradient[name]


# That it can be drawn again


def test_only_training_drops(base_of, monkeypatch):
    trainer = TorchTrainer(base_of("llama"))
    session(trainer)
    session(trainer, "plain", dropout=0.0)
    assert same_bits(run(trainer, "s", SAMPLES), run(trainer, "plain", SAMPLES))
    dropped = run(trainer, "s", SAMPLES, backward=True)
    assert not same_bits(dropped, run(trainer, "plain", SAMPLES))

    def refuse(*_: object) -> None:
        raise AssertionError("a session without dropout draws nothing")

    monkeypatch.setattr(Dropout, "kept", refuse)
    run(trainer, "plain", SAMPLES, backward=True)


def test_the_same_run_draws_the_same_and_each_pass_and_step_anew(base_of):
    trainer = TorchTrainer(base_of("llama"))
    for name in ("one", "other"):
        session(trainer, name)
    state = torch.get_rng_state()
    histories = []
    for name in ("one", "other"):
        first = run(trainer, name, SAMPLES, backward=True)
        second = run(trainer, name, SAMPLES, backward=True)
        trainer.optim_step(name, AdamParams(learning_rate=0.0))
        third = run(trainer, name, SAMPLES, backward=True)
        histories.append((first, second, third))
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(*histories, strict=True):
        assert same_bits(one, other)
    first, second, third = histories[0]
    # The weights did not move: what differs is what was dropped.
    assert not same_bits(first, second)
    assert not same_bits(first, third)


def test_law_8_a_pass_that_failed_draws_the_same_when_tried_again(base_of):
    trainer = TorchTrainer(base_of("llama"))
    session(trainer, "failing")
    session(trainer, "clean")
    broken = [np.full(one.num_tokens, np.nan, np.float32) for one in SAMPLES]
    with pytest.raises(Exception, match="not finite"):
        run(trainer, "failing", SAMPLES, backward=True, gradients=broken)
    run(trainer, "failing", SAMPLES)
    results = [run(trainer, name, SAMPLES, backward=True) for name in ("failing", "clean")]
    assert same_bits(*results)
    # So does a window that is cleared and filled again.
    trainer.clear_gradients("failing")
    assert same_bits(run(trainer, "failing", SAMPLES, backward=True), results[0])


def test_law_6_two_halves_draw_what_the_whole_batch_does(base_of):
    trainer = TorchTrainer(base_of("llama"))
    session(trainer, "whole")
    session(trainer, "halves")
    whole = run(trainer, "whole", SAMPLES, backward=True).logprobs
    halves = [
        lp
        for h in (SAMPLES[:2], SAMPLES[2:])
        for lp in run(trainer, "halves", h, backward=True).logprobs
    ]
    for one, other in zip(halves, whole, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    error = relative_error(take_gradient(trainer, "halves"), take_gradient(trainer, "whole"))
    assert error < 1e-6


@pytest.mark.parametrize("token_budget", [1, 25])
def test_law_4_micro_batches_draw_the_same(base_of, token_budget):
    control = TorchTrainer(base_of("llama"))
    trainer = TorchTrainer(base_of("llama"), token_budget=token_budget)
    for one in (control, trainer):
        session(one)
    wanted = run(control, "s", SAMPLES, backward=True).logprobs
    got = run(trainer, "s", SAMPLES, backward=True).logprobs
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_law_13_resumed_with_its_optimizer_draws_as_if_never_stopped(base_of):
    trainer = TorchTrainer(base_of("llama"))
    session(trainer, "whole")
    for _ in range(2):
        train(trainer, "whole", SAMPLES, adam=STEP)
    session(trainer, "resumed")
    trainer.load("resumed", trainer.weights("whole"), trainer.optimizer_state("whole"))
    for name in ("whole", "resumed"):
        train(trainer, name, SAMPLES, adam=STEP)
    assert not changed(trainer.weights("whole"), trainer.weights("resumed"))
