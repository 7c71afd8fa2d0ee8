"""Trainers on the closed-form bigram: numbers worked out by hand.

Tolerance 1e-4 on logprobs and sums of a few of them: a transformer with this model's weights ends in
RMSNorm with an epsilon of 1e-6, which alone moves a hit by 7e-6.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backend.trainer.base import AdamParams
from backend.trainer.bigram import load
from tests.conformance.bench import Bench, head_lora
from tests.conformance.data import (
    HIT,
    LINEAR,
    MISS,
    always,
    assert_same_adapter,
    changed,
    forward,
    part,
    random_sample,
    run,
    sample,
    train,
)
from together_post_training.errors import PostTrainingError, Reason

TOL = 1e-4
TOKENS, TARGETS = [3, 4, 5, 9], [4, 5, 9, 10]
LOGPROBS = np.array([HIT, HIT, MISS, HIT])
RATIOS = np.array([1.5, 1.5, 0.5, 0.5])
ADVANTAGES = [2.0, -1.0, 0.5, -3.0]


SAMPLING = LOGPROBS - np.log(RATIOS)


def policy_sample(logprobs: np.ndarray = SAMPLING, advantages=ADVANTAGES, **more):
    return sample(TOKENS, TARGETS, logprobs=logprobs.tolist(), advantages=advantages, **more)


def loss_of(bench: Bench, samples, loss="cross_entropy", **params) -> float:
    return run(bench.trainer, bench.session(), samples, loss, params=params).metrics["loss:sum"]


# Alignment


@pytest.mark.parametrize(
    ("weights", "loss"), [([1, 1, 1], 4.728214), ([0, 0, 1], 4.242738), ([1, 0, 0], 0.242738)]
)
def test_forward_scores_the_target_at_the_same_index(succ16: Bench, weights, loss):
    result = run(succ16.trainer, succ16.session(), [sample([3, 4, 5], [4, 5, 9], weights=weights)])
    np.testing.assert_allclose(result.logprobs[0], [HIT, HIT, MISS], atol=TOL)
    assert result.metrics["loss:sum"] == pytest.approx(loss, abs=TOL)


def test_loss_is_the_sum_over_tokens_and_samples(succ16: Bench):
    batch = [
        sample([3, 4], [4, 5]),
        sample([3, 4, 5, 9, 10, 11], [4, 5, 9, 10, 11, 12]),
    ]
    assert loss_of(succ16, batch) == pytest.approx(5.941904, abs=TOL)


@pytest.mark.parametrize(
    ("loss", "params", "expected"),
    [
        ("importance_sampling", {}, -0.25),
        ("ppo", {}, 1.25),
        ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, 1.405810),
        ("dro", {"beta": 0.05}, 1.668136),
    ],
)
def test_policy_losses_of_known_ratios(succ16: Bench, loss, params, expected):
    """The current logprobs are known, so the ratios are fixed by what is sent as sampling logprobs."""
    assert loss_of(succ16, [policy_sample()], loss, **params) == pytest.approx(expected, abs=TOL)


@pytest.mark.parametrize(("sampling", "expected"), [(-200.0, 0.291286), (HIT, 0.242738)])
def test_cispo_clips_before_the_ratio_overflows_and_detaches_it(succ16: Bench, sampling, expected):
    bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    one = sample([3], [4], logprobs=[sampling], advantages=[1.0])
    assert loss_of(succ16, [one], "cispo", **bounds) == pytest.approx(expected, abs=TOL)


def test_dro_keeps_its_penalty_where_the_advantage_is_zero(succ16: Bench):
    one = policy_sample(np.zeros(4), [0.0] * 4)
    assert loss_of(succ16, [one], "dro", beta=0.05) == pytest.approx(0.454440, abs=TOL)


def test_weights_mask_policy_losses(succ16: Bench):
    """Weights multiply the per-token loss: half of the second token, nothing of the others."""
    one = policy_sample(np.zeros(4), [0.0] * 4, weights=[0.0, 0.5, 0.0, 0.0])
    expected = 0.5 * 0.025 * HIT**2
    assert loss_of(succ16, [one], "dro", beta=0.05) == pytest.approx(expected, abs=1e-6)


def test_forward_gives_the_loss_and_leaves_no_gradient(succ16: Bench):
    session = succ16.session()
    result = run(succ16.trainer, session, [sample(TOKENS, TARGETS)])
    assert result.metrics["loss:sum"] == pytest.approx(4.970952, abs=TOL)
    result = run(succ16.trainer, session, [policy_sample()], "ppo")
    assert result.metrics["loss:sum"] == pytest.approx(1.25, abs=TOL)
    assert not succ16.trainer.has_gradients(session)


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"])
def test_every_loss_returns_the_logprobs_of_its_targets(succ16: Bench, loss):
    one = sample(TOKENS, TARGETS) if loss == "cross_entropy" else policy_sample()
    result = run(succ16.trainer, succ16.session(), [one], loss, backward=True)
    assert result.logprobs[0].dtype == np.float32
    np.testing.assert_allclose(result.logprobs[0], LOGPROBS, atol=TOL)
    assert all(name.count(":") == 1 for name in result.metrics)


def test_outputs_come_in_order_each_of_its_own_length(succ16: Bench):
    h, m = HIT, MISS
    batch = [
        sample([3, 4, 5, 6, 7], [4, 5, 6, 7, 9]),
        sample([2], [9]),
        sample([9, 10, 11, 12], [10, 1, 12, 13]),
        sample([0, 1], [1, 2]),
        sample([14, 15, 0], [3, 0, 1]),
    ]
    expected = [[h, h, h, h, m], [m], [h, m, h, h], [h, h], [m, h, h]]
    result = run(succ16.trainer, succ16.session(), batch)
    assert [len(logprobs) for logprobs in result.logprobs] == [5, 1, 4, 2, 3]
    for got, wanted in zip(result.logprobs, expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=TOL)
    assert result.metrics["loss:sum"] == pytest.approx(19.641070, abs=TOL)
    assert result.metrics["tokens:sum"] == 15


def test_neighbours_in_a_batch_do_not_shift_labels(succ16: Bench):
    first = forward(succ16.trainer, succ16.session(), [sample([3], [9]), sample([9], [10])])
    np.testing.assert_allclose(np.concatenate(first), [MISS, HIT], atol=TOL)
    second = forward(succ16.trainer, succ16.session(), [sample([3, 4], [4, 9]), sample([0], [1])])
    np.testing.assert_allclose(np.concatenate(second), [HIT, MISS, HIT], atol=TOL)


def test_integer_advantages_and_weights_count_as_floats(succ16: Bench):
    one = policy_sample(LOGPROBS, np.array([1, 0, -1, 2], np.int64))
    assert loss_of(succ16, [one], "importance_sampling") == pytest.approx(-2.0, abs=TOL)
    one = sample(TOKENS, TARGETS, weights=np.array([0, 1, 1, 0], np.int64))
    assert loss_of(succ16, [one]) == pytest.approx(4.485476, abs=TOL)


def test_a_very_unlikely_target_has_a_finite_logprob(succ16: Bench):
    """LG-06."""
    session = succ16.session(rank=4, alpha=16)
    succ16.trainer.load(session, always(succ16.trainer, session, token=2, delta=-1e5), None)
    result = run(succ16.trainer, session, [sample([3], [2])])
    assert result.logprobs[0][0] == pytest.approx(-1e5, rel=1e-3)
    masked = run(succ16.trainer, session, [sample([3], [2], weights=[0.0])])
    assert masked.metrics["loss:sum"] == 0.0


# The adapter


@pytest.mark.parametrize(
    ("delta", "expected"), [(2.0, -2.330565), (0.5, -3.752016), (1.0, -3.267127)]
)
@pytest.mark.parametrize(("rank", "alpha"), [(4, 16.0), (1, 32.0), (8, 8.0)])
def test_adapter_is_scaled_by_alpha_over_rank(succ16: Bench, delta, expected, rank, alpha):
    session = succ16.session(rank=rank, alpha=alpha)
    succ16.trainer.load(session, always(succ16.trainer, session, token=9, delta=delta), None)
    (logprobs,) = forward(succ16.trainer, session, [sample([3], [9])])
    assert logprobs[0] == pytest.approx(expected, abs=TOL)


def test_training_follows_the_closed_form(succ16: Bench):
    """Several windows with every loss: tensors as the numpy bigram has them after the same work."""
    oracle = load("builtin:bigram16").trainer()
    session = succ16.session(rank=4, alpha=8)
    oracle.create_session("o", head_lora(rank=4, alpha=8))
    oracle.load("o", succ16.trainer.weights(session), None)
    # With a tiny eps AdamW would blow rounding in gradients near 0 up to whole steps.
    adam = AdamParams(learning_rate=0.02, eps=1e-3, weight_decay=0.1, grad_clip_norm=3.0)
    windows = [
        ("cross_entropy", [sample(TOKENS, TARGETS, weights=[1.0, 0.3, -0.5, 2.0])]),
        ("importance_sampling", [policy_sample()]),
        ("ppo", [policy_sample(), policy_sample(LOGPROBS + 0.1)]),
        ("cispo", [policy_sample()]),
        ("dro", [policy_sample()]),
        ("cross_entropy", [sample([3, 4], [[4, 9], [5, 1]], weights=[[0.9, 0.1], [0.5, 0.25]])]),
    ]
    for loss, batch in windows:
        for trainer, name in ((succ16.trainer, session), (oracle, "o")):
            run(trainer, name, batch, loss, backward=True)
            run(trainer, name, [random_sample(5, 16, 9)], backward=True)
        metrics = [
            succ16.trainer.optim_step(session, adam),
            oracle.optim_step("o", adam),
        ]
        norms = [m["unclipped_grad_l2:mean"] for m in metrics]
        # RMSNorm's epsilon and float32: 1e-4 of the norm, of weights that moved by 0.02 a step.
        assert norms[0] == pytest.approx(norms[1], rel=2e-4)
    assert_same_adapter(succ16.trainer.weights(session), oracle.weights("o"), atol=1e-4)


# Steps


def test_all_zero_weights_add_nothing(succ16: Bench):
    zero = sample([3, 4, 5], [4, 5, 9], weights=[0.0, 0.0, 0.0])
    normal = sample(TOKENS, TARGETS)
    session = succ16.session()
    before = succ16.trainer.weights(session)
    assert run(succ16.trainer, session, [zero], backward=True).metrics["loss:sum"] == 0.0
    succ16.trainer.optim_step(session, AdamParams(learning_rate=0.1))
    assert not changed(before, succ16.trainer.weights(session))
    both, alone = succ16.session(), succ16.session()
    train(succ16.trainer, both, [zero, normal], adam=LINEAR)
    train(succ16.trainer, alone, [normal], adam=LINEAR)
    assert_same_adapter(succ16.trainer.weights(both), succ16.trainer.weights(alone), atol=1e-6)


def test_optim_step_obeys_the_learning_rate_of_its_call(succ16: Bench):
    session = succ16.session()
    first = succ16.trainer.weights(session)
    train(succ16.trainer, session, [sample(TOKENS, TARGETS)], adam=AdamParams(learning_rate=0.0))
    assert not changed(first, succ16.trainer.weights(session))
    train(succ16.trainer, session, [sample(TOKENS, TARGETS)], adam=AdamParams(learning_rate=0.01))
    second = succ16.trainer.weights(session)
    # The same gradient twice: each step is exactly lr for every element that has a gradient.
    moves = np.abs(part(second, "lora_B.weight") - part(first, "lora_B.weight"))
    np.testing.assert_allclose(moves, 0.01, rtol=1e-4)
    # A's gradient is 0 while B is 0.
    assert np.array_equal(part(second, "lora_A.weight"), part(first, "lora_A.weight"))
    train(succ16.trainer, session, [sample(TOKENS, TARGETS)], adam=AdamParams(learning_rate=0.01))
    third = succ16.trainer.weights(session)
    assert not np.array_equal(part(third, "lora_A.weight"), part(first, "lora_A.weight"))


def test_optim_step_obeys_beta1_of_its_call(succ16: Bench):
    """With beta1 = 0 the direction is that of the current gradient alone."""
    session = succ16.session()
    train(succ16.trainer, session, [sample([3], [9])], adam=AdamParams(learning_rate=1e-4))
    start = succ16.trainer.weights(session)
    adam = AdamParams(learning_rate=0.01, beta1=0.0)
    train(succ16.trainer, session, [sample([3], [9], weights=[-0.01])], adam=adam)
    after = succ16.trainer.weights(session)
    moved = part(after, "lora_B.weight")[9] - part(start, "lora_B.weight")[9]
    # A negative weight makes token 9 less likely: row 9 moves against A @ h.
    assert np.array_equal(np.sign(moved), -np.sign(part(start, "lora_A.weight")[:, 3]))


def test_weight_decay_is_decoupled(succ16: Bench):
    session = succ16.session()
    before = part(succ16.trainer.weights(session), "lora_A.weight")
    adam = AdamParams(learning_rate=0.5, weight_decay=0.1)
    train(succ16.trainer, session, [sample(TOKENS, TARGETS)], adam=adam)
    after = part(succ16.trainer.weights(session), "lora_A.weight")
    np.testing.assert_allclose(after, before * 0.95, rtol=1e-6)


def test_three_passes_one_step_is_one_update(succ16: Bench):
    session, control = succ16.session(), succ16.session()
    batch = [sample([3], [9]), sample([4, 5], [9, 9]), sample([7], [1])]
    for one in batch:
        run(succ16.trainer, session, [one], backward=True)
    succ16.trainer.optim_step(session, LINEAR)
    train(succ16.trainer, control, batch, adam=LINEAR)
    assert not succ16.trainer.has_gradients(session)
    assert succ16.trainer.optimizer_state(session).num_steps == 1
    got, wanted = succ16.trainer.weights(session), succ16.trainer.weights(control)
    assert_same_adapter(got, wanted, atol=1e-6)


def test_clipping_is_global_and_reports_the_norm_before_it(succ16: Bench):
    batch = [sample(TOKENS, TARGETS)]
    free, loose, clipped = succ16.session(), succ16.session(), succ16.session()
    norm = train(succ16.trainer, free, batch, adam=LINEAR)["unclipped_grad_l2:mean"]
    train(succ16.trainer, loose, batch, adam=replace(LINEAR, grad_clip_norm=norm * 1.01))
    half = replace(LINEAR, grad_clip_norm=norm / 2)
    assert train(succ16.trainer, clipped, batch, adam=half)["unclipped_grad_l2:mean"] == norm
    b = [part(succ16.trainer.weights(s), "lora_B.weight") for s in (free, loose, clipped)]
    assert np.array_equal(b[0], b[1])
    # B starts at 0, so its value is the step: half of it, up to the 1e-4 curvature of LINEAR.
    np.testing.assert_allclose(b[2], b[0] / 2, rtol=1e-3)
    assert norm == pytest.approx(np.linalg.norm(b[0]) * 100, rel=1e-3)


def test_weights_only_load_starts_the_optimizer_anew(succ16: Bench):
    session = succ16.session()
    for seed in (1, 2):
        batch = [random_sample(seed, 16, 6)]
        train(succ16.trainer, session, batch, adam=AdamParams(learning_rate=0.05))
    saved = succ16.trainer.weights(session)
    succ16.trainer.load(session, saved, None)
    assert succ16.trainer.optimizer_state(session).num_steps == 0
    train(succ16.trainer, session, [sample(TOKENS, TARGETS)], adam=AdamParams(learning_rate=0.01))
    moves = np.abs(
        part(succ16.trainer.weights(session), "lora_B.weight") - part(saved, "lora_B.weight")
    )
    # A first step moves each element with a gradient by lr; float32 weights near 0.1 round to 1e-8.
    np.testing.assert_allclose(moves, 0.01, rtol=1e-4)


# Failures


@pytest.mark.parametrize("advantage", [1.0, 1e30])
def test_overflowing_ratio_fails_and_the_session_goes_on(succ16: Bench, advantage):
    session, control, other = succ16.session(), succ16.session(), succ16.session()
    before = succ16.trainer.weights(session)
    good = sample([3], [9], logprobs=[MISS], advantages=[1.0])
    bad = sample([3], [4], logprobs=[-200.0], advantages=[advantage])
    with pytest.raises(PostTrainingError) as error:
        run(succ16.trainer, session, [good, bad], "importance_sampling", backward=True)
    assert error.value.reason is Reason.NON_FINITE_LOSS
    assert error.value.metadata["sample"] == "1"
    assert not succ16.trainer.has_gradients(session)
    assert not changed(before, succ16.trainer.weights(session))
    for name in (session, control, other):
        train(succ16.trainer, name, [good], "importance_sampling", adam=LINEAR)
    wanted = succ16.trainer.weights(control)
    assert_same_adapter(succ16.trainer.weights(session), wanted, atol=1e-7)
    assert_same_adapter(succ16.trainer.weights(other), wanted, atol=1e-7)


def test_failed_pass_leaves_the_gradient_of_earlier_ones(succ16: Bench):
    session, control = succ16.session(), succ16.session()
    good = sample([3], [9], logprobs=[MISS], advantages=[1.0])
    bad = sample([3], [4], logprobs=[-200.0], advantages=[1.0])
    run(succ16.trainer, session, [good], "importance_sampling", backward=True)
    with pytest.raises(PostTrainingError):
        run(succ16.trainer, session, [good, bad], "importance_sampling", backward=True)
    succ16.trainer.optim_step(session, LINEAR)
    train(succ16.trainer, control, [good], "importance_sampling", adam=LINEAR)
    got, wanted = succ16.trainer.weights(session), succ16.trainer.weights(control)
    assert_same_adapter(got, wanted, atol=1e-7)


@pytest.mark.parametrize(
    ("weight", "adam"),
    [
        # A gradient of 1e30 is a float32, its square, which AdamW keeps, is not.
        (1e30, AdamParams()),
        (1.0, AdamParams(learning_rate=1e39)),
    ],
)
def test_step_that_overflows_changes_nothing_and_clears_the_gradient(succ16: Bench, weight, adam):
    session = succ16.session()
    train(succ16.trainer, session, [sample([3], [9])], adam=LINEAR)
    before, moments = succ16.trainer.weights(session), succ16.trainer.optimizer_state(session)
    run(succ16.trainer, session, [sample([3], [9], weights=[weight])], backward=True)
    with pytest.raises(PostTrainingError) as error:
        succ16.trainer.optim_step(session, adam)
    assert error.value.reason is Reason.NON_FINITE_LOSS
    assert not succ16.trainer.has_gradients(session)
    assert not changed(before, succ16.trainer.weights(session))
    after = succ16.trainer.optimizer_state(session)
    assert after.num_steps == moments.num_steps == 1
    for name in moments.moments["exp_avg"]:
        assert np.array_equal(after.moments["exp_avg"][name], moments.moments["exp_avg"][name])
        assert np.array_equal(
            after.moments["exp_avg_sq"][name], moments.moments["exp_avg_sq"][name]
        )
