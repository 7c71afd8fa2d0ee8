"""The trainer against plain transformers and PEFT on random models, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backend.trainer.base import AdamParams, Adapter, LoraConfig
from backend.trainer.families import FAMILIES
from backend.trainer.torch_trainer import TorchTrainer
from tests.conformance.data import forward, random_sample, run, sample, train
from tests.trainer import oracle
from tests.trainer.sessions import policy_samples, random_adapter, relative_error, take_gradient
from together_post_training import losses
from together_post_training.samples import Sample

# float32 against float64, through weights that amplify rounding: lps are of size 10.
SAME_LOGPROBS = 5e-5
SAME_GRADIENT = 1e-5
LORA = LoraConfig(rank=3, alpha=6, seed=0)


def batch(*lengths: int, seed: int = 0) -> list[Sample]:
    return [random_sample(100 * seed + i, 128, n) for i, n in enumerate(lengths)]


def close(got, wanted, atol: float) -> None:
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


def trained(trainer: TorchTrainer, session: str = "s", lora: LoraConfig = LORA):
    """A session with random weights, and the plain model under the same adapter."""
    trainer.create_session(session, lora)
    adapter = random_adapter(trainer, session)
    assert isinstance(adapter, Adapter)
    trainer.load(session, adapter, None)
    return adapter


# The base


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_fresh_sessions_equal_the_base_model(base_of, directory_of, model_type):
    """Whatever the rank, on 50 tokens and on short ones, longer than a sliding window of 8 too."""
    trainer = TorchTrainer(base_of(model_type))
    samples = batch(50, 3, 3, 20)
    wanted = oracle.plain_logprobs(directory_of(model_type), samples)
    fresh = []
    for rank in (1, 4, 16):
        trainer.create_session(f"r{rank}", replace(LORA, rank=rank, seed=rank))
        fresh.append(forward(trainer, f"r{rank}", samples))
    close(fresh[0], wanted, SAME_LOGPROBS)
    for other in fresh[1:]:
        close(other, fresh[0], 0)


# Adapters


@pytest.mark.parametrize(
    ("model_type", "tied"), [*((name, False) for name in sorted(FAMILIES)), ("llama", True)]
)
def test_saved_adapter_gives_the_same_logprobs_and_gradient_in_plain_peft(
    base_of, directory_of, model_type, tied
):
    """All targets, the head too, also where it is the embedding; (N,) and (N, K) targets."""
    trainer = TorchTrainer(base_of(model_type, tied=tied))
    plain = oracle.load(directory_of(model_type, tied=tied), trained(trainer))
    samples = [
        *batch(20, 7, 7),
        sample([5, 9], [[1, 2, 3], [4, 4, 9]], weights=[[0.5, -1, 0.25], [0, 0, 1]]),
        random_sample(9, 128, 5, weights=np.array([0, 1, 0.3, 0, -2], np.float32)),
    ]
    result = run(trainer, "s", samples, backward=True)
    close(result.logprobs, plain.logprobs(samples), SAME_LOGPROBS)
    loss, gradient = plain.gradient(samples, "cross_entropy", {})
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    assert relative_error(take_gradient(trainer, "s"), gradient) < SAME_GRADIENT


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro"])
@pytest.mark.parametrize("tied", [False, True])
def test_policy_losses_and_gradients_equal_autograd(base_of, directory_of, loss, tied):
    trainer = TorchTrainer(base_of("llama", tied=tied))
    plain = oracle.load(directory_of("llama", tied=tied), trained(trainer))
    plain_samples = batch(12, 5, 5, 1)
    samples = policy_samples(plain_samples, forward(trainer, "s", plain_samples))
    result = run(trainer, "s", samples, loss, backward=True)
    params = {key: float(value) for key, value in losses.complete_params(loss, {}).items()}
    wanted, gradient = plain.gradient(samples, loss, params)
    # Ratios of up to e^0.5 turn an error in lp of 1e-5 into one of 1e-5 of a term.
    assert result.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    assert relative_error(take_gradient(trainer, "s"), gradient) < 5 * SAME_GRADIENT


def test_custom_gradients_equal_those_of_the_loss_they_come_from(trainer: TorchTrainer):
    trained(trainer, "named")
    trained(trainer, "custom")
    plain_samples = batch(9, 4)
    samples = policy_samples(plain_samples, forward(trainer, "named", plain_samples))
    result = run(trainer, "named", samples, "importance_sampling", backward=True)
    gradients = [
        losses.evaluate("importance_sampling", lp, s.inputs, {}, sample=0).gradient.astype("f4")
        for lp, s in zip(result.logprobs, samples, strict=True)
    ]
    custom = run(trainer, "custom", plain_samples, backward=True, gradients=gradients)
    close(custom.logprobs, result.logprobs, 0)
    assert custom.metrics == {"tokens:sum": 13.0}
    error = relative_error(take_gradient(trainer, "custom"), take_gradient(trainer, "named"))
    assert error < 1e-6


@pytest.mark.parametrize(
    "lora",
    [
        replace(LORA, train_mlp=False, train_unembed=False),
        replace(LORA, train_attn=False, train_unembed=False),
        replace(LORA, train_attn=False, train_mlp=False),
    ],
    ids=["attn", "mlp", "unembed"],
)
def test_part_of_the_modules_trains_like_plain_peft(base_of, directory_of, lora):
    """With the head alone there is nothing to differentiate below it."""
    trainer = TorchTrainer(base_of("llama"))
    plain = oracle.load(directory_of("llama"), trained(trainer, lora=lora))
    samples = batch(10, 6)
    result = run(trainer, "s", samples, backward=True)
    close(result.logprobs, plain.logprobs(samples), SAME_LOGPROBS)
    _, gradient = plain.gradient(samples, "cross_entropy", {})
    assert relative_error(take_gradient(trainer, "s"), gradient) < SAME_GRADIENT


def test_every_b_moves_in_the_first_step_and_every_a_from_the_second_on(trainer: TorchTrainer):
    """While B is 0 the gradient of A is 0. (There is no gradient checkpointing that could lose one.)"""
    trainer.create_session("s", LORA)
    start = trainer.weights("s").tensors
    train(trainer, "s", batch(12), adam=AdamParams(learning_rate=0.1))
    first = trainer.weights("s").tensors
    train(trainer, "s", batch(12), adam=AdamParams(learning_rate=0.1))
    second = trainer.weights("s").tensors
    for name in start:
        if name.endswith("lora_B.weight"):
            assert first[name].any(axis=1).all()
        else:
            assert np.array_equal(first[name], start[name])
            assert not np.array_equal(second[name], start[name])


# Company (law 4)


@pytest.mark.parametrize("token_budget", [1, 40, 4096])
def test_micro_batches_change_nothing(base_of, token_budget):
    """One sample at a time, a few, all at once: the same logprobs, in order, and gradient."""
    samples = batch(3, 30, 12, 12, 7, 1, 12, 50)
    control, trainer = (
        TorchTrainer(base_of("llama")),
        TorchTrainer(base_of("llama"), token_budget=token_budget),
    )
    for one in (control, trainer):
        trained(one)
    wanted = run(control, "s", samples, backward=True)
    got = run(trainer, "s", samples, backward=True)
    close(got.logprobs, wanted.logprobs, 1e-5)
    assert got.metrics == pytest.approx(wanted.metrics, rel=1e-6)
    assert relative_error(take_gradient(trainer, "s"), take_gradient(control, "s")) < 1e-6


def test_logprobs_alone_equal_those_among_shorter_and_longer_ones(trainer: TorchTrainer):
    trained(trainer)
    (one,) = batch(13, seed=1)
    (alone,) = forward(trainer, "s", [one])
    for lengths in ([1, 2, 3, 4, 5, 6, 7], [20, 30, 40, 50, 60, 14, 15]):
        together = forward(trainer, "s", [*batch(*lengths, seed=2), one])
        np.testing.assert_allclose(together[-1], alone, rtol=0, atol=1e-5)


def test_forward_and_backward_return_the_same_bits(trainer: TorchTrainer):
    trained(trainer)
    samples = batch(4, 9, 30, 1, 17, 2, 9, 9)
    close(run(trainer, "s", samples, backward=True).logprobs, forward(trainer, "s", samples), 0)


def test_results_do_not_depend_on_what_ran_before(trainer: TorchTrainer):
    trained(trainer)
    samples = batch(8, 3)
    before = forward(trainer, "s", samples)
    run(trainer, "s", batch(60, 5, seed=3), backward=True)
    close(forward(trainer, "s", samples), before, 0)
