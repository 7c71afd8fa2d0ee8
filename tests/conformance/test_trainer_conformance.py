"""Laws that hold between results, for every trainer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from backend.trainer.base import AdamParams, Adapter, LoraConfig
from tests.conformance.bench import Bench, head_lora
from tests.conformance.data import (
    LINEAR,
    adapter_of,
    assert_same_adapter,
    call,
    changed,
    forward,
    part,
    random_sample,
    run,
    sample,
    train,
)
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.samples import Sample

# Weights after a few steps of 0.01 to 0.1: float32 sums in another order end up this close.
SAME_WEIGHTS = 1e-5


def batch(bench: Bench, *lengths: int, seed: int = 0) -> list[Sample]:
    vocab_size = bench.trainer.model.limits.vocab_size
    return [random_sample(1000 * seed + i, vocab_size, n) for i, n in enumerate(lengths)]


def trained_session(bench: Bench, **lora) -> str:
    """A session whose A and B are both away from their start."""
    session = bench.session(**lora)
    for seed in (91, 92):
        one = batch(bench, 12, 7, seed=seed)
        train(bench.trainer, session, one, adam=AdamParams(learning_rate=0.05))
    return session


def assert_close(got, wanted, tolerance: float) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


# Law 2: logprobs[i] is log p(target_tokens[i] | model_input[: i + 1])


def test_logprobs_depend_on_the_past_alone(bench: Bench):
    session = trained_session(bench)
    (whole,) = batch(bench, 10)
    (logprobs,) = forward(bench.trainer, session, [whole])
    for n in (1, 4, 10):
        targets = whole.inputs["target_tokens"][:n]
        prefix = sample(whole.tokens[:n].tolist(), targets.tolist())
        (short,) = forward(bench.trainer, session, [prefix])
        np.testing.assert_allclose(short, logprobs[:n], rtol=0, atol=bench.tolerance)


def test_logprobs_of_all_targets_sum_to_one(bench: Bench):
    """(N, K) targets: every token of the vocabulary at every position."""
    session = trained_session(bench)
    (one,) = batch(bench, 6)
    vocab_size = bench.trainer.model.limits.vocab_size
    everything = [list(range(vocab_size))] * 6
    (logprobs,) = forward(bench.trainer, session, [sample(one.tokens.tolist(), everything)])
    assert logprobs.shape == (6, vocab_size)
    assert logprobs.std() > 0.5  # else every target looks alike and a shift could not be seen
    np.testing.assert_allclose(np.exp(logprobs).sum(axis=1), 1, atol=1e-4)
    (picked,) = forward(bench.trainer, session, [one])
    expected = logprobs[np.arange(6), one.inputs["target_tokens"]]
    np.testing.assert_allclose(picked, expected, rtol=0, atol=bench.tolerance)


def test_logprobs_do_not_depend_on_weights(bench: Bench):
    session = trained_session(bench)
    (one,) = batch(bench, 8)
    (expected,) = forward(bench.trainer, session, [one])
    targets = one.inputs["target_tokens"].tolist()
    for weights in ([0.0] * 8, [0, 0, 1, 0, -2, 0.5, 0, 0]):
        weighted = sample(one.tokens.tolist(), targets, weights=weights)
        result = run(bench.trainer, session, [weighted], backward=True)
        np.testing.assert_allclose(result.logprobs[0], expected, rtol=0, atol=bench.tolerance)


# Law 4: company changes nothing


def test_logprobs_do_not_depend_on_neighbours(bench: Bench):
    """LG-08."""
    session = trained_session(bench)
    samples = batch(bench, 5, 1, 30, 2, 17, 3, 3, 8)
    together = forward(bench.trainer, session, samples)
    alone = [forward(bench.trainer, session, [one])[0] for one in samples]
    backwards = forward(bench.trainer, session, samples[::-1])[::-1]
    assert_close(together, alone, bench.tolerance)
    assert_close(together, backwards, bench.tolerance)


def test_copies_in_one_batch_get_the_same_logprobs(bench: Bench):
    """LG-12."""
    session = trained_session(bench)
    one, *others = batch(bench, 9, 4, 20)
    copies = forward(bench.trainer, session, [one, others[0], one, one, others[1], one])
    assert_close([copies[i] for i in (2, 3, 5)], [copies[0]] * 3, bench.tolerance)


def test_logprobs_are_those_of_forward_whatever_follows(bench: Bench):
    """LG-11: a pass that computes gradients, of any loss, and one that does not."""
    session = trained_session(bench)
    samples = batch(bench, 5, 1, 30, 8)
    scored = forward(bench.trainer, session, samples)
    assert_close(run(bench.trainer, session, samples, backward=True).logprobs, scored, 1e-6)
    policy = [
        sample(
            one.tokens.tolist(),
            one.inputs["target_tokens"].tolist(),
            logprobs=logprobs,
            advantages=np.ones(len(logprobs), np.float32),
        )
        for one, logprobs in zip(samples, scored, strict=True)
    ]
    again = run(bench.trainer, session, policy, "ppo", backward=True)
    assert_close(again.logprobs, scored, 1e-6)


def test_same_batch_alone_gives_the_same_bits(bench: Bench):
    samples = batch(bench, 5, 1, 12)
    adapters, logprobs = [], []
    for _ in range(2):
        session = bench.session()
        for _ in range(2):
            train(bench.trainer, session, samples, adam=AdamParams(learning_rate=0.01))
        adapters.append(bench.trainer.weights(session))
        logprobs.append(np.concatenate(forward(bench.trainer, session, samples)))
    assert not changed(*adapters)
    assert np.array_equal(*logprobs)


# Law 6: losses are sums, steps consume the window


def test_two_half_batches_are_one_batch(bench: Bench):
    """A and B both have gradients here, and the halves are of unequal length."""
    first = trained_session(bench)
    second = trained_session(bench)
    samples = batch(bench, 3, 11, 6, 2)
    result = run(bench.trainer, first, samples, backward=True)
    halves = [
        run(bench.trainer, second, half, backward=True) for half in (samples[:1], samples[1:])
    ]
    sums = [half.metrics["loss:sum"] for half in halves]
    assert sum(sums) == pytest.approx(result.metrics["loss:sum"], rel=1e-5)
    before = bench.trainer.weights(first)
    for session in (first, second):
        bench.trainer.optim_step(session, LINEAR)
        assert not bench.trainer.has_gradients(session)
    got, wanted = bench.trainer.weights(first), bench.trainer.weights(second)
    assert changed(before, got) == set(got.tensors)
    assert_same_adapter(got, wanted, atol=SAME_WEIGHTS)


def test_gradient_is_the_slope_of_the_loss(bench: Bench):
    """The loss after a small move along the gradient, against the gradient's own prediction.

    Catches every factor: means, alpha / rank, batch and token counts.
    """
    session = trained_session(bench)
    targets = batch(bench, 7, 4)
    samples = [
        sample(s.tokens.tolist(), s.inputs["target_tokens"].tolist(), weights=w)
        for s, w in zip(targets, ([1, 0.5, 0, -0.25, 1, 2, 1], [1, 0, 3, 0.1]), strict=True)
    ]
    start = bench.trainer.weights(session)
    bench.trainer.load(session, start, None)  # else old moments would steer the step below
    train(bench.trainer, session, samples, adam=LINEAR)
    moved = bench.trainer.weights(session)
    gradient = {n: -100 * (moved.tensors[n] - t) for n, t in start.tensors.items()}
    squared_norm = sum(float(np.square(g).sum()) for g in gradient.values())
    size = 0.1 / squared_norm  # the loss changes by about 0.1 each way

    def loss_at(step: float) -> float:
        tensors = {n: t + np.float32(step) * gradient[n] for n, t in start.tensors.items()}
        bench.trainer.load(session, replace(start, tensors=tensors), None)
        return run(bench.trainer, session, samples).metrics["loss:sum"]

    slope = (loss_at(size) - loss_at(-size)) / (2 * size)
    # A central difference of 0.2 in losses near 50, sums of float32 logprobs: known to about 1e-4.
    assert slope == pytest.approx(squared_norm, rel=5e-3)


def test_forward_and_failed_passes_leave_no_gradient(bench: Bench):
    session = bench.session()
    (one,) = batch(bench, 4)
    run(bench.trainer, session, [one])
    assert not bench.trainer.has_gradients(session)
    overflowing = sample([3], [4], logprobs=[-500.0], advantages=[1.0])
    with pytest.raises(PostTrainingError) as error:
        run(bench.trainer, session, [overflowing], "importance_sampling", backward=True)
    assert error.value.reason is Reason.NON_FINITE_LOSS
    assert not bench.trainer.has_gradients(session)


def test_cleared_gradients_do_not_come_back(bench: Bench):
    session, control = bench.session(), bench.session()
    first, second = batch(bench, 6, 5)
    run(bench.trainer, session, [first], backward=True)
    assert bench.trainer.has_gradients(session)
    bench.trainer.clear_gradients(session)
    assert not bench.trainer.has_gradients(session)
    for name in (session, control):
        train(bench.trainer, name, [second], adam=LINEAR)
    got, wanted = bench.trainer.weights(session), bench.trainer.weights(control)
    assert_same_adapter(got, wanted, atol=1e-7)


def test_custom_gradients_enter_where_losses_do(bench: Bench):
    """-weights as the gradient is cross_entropy; a `weights` input never gates it."""
    custom, control = trained_session(bench), trained_session(bench)
    (one,) = batch(bench, 5)
    targets = one.inputs["target_tokens"].tolist()
    weights = np.array([1, -0.5, 0, 2, 0.25], np.float32)
    masked = sample(one.tokens.tolist(), targets, weights=[0.0] * 5)
    result = run(bench.trainer, custom, [masked], backward=True, gradients=[-weights])
    assert result.metrics["tokens:sum"] == 5
    weighted = sample(one.tokens.tolist(), targets, weights=weights)
    run(bench.trainer, control, [weighted], backward=True)
    for session in (custom, control):
        bench.trainer.optim_step(session, LINEAR)
    got, wanted = bench.trainer.weights(custom), bench.trainer.weights(control)
    assert_same_adapter(got, wanted, atol=1e-6)


def test_two_dimensional_targets_are_a_sum_over_both_axes(bench: Bench):
    wide, control = trained_session(bench), trained_session(bench)
    tokens = [3, 8, 1]
    pairs = [[4, 5], [9, 9], [2, 0]]
    weights = np.array([[0.75, 0.25], [1.0, -1.0], [0.0, 0.5]], np.float32)
    run(bench.trainer, wide, [sample(tokens, pairs, weights=weights)], backward=True)
    columns = [
        sample(tokens, [pair[k] for pair in pairs], weights=weights[:, k].copy()) for k in (0, 1)
    ]
    run(bench.trainer, control, columns, backward=True)
    for session in (wide, control):
        bench.trainer.optim_step(session, LINEAR)
    got, wanted = bench.trainer.weights(wide), bench.trainer.weights(control)
    assert_same_adapter(got, wanted, atol=SAME_WEIGHTS)


# Law 9: sessions are islands


def test_an_idle_session_does_not_move(bench: Bench):
    idle, busy = trained_session(bench), bench.session(rank=8)
    weights, moments = bench.trainer.weights(idle), bench.trainer.optimizer_state(idle)
    samples = batch(bench, 6, 3)
    expected = forward(bench.trainer, idle, samples)
    for _ in range(3):
        train(bench.trainer, busy, samples, adam=AdamParams(learning_rate=0.1, weight_decay=0.1))
    assert not changed(weights, bench.trainer.weights(idle))
    after = bench.trainer.optimizer_state(idle)
    assert after.num_steps == moments.num_steps
    for name in moments.moments["exp_avg"]:
        assert np.array_equal(after.moments["exp_avg"][name], moments.moments["exp_avg"][name])
        assert np.array_equal(
            after.moments["exp_avg_sq"][name], moments.moments["exp_avg_sq"][name]
        )
    assert_close(forward(bench.trainer, idle, samples), expected, 0)


def test_interleaved_training_equals_training_alone(bench: Bench):
    """Other ranks, other data; the second session's gradient survives the first one's step."""
    trainer = bench.trainer
    adam = AdamParams(learning_rate=0.05)
    mine, theirs = batch(bench, 6, 3, seed=1), batch(bench, 4, 9, seed=2)
    a, b = bench.session(rank=4, seed=1), bench.session(rank=8, seed=2)
    for _ in range(2):
        run(trainer, a, mine, backward=True)
        run(trainer, b, theirs, backward=True)
        trainer.optim_step(a, adam)
        run(trainer, b, mine, backward=True)
        trainer.optim_step(b, adam)
    solo_a, solo_b = bench.session(rank=4, seed=1), bench.session(rank=8, seed=2)
    for _ in range(2):
        train(trainer, solo_a, mine, adam=adam)
    for _ in range(2):
        run(trainer, solo_b, theirs, backward=True)
        train(trainer, solo_b, mine, adam=adam)
    assert_same_adapter(trainer.weights(a), trainer.weights(solo_a), atol=SAME_WEIGHTS)
    assert_same_adapter(trainer.weights(b), trainer.weights(solo_b), atol=SAME_WEIGHTS)


def test_creating_and_deleting_sessions_disturbs_no_other(bench: Bench):
    trainer = bench.trainer
    samples = batch(bench, 5, 2)
    session, control = bench.session(), bench.session()
    run(trainer, session, samples, backward=True)
    other, loaded = bench.session(rank=2), bench.session()
    trainer.load(loaded, trainer.weights(control), None)
    trainer.delete_session(loaded)
    trainer.delete_session(other)
    trainer.optim_step(session, AdamParams(learning_rate=0.1))
    before = trainer.weights(control)
    train(trainer, control, samples, adam=AdamParams(learning_rate=0.1))
    assert changed(before, trainer.weights(control))
    got, wanted = trainer.weights(session), trainer.weights(control)
    assert_same_adapter(got, wanted, atol=SAME_WEIGHTS)


def test_a_deleted_session_leaks_nothing_into_a_new_one(bench: Bench):
    trainer = bench.trainer
    session, control = trained_session(bench, seed=3), bench.session(seed=3)
    run(trainer, session, batch(bench, 4), backward=True)
    trainer.delete_session(session)
    trainer.create_session(session, adapter_of(trainer, control).lora)
    assert not trainer.has_gradients(session)
    assert trainer.optimizer_state(session).num_steps == 0
    fresh = trainer.weights(session)
    assert not changed(fresh, trainer.weights(control))
    assert np.linalg.norm(part(fresh, "lora_A.weight")) > 0
    for _ in range(2):
        train(trainer, session, batch(bench, 6), adam=AdamParams(learning_rate=0.1))
    assert changed(fresh, trainer.weights(session)) == set(fresh.tensors)


def test_what_is_handed_out_does_not_follow_training(bench: Bench):
    session = trained_session(bench)
    adapter, moments = bench.trainer.weights(session), bench.trainer.optimizer_state(session)
    handed_out = [
        *adapter.tensors.values(),
        *moments.moments["exp_avg"].values(),
        *moments.moments["exp_avg_sq"].values(),
    ]
    assert all(tensor.dtype == np.float32 for tensor in handed_out)
    kept = [tensor.copy() for tensor in handed_out]
    train(bench.trainer, session, batch(bench, 5), adam=AdamParams(learning_rate=0.1))
    bench.trainer.load(session, bench.trainer.weights(bench.session()), None)
    assert all(np.array_equal(a, b) for a, b in zip(handed_out, kept, strict=True))


# Law 10: the start


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_a_fresh_adapter_is_the_base_model(bench: Bench, rank):
    """The same logprobs whatever the rank, the seed and the modules."""
    everything = bench.name("session")
    samples = batch(bench, 20)
    bench.trainer.create_session(everything, LoraConfig(rank=rank, alpha=32, seed=rank))
    expected = forward(bench.trainer, bench.session(rank=2, seed=9), samples)
    assert_close(forward(bench.trainer, everything, samples), expected, bench.tolerance)
    tensors = bench.trainer.weights(everything).tensors
    assert all(not t.any() for n, t in tensors.items() if n.endswith("lora_B.weight"))
    assert all(t.any() for n, t in tensors.items() if n.endswith("lora_A.weight"))


def test_a_seed_fixes_the_adapter_whatever_happened_before(bench: Bench):
    lora = LoraConfig(rank=4, alpha=8, seed=0)
    first, between, second = (bench.name("session") for _ in range(3))
    bench.trainer.create_session(first, lora)
    bench.trainer.create_session(between, replace(lora, seed=1))
    bench.trainer.create_session(second, lora)
    fresh = bench.trainer.weights(first)
    assert not changed(fresh, bench.trainer.weights(second))
    a_names = {name for name in fresh.tensors if name.endswith("lora_A.weight")}
    assert changed(fresh, bench.trainer.weights(between)) == a_names
    a_bytes = [fresh.tensors[name].tobytes() for name in a_names]
    assert len(set(a_bytes)) == len(a_bytes), "two layers share their A"


def test_global_random_streams_are_left_alone(bench: Bench):
    """Neither drawn from nor seeded: a script's own draws do not depend on the engine."""
    numpy_state, torch_state = np.random.get_state(), torch.random.get_rng_state()
    session = bench.session(seed=8)
    train(bench.trainer, session, batch(bench, 4), adam=AdamParams())
    bench.sample(call([1, 2], snapshot=bench.publish(session), max_tokens=3))
    np.testing.assert_equal(np.random.get_state(), numpy_state)
    assert torch.equal(torch.random.get_rng_state(), torch_state)


