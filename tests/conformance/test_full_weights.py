"""Laws of sessions that train every parameter, for every trainer and the generator beside it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from backend.trainer.base import AdamParams, FullConfig, FullWeights
from tests.conformance.bench import Bench
from tests.conformance.data import call, changed, forward, random_sample, run, sample, train
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.samples import Sample

ADAM = AdamParams(learning_rate=0.02)
# In nats: little beside the curvature, much beside float32's rounding.
_RISE = 0.02


@pytest.fixture
def full(bench: Bench) -> Iterator[str]:
    """A fresh session of full weights, the engine's only one."""
    session = bench.name("full")
    bench.trainer.create_session(session, FullConfig())
    yield session
    bench.trainer.delete_session(session)


def data(bench: Bench, seed: int = 0) -> list[Sample]:
    vocab_size = bench.trainer.model.limits.vocab_size
    return [random_sample(seed * 10 + i, vocab_size, n) for i, n in enumerate((12, 5, 20))]


def test_law_10_full_weights_start_as_the_base(bench: Bench, full: str):
    for ours, base in zip(
        forward(bench.trainer, full, data(bench)),
        forward(bench.trainer, bench.session(), data(bench)),
        strict=True,
    ):
        # What crosses the seam is float32, and one of the numpy models is not.
        np.testing.assert_allclose(ours, base, atol=bench.tolerance)


def test_full_weights_learn(bench: Bench, full: str):
    before = sum(lp.sum() for lp in forward(bench.trainer, full, data(bench)))
    weights = bench.trainer.weights(full)
    assert isinstance(weights, FullWeights)
    for _ in range(3):
        train(bench.trainer, full, data(bench), adam=ADAM)
    assert changed(weights, bench.trainer.weights(full))
    assert sum(lp.sum() for lp in forward(bench.trainer, full, data(bench))) > before


def test_gradient_of_full_weights_is_the_slope_of_the_loss(bench: Bench, full: str):
    """The derivative along the gradient itself, from a step that moves every weight by -size * gradient."""
    samples = data(bench)

    def total() -> float:
        return sum(float(lp.sum(dtype=np.float64)) for lp in forward(bench.trainer, full, samples))

    before = total()
    norm = train(bench.trainer, full, samples, adam=AdamParams(learning_rate=0.0))
    size = _RISE / norm["unclipped_grad_l2:mean"] ** 2
    bench.trainer.load(full, bench.trainer.weights(full), None)
    # An eps far above any gradient turns AdamW's first step into -(lr / eps) * gradient.
    train(bench.trainer, full, samples, adam=AdamParams(learning_rate=size * 1e8, eps=1e8))
    # The loss is minus the sum. What is of second order, and float32's rounding, are below a tenth.
    assert total() - before == pytest.approx(_RISE, rel=0.1)


def test_law_9_an_adapter_beside_full_weights_trains_as_if_alone(bench: Bench, full: str):
    alone, beside = bench.session(seed=5), bench.session(seed=5)
    for step in range(2):
        train(bench.trainer, alone, data(bench, step), adam=ADAM)
    for step in range(2):
        train(bench.trainer, full, data(bench, step + 5), adam=ADAM)
        train(bench.trainer, beside, data(bench, step), adam=ADAM)
    assert not changed(bench.trainer.weights(alone), bench.trainer.weights(beside))


def test_law_13_full_weights_resume_bit_for_bit(bench: Bench, full: str):
    train(bench.trainer, full, data(bench), adam=ADAM)
    weights, optimizer = bench.trainer.weights(full), bench.trainer.optimizer_state(full)
    train(bench.trainer, full, data(bench, 1), adam=ADAM)
    wanted = bench.trainer.weights(full)
    train(bench.trainer, full, data(bench, 2), adam=ADAM)
    bench.trainer.load(full, weights, optimizer)
    train(bench.trainer, full, data(bench, 1), adam=ADAM)
    assert not changed(wanted, bench.trainer.weights(full))


