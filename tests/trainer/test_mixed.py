"""How the torch trainer computes passes of several sessions together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from backend.trainer.base import AdamParams, LoraConfig, Pass, PassResult
from backend.trainer.torch_trainer import TorchTrainer
from tests.conformance.data import random_sample, run
from tests.trainer.sessions import policy_samples, random_adapter, relative_error, take_gradient
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.samples import Sample

LORA = LoraConfig(rank=3, alpha=6, seed=0)
CONFIGS = (
    LORA,
    replace(LORA, rank=5, alpha=32, train_mlp=False),
    replace(LORA, rank=2, train_attn=False, train_mlp=False),
    replace(LORA, rank=4, train_unembed=False, dropout=0.3),
)
LENGTHS = ((9, 30, 9), (4,), (12, 1, 20), (9, 16))
NAMES = tuple("abcd")


def sessions(trainer: TorchTrainer) -> None:
    """With random weights."""
    for i, (name, config) in enumerate(zip(NAMES, CONFIGS, strict=True)):
        trainer.create_session(name, config)
        trainer.load(name, random_adapter(trainer, name, seed=i), None)


def samples(i: int) -> list[Sample]:
    return [random_sample(10 * i + k, 128, n) for k, n in enumerate(LENGTHS[i])]


def passes(**options) -> list[Pass]:
    return [
        Pass(session=name, samples=samples(i), backward=True, **options)
        for i, name in enumerate(NAMES)
    ]


def results(outcomes: Sequence[PassResult | PostTrainingError]) -> list[PassResult]:
    assert all(isinstance(outcome, PassResult) for outcome in outcomes), outcomes
    return [outcome for outcome in outcomes if isinstance(outcome, PassResult)]


def count_rows(trainer: TorchTrainer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each row has that goes through the model from now on."""
    seen: list[int] = []
    forward = trainer._packed.forward

    def counted(row, segments, **options):
        seen.append(row.num_tokens)
        return forward(row, segments, **options)

    monkeypatch.setattr(trainer._packed, "forward", counted)
    return seen


def test_passes_go_through_the_model_in_one_row(trainer: TorchTrainer, monkeypatch):
    sessions(trainer)
    rows = count_rows(trainer, monkeypatch)
    results(trainer.run_batch(passes()))
    assert rows == [sum(sum(lengths) for lengths in LENGTHS)]


@pytest.mark.parametrize("token_budget", [1, 40, 4096])
def test_passes_that_span_micro_batches_equal_passes_alone(base_of, token_budget):
    together = TorchTrainer(base_of("llama"), token_budget=token_budget)
    alone = TorchTrainer(base_of("llama"))
    for trainer in (together, alone):
        sessions(trainer)
    for work, result in zip(passes(), results(together.run_batch(passes())), strict=True):
        wanted = alone.run(work)
        for got, lp in zip(result.logprobs, wanted.logprobs, strict=True):
            np.testing.assert_allclose(got, lp, rtol=0, atol=1e-5)
        assert result.metrics == pytest.approx(wanted.metrics, rel=1e-5)
        name = work.session
        # float32 sums in another order.
        assert relative_error(take_gradient(together, name), take_gradient(alone, name)) < 1e-5


def test_linear_and_other_losses_share_a_row(trainer: TorchTrainer, monkeypatch):
    """Those whose derivative is known before any logprob, and those that need them all first."""
    sessions(trainer)
    trainer.create_session("alone", CONFIGS[0])
    trainer.load("alone", trainer.weights("a"), None)
    base = results(trainer.run_batch([replace(work, backward=False) for work in passes()]))
    sampled = policy_samples(samples(0), base[0].logprobs)
    ppo = Pass(session="a", samples=sampled, loss="ppo", backward=True)
    custom = replace(passes()[1], gradients=[np.ones(4, np.float32)])
    rows = count_rows(trainer, monkeypatch)
    mixed = results(trainer.run_batch([ppo, custom, passes()[2]]))
    assert len(rows) == 1
    alone = run(trainer, "alone", sampled, "ppo", backward=True)
    assert mixed[0].metrics == pytest.approx(alone.metrics, rel=1e-4)
    error = relative_error(take_gradient(trainer, "a"), take_gradient(trainer, "alone"))
    assert error < 1e-4  # ratios turn 1e-5 in a logprob into 1e-5 of a term


def test_a_pass_that_has_failed_is_left_out_of_later_rows(base_of, monkeypatch):
    trainer = TorchTrainer(base_of("llama"), token_budget=16)
    sessions(trainer)
    rows = count_rows(trainer, monkeypatch)
    long = [random_sample(i, 128, 12) for i in range(4)]
    gradients = [np.full(12, np.inf, np.float32)] * 4
    bad = Pass(session="a", samples=long, backward=True, gradients=gradients)
    outcomes = trainer.run_batch([bad, passes()[1]])
    assert isinstance(outcomes[0], PostTrainingError)
    assert isinstance(outcomes[1], PassResult)
    assert rows == [12, 4]


def test_weights_that_overflow_in_one_session_leave_its_neighbours_alone(trainer: TorchTrainer):
    """Its hidden states are not finite from the first layer on, and lie in the same row and the same attention."""
    sessions(trainer)
    trainer.create_session("huge", LORA)
    adapter = random_adapter(trainer, "huge")
    huge = {name: (1e30 * t).astype(np.float32) for name, t in adapter.tensors.items()}
    trainer.load("huge", replace(adapter, tensors=huge), None)
    wanted = [trainer.run(work) for work in passes()]
    gradients = [take_gradient(trainer, name) for name in NAMES]
    reset(trainer)
    broken = Pass(session="huge", samples=samples(0), backward=True)
    first, *others = trainer.run_batch([broken, *passes()])
    assert isinstance(first, PostTrainingError)
    assert first.reason is Reason.NON_FINITE_LOSS
    for got, alone in zip(results(others), wanted, strict=True):
        for one, other in zip(got.logprobs, alone.logprobs, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    for name, gradient in zip(NAMES, gradients, strict=True):
        assert relative_error(take_gradient(trainer, name), gradient) < 1e-5


def reset(trainer: TorchTrainer) -> None:
    """Steps of `take_gradient` moved nothing but the number of steps, which dropout draws by."""
    for name in NAMES:
        trainer.load(name, trainer.weights(name), None)


def test_idle_adapters_are_not_looked_at(trainer: TorchTrainer):
    sessions(trainer)
    idle = trainer._slots["d"]
    trainer._slots["d"] = None  # pyright: ignore[reportArgumentType]
    results(trainer.run_batch(passes()[:3]))
    for name in NAMES[:3]:
        trainer.optim_step(name, AdamParams())
    trainer._slots["d"] = idle


def test_two_passes_of_one_session_do_not_run_together(trainer: TorchTrainer):
    """The scheduler keeps them in order: their gradients would meet in one buffer."""
    sessions(trainer)
    with pytest.raises(AssertionError, match="one after the other"):
        trainer.run_batch([passes()[0], passes()[0]])