@pytest.mark.parametrize("seed", [-1, 2**40, 2**63 - 1])
def test_any_integer_is_a_seed(bench: Bench, seed):
    session = bench.session(seed=seed)
    assert changed(bench.trainer.weights(session), bench.trainer.weights(bench.session()))


# Law 13: resuming


def test_resumed_with_its_optimizer_is_never_stopped(bench: Bench):
    trainer = bench.trainer
    samples = batch(bench, 6, 4)
    session, resumed = trained_session(bench), bench.session()
    trainer.load(resumed, trainer.weights(session), trainer.optimizer_state(session))
    assert trainer.optimizer_state(resumed).num_steps == 2
    for name in (session, resumed):
        train(trainer, name, samples, adam=AdamParams(learning_rate=0.05, weight_decay=0.01))
    assert not changed(trainer.weights(session), trainer.weights(resumed))


def test_load_clears_gradients_and_moments(bench: Bench):
    trainer = bench.trainer
    session, control = trained_session(bench), bench.session(seed=5)
    run(trainer, session, batch(bench, 5), backward=True)
    trainer.load(session, trainer.weights(control), None)
    assert not trainer.has_gradients(session)
    for name in (session, control):
        train(trainer, name, batch(bench, 6), adam=AdamParams(learning_rate=0.1))
    assert not changed(trainer.weights(session), trainer.weights(control))