def test_second_session_of_full_weights_is_refused_by_name(bench: Bench, full: str):
    with pytest.raises(PostTrainingError) as caught:
        bench.trainer.create_session(bench.name("full"), FullConfig())
    assert caught.value.reason == Reason.RESOURCE_EXHAUSTED
    assert full in caught.value.message


def test_adapters_and_full_weights_are_not_loaded_into_each_other(bench: Bench, full: str):
    lora = bench.session()
    for session, other in ((full, lora), (lora, full)):
        with pytest.raises(PostTrainingError) as caught:
            bench.trainer.load(session, bench.trainer.weights(other), None)
        assert caught.value.reason == Reason.INCOMPATIBLE_CHECKPOINT


def test_failed_pass_of_full_weights_adds_nothing(bench: Bench, full: str):
    samples = data(bench)
    bad = [np.full(s.num_tokens, np.finfo(np.float32).max, np.float32) for s in samples]
    bad[0][0] = np.nan
    with pytest.raises(PostTrainingError) as caught:
        run(bench.trainer, full, samples, gradients=bad, backward=True)
    assert caught.value.reason == Reason.NON_FINITE_LOSS
    assert not bench.trainer.has_gradients(full)


def test_law_15_full_weights_are_sampled_with_the_logprobs_of_forward(bench: Bench, full: str):
    for step in range(3):
        train(bench.trainer, full, data(bench, step), adam=ADAM)
    snapshot = bench.publish(full)
    prompt = [3, 1, 4, 1, 5]
    hot = call(prompt, snapshot=snapshot, num_samples=3, max_tokens=12, temperature=1.5)
    for sequence in bench.sample(hot).sequences:
        whole = prompt + sequence.tokens.tolist()
        (logprobs,) = forward(bench.trainer, full, [sample(whole[:-1], whole[1:])])
        np.testing.assert_allclose(
            sequence.logprobs, logprobs[len(prompt) - 1 :], rtol=0, atol=bench.tolerance
        )
        scoring = call(whole, snapshot=snapshot, max_tokens=0, prompt_logprobs=True)
        scored = bench.sample(scoring).prompt_logprobs
        assert scored is not None
        np.testing.assert_allclose(scored[1:], logprobs, rtol=0, atol=bench.tolerance)
    bench.drop(snapshot)


def test_law_14_snapshots_of_full_weights_stay_beside_base_and_adapters(bench: Bench, full: str):
    names: list[str | None] = [None]
    for step in range(2):
        train(bench.trainer, full, data(bench, step), adam=ADAM)
        names.append(bench.publish(full))
    lora = bench.session()
    train(bench.trainer, lora, data(bench, 9), adam=ADAM)
    names.append(bench.publish(lora))
    calls = [call([3, 1, 4], snapshot=name, max_tokens=8, seed=6) for name in names]
    wanted = [bench.sample(one) for one in calls]
    train(bench.trainer, full, data(bench, 7), adam=ADAM)
    for got, one in zip(bench.sample_all(calls), wanted, strict=True):
        assert not isinstance(got, BaseException)
        assert got.sequences[0].tokens.tolist() == one.sequences[0].tokens.tolist()
        np.testing.assert_allclose(
            got.sequences[0].logprobs, one.sequences[0].logprobs, rtol=0, atol=bench.tolerance
        )
    first = [one.sequences[0].logprobs[0] for one in wanted]
    assert len({round(float(lp), 4) for lp in first}) == len(first), "they are different models"
    for name in names[1:]:
        assert name is not None
        bench.drop(name)


def test_snapshot_that_does_not_fit_the_model_is_refused_by_name(bench: Bench, full: str):
    weights = bench.trainer.weights(full)
    tensors = dict(weights.tensors)
    tensors["lm_head.extra"] = np.zeros(3, np.float32)
    with pytest.raises(PostTrainingError) as caught:
        bench.add(bench.name("bad"), FullWeights(tensors=tensors))
    assert caught.value.reason == Reason.INCOMPATIBLE_CHECKPOINT
    assert "lm_head.extra" in caught.value.message