def test_load_refuses_tensors_that_do_not_fit_and_changes_nothing(bench: Bench):
    trainer = bench.trainer
    session, other = trained_session(bench), bench.session(rank=8, alpha=32.0)
    before, foreign = adapter_of(trainer, session), adapter_of(trainer, other)
    name = next(n for n in before.tensors if n.endswith("lora_A.weight"))
    without = {n: t for n, t in before.tensors.items() if n != name}
    unfit: list[tuple[Adapter, str]] = [
        (foreign, "misshapen"),
        (replace(before, tensors=without), name),
        (replace(before, tensors={**before.tensors, "elsewhere.weight": np.ones(2)}), "elsewhere"),
        (replace(before, tensors={**before.tensors, name: before.tensors[name] * np.nan}), name),
        (replace(before, lora=replace(before.lora, alpha=999.0)), "alpha"),
    ]
    for adapter, named in unfit:
        with pytest.raises(PostTrainingError, match=named) as error:
            trainer.load(session, adapter, None)
        assert error.value.reason is Reason.INCOMPATIBLE_CHECKPOINT
    moments = trainer.optimizer_state(other)
    with pytest.raises(PostTrainingError) as error:
        trainer.load(session, before, moments)
    assert error.value.reason is Reason.INCOMPATIBLE_CHECKPOINT
    assert not changed(before, trainer.weights(session))
    assert trainer.optimizer_state(session).num_steps == 2


# Refusals


@pytest.mark.parametrize(
    ("lora", "named"),
    [
        (head_lora(rank=0), "0"),
        (head_lora(rank=-1), "-1"),
        (head_lora(rank=10**6), "max"),
        (head_lora(alpha=0.0), "alpha"),
        (head_lora(alpha=float("nan")), "alpha"),
        (replace(head_lora(), train_unembed=False), "train_unembed"),
    ],
)
def test_create_session_refuses_what_it_cannot_train(bench: Bench, lora, named):
    session = bench.name("session")
    limit = str(bench.trainer.model.max_lora_rank)
    with pytest.raises(PostTrainingError, match=limit if named == "max" else named) as error:
        bench.trainer.create_session(session, lora)
    assert error.value.reason is Reason.INVALID_ARGUMENT
    bench.trainer.create_session(session, head_lora())  # the name is still free


def test_ranks_up_to_the_limit_train_side_by_side(bench: Bench):
    largest = bench.trainer.model.max_lora_rank
    sessions = [bench.session(rank=rank) for rank in (4, largest)]
    for session in sessions:
        before = bench.trainer.weights(session)
        train(bench.trainer, session, batch(bench, 5), adam=AdamParams(learning_rate=0.01))
        assert changed(before, bench.trainer.weights(session))


def test_unknown_and_used_session_names_are_refused(bench: Bench):
    trainer = bench.trainer
    session = bench.session()
    with pytest.raises(PostTrainingError) as error:
        trainer.create_session(session, head_lora())
    assert error.value.reason is Reason.SESSION_EXISTS
    trainer.delete_session(session)
    uses = [
        lambda: trainer.delete_session(session),
        lambda: forward(trainer, session, batch(bench, 2)),
        lambda: trainer.weights(session),
        lambda: trainer.optim_step(session, AdamParams()),
    ]
    for use in uses:
        with pytest.raises(PostTrainingError, match=session) as error:
            use()
        assert error.value.reason is Reason.SESSION_NOT_FOUND


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -0.1),
        ("learning_rate", float("nan")),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", 0.0),
        ("weight_decay", float("inf")),
        ("grad_clip_norm", -1.0),
        ("grad_clip_norm", float("nan")),
    ],
)
def test_optim_step_refuses_bad_parameters_and_keeps_the_window(bench: Bench, name, value):
    session = bench.session()
    run(bench.trainer, session, batch(bench, 3), backward=True)
    before = bench.trainer.weights(session)
    with pytest.raises(PostTrainingError, match=name) as error:
        bench.trainer.optim_step(session, replace(AdamParams(), **{name: value}))
    assert error.value.reason is Reason.INVALID_ARGUMENT
    assert not changed(before, bench.trainer.weights(session))
    assert bench.trainer.has_gradients(session)
