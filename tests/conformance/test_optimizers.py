"""Optimisers, for every trainer: what families share, and what keeps them apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from backend.trainer.base import (
    ADAMW,
    AdamParams,
    DimuonParams,
    FullConfig,
    MuonParams,
    OptimizerConfig,
    OptimParams,
)
from backend.trainer.bigram import load
from tests.conformance.bench import Bench, head_lora
from tests.conformance.data import adapter_of, changed, forward, part, random_sample, run
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An optimiser and parameters for it."""

    config: OptimizerConfig
    params: OptimParams

    def with_params(self, **changes: Any) -> OptimParams:
        return replace(self.params, **changes)


FAMILIES = {
    "adamw": Family(config=ADAMW, params=AdamParams(learning_rate=0.05)),
    "muon": Family(config=OptimizerConfig(family="muon"), params=MuonParams(learning_rate=0.05)),
    "muon-original": Family(
        config=OptimizerConfig(family="muon", muon_scaling="original"),
        params=MuonParams(learning_rate=0.05),
    ),
    "dimuon": Family(
        config=OptimizerConfig(family="dimuon"), params=DimuonParams(learning_rate=0.05)
    ),
}
MUON = FAMILIES["muon"]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def session_of(bench: Bench, family: Family, *, seed: int = 0, rank: int = 4) -> str:
    session = bench.name("session")
    lora = head_lora(rank=rank, seed=seed)
    if not bench.engine.is_succ16:
        lora = replace(lora, train_attn=True, train_mlp=True)
    bench.trainer.create_session(session, lora, family.config)
    return session


def batch(bench: Bench, seed: int) -> list[Sample]:
    vocab_size = bench.trainer.model.limits.vocab_size
    return [random_sample(100 * seed + i, vocab_size, 6) for i in range(2)]


def train(bench: Bench, session: str, params: OptimParams, seed: int = 0) -> dict[str, float]:
    run(bench.trainer, session, batch(bench, seed), backward=True)
    return bench.trainer.optim_step(session, params)


def assert_same_state(bench: Bench, session: str, other: str) -> None:
    """Weights and moments, bit for bit."""
    assert not changed(bench.trainer.weights(session), bench.trainer.weights(other))
    got, wanted = (bench.trainer.optimizer_state(name) for name in (session, other))
    assert (got.family, got.num_steps) == (wanted.family, wanted.num_steps)
    assert got.moments.keys() == wanted.moments.keys()
    for moment, by_name in wanted.moments.items():
        for name, tensor in by_name.items():
            np.testing.assert_array_equal(got.moments[moment][name], tensor)


def test_training_lowers_the_loss(bench: Bench, family: Family):
    session = session_of(bench, family)
    losses = []
    for _ in range(6):
        losses.append(
            run(bench.trainer, session, batch(bench, 0), backward=True).metrics["loss:sum"]
        )
        bench.trainer.optim_step(session, family.params)
    assert losses[-1] < losses[0] * 0.97


def test_metrics_say_what_a_step_did(bench: Bench, family: Family):
    trainer, session = bench.trainer, session_of(bench, family)
    clip_norm = 1e3
    for number in (1, 2):
        before = adapter_of(trainer, session).tensors
        metrics = train(bench, session, family.with_params(grad_clip_norm=clip_norm))
        after = adapter_of(trainer, session).tensors
        squares = [np.square(after[n].astype(np.float64) - before[n]).sum() for n in before]
        assert metrics["update_l2:mean"] == pytest.approx(np.sqrt(sum(squares)), rel=1e-5)
        assert metrics["learning_rate:mean"] == 0.05
        assert metrics["step:max"] == number
        assert metrics["grad_clipped:mean"] == float(number == 2)
        assert metrics.keys() == {
            "unclipped_grad_l2:mean",
            "grad_clipped:mean",
            "update_l2:mean",
            "learning_rate:mean",
            "step:max",
        }
        clip_norm = metrics["unclipped_grad_l2:mean"] / 1e3


def test_gradients_are_clipped_by_their_norm_over_all_tensors(bench: Bench, family: Family):
    """OP-04: once the limit is the norm itself nothing changes, and momentum keeps what was left of a clipped one."""
    free, loose, clipped = (session_of(bench, family) for _ in range(3))
    # B moves first, so that A has a gradient too.
    for session in (free, loose, clipped):
        train(bench, session, family.with_params(grad_clip_norm=0.0))
    momentum = "exp_avg" if family.config.family == "adamw" else "momentum_buffer"
    field = "momentum" if family.config.family == "muon" else "beta1"
    alone = family.with_params(**{field: 0.0})
    norm = train(bench, free, replace(alone, grad_clip_norm=0.0), 1)["unclipped_grad_l2:mean"]
    train(bench, loose, replace(alone, grad_clip_norm=norm * 1.01), 1)
    assert_same_state(bench, free, loose)
    half = replace(alone, grad_clip_norm=norm / 2)
    assert train(bench, clipped, half, 1)["unclipped_grad_l2:mean"] == norm
    # Without the past, the momentum is the gradient that was stepped with.
    gradients = bench.trainer.optimizer_state(clipped).moments[momentum]
    whole = np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in gradients.values()))
    assert whole == pytest.approx(norm / 2, rel=1e-5)


def test_learning_rate_zero_is_a_step_that_changes_no_bit(bench: Bench, family: Family):
    """OP-02."""
    trainer, session = bench.trainer, session_of(bench, family)
    before = trainer.weights(session)
    assert train(bench, session, family.with_params(learning_rate=0.0))["step:max"] == 1
    assert not changed(before, trainer.weights(session))
    train(bench, session, family.params)
    assert changed(before, trainer.weights(session))


def test_a_stays_while_its_gradient_is_zero(bench: Bench, family: Family):
    """B = 0 at the start: Muon makes no direction out of nothing, and no NaN."""
    trainer, session = bench.trainer, session_of(bench, family)
    before = trainer.weights(session)
    train(bench, session, family.params)
    moved = changed(before, trainer.weights(session))
    assert moved
    assert all("lora_B" in name for name in moved)
    train(bench, session, family.params)
    assert any("lora_A" in name for name in changed(before, trainer.weights(session)))


def test_moments_are_float32_and_belong_to_every_tensor(bench: Bench, family: Family):
    session = session_of(bench, family)
    train(bench, session, family.params)
    state = bench.trainer.optimizer_state(session)
    tensors = adapter_of(bench.trainer, session).tensors
    moments = {"adamw": {"exp_avg", "exp_avg_sq"}}.get(state.family, {"momentum_buffer"})
    assert state.moments.keys() == moments
    for by_name in state.moments.values():
        assert {n: t.shape for n, t in by_name.items()} == {n: t.shape for n, t in tensors.items()}
        assert all(tensor.dtype == np.float32 for tensor in by_name.values())


def test_a_session_steps_its_own_weights_whatever_the_others_optimizers(bench: Bench):
    """OP-05, law 9: interleaved, each is bit for bit what it is alone; gradients survive the steps of others."""
    names = {key: session_of(bench, family, rank=3) for key, family in FAMILIES.items()}
    alone = {key: session_of(bench, family, rank=3) for key, family in FAMILIES.items()}
    for seed in range(2):
        for session in names.values():
            run(bench.trainer, session, batch(bench, seed), backward=True)
        for key, session in reversed(names.items()):
            bench.trainer.optim_step(session, FAMILIES[key].params)
    for key, session in alone.items():
        for seed in range(2):
            train(bench, session, FAMILIES[key].params, seed)
        assert_same_state(bench, names[key], session)


def test_resumed_with_its_optimizer_is_never_stopped(bench: Bench, family: Family):
    """Law 13."""
    trainer = bench.trainer
    session, resumed = session_of(bench, family), session_of(bench, family, seed=9)
    for seed in range(2):
        train(bench, session, family.params, seed)
    trainer.load(resumed, trainer.weights(session), trainer.optimizer_state(session))
    for name in (session, resumed):
        train(bench, name, family.params, 2)
    assert_same_state(bench, resumed, session)


def test_a_load_without_state_starts_the_optimizer_anew(bench: Bench, family: Family):
    trainer = bench.trainer
    session, fresh = session_of(bench, family), session_of(bench, family)
    train(bench, session, family.params)
    for name in (fresh, session):
        trainer.load(name, trainer.weights(session), None)
        train(bench, name, family.params, 1)
    assert_same_state(bench, session, fresh)


@pytest.mark.parametrize(("owner", "other"), [("adamw", "muon"), ("muon", "dimuon")])
def test_what_belongs_to_another_family_is_refused_and_the_window_stays(
    bench: Bench, owner: str, other: str
):
    trainer, family = bench.trainer, FAMILIES[owner]
    session, control = session_of(bench, family), session_of(bench, family)
    foreign = session_of(bench, FAMILIES[other])
    for name in (session, control):
        run(trainer, name, batch(bench, 0), backward=True)
    with pytest.raises(PostTrainingError, match=f"is {owner}.*for {other}") as error:
        trainer.optim_step(session, FAMILIES[other].params)
    assert error.value.reason is Reason.INVALID_ARGUMENT
    with pytest.raises(PostTrainingError, match=f"is {other}'s.*is {owner}") as error:
        trainer.load(session, trainer.weights(foreign), trainer.optimizer_state(foreign))
    assert error.value.reason is Reason.INCOMPATIBLE_CHECKPOINT
    assert trainer.has_gradients(session)
    for name in (session, control):
        trainer.optim_step(name, family.params)
    assert_same_state(bench, session, control)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (MuonParams(learning_rate=-0.1), "learning_rate is -0.1"),
        (MuonParams(momentum=1.0), "momentum is 1.0"),
        (MuonParams(newton_schulz_steps=0), "newton_schulz_steps is 0.*1 to 20"),
        (MuonParams(newton_schulz_steps=21), "newton_schulz_steps is 21"),
        (MuonParams(weight_decay=float("inf")), "weight_decay is inf"),
        (MuonParams(grad_clip_norm=float("nan")), "grad_clip_norm is nan"),
        (MuonParams(adam=AdamParams(beta2=1.0)), "adam beta2 is 1.0"),
        (DimuonParams(learning_rate=float("nan")), "learning_rate is nan"),
        (DimuonParams(learning_rate=0.1, beta1=-0.1), "beta1 is -0.1"),
        (DimuonParams(learning_rate=0.1, grad_clip_norm=-1.0), "grad_clip_norm is -1.0"),
    ],
)
def test_parameters_out_of_range_are_refused_and_the_window_stays(bench: Bench, params, named):
    family = FAMILIES["muon" if isinstance(params, MuonParams) else "dimuon"]
    session = session_of(bench, family)
    run(bench.trainer, session, batch(bench, 0), backward=True)
    before = bench.trainer.weights(session)
    with pytest.raises(PostTrainingError, match=named) as error:
        bench.trainer.optim_step(session, params)
    assert error.value.reason is Reason.INVALID_ARGUMENT
    assert not changed(before, bench.trainer.weights(session))
    assert bench.trainer.has_gradients(session)


@pytest.mark.parametrize("params", [{"learning_rate": 1e300}, {"grad_clip_norm": 0.0}])
def test_a_step_that_overflows_changes_nothing_and_clears_the_gradient(
    bench: Bench, family: Family, params: dict[str, float]
):
    """OP-08: of an absurd learning rate, and of a gradient whose square is no float32."""
    trainer = bench.trainer
    session, control = session_of(bench, family), session_of(bench, family)
    for name in (session, control):
        train(bench, name, family.params)
    weight = 1.0 if "learning_rate" in params else 1e30
    weights = np.full(6, weight, np.float32)
    bad = random_sample(5, trainer.model.limits.vocab_size, 6, weights=weights)
    run(trainer, session, [bad], backward=True)
    with pytest.raises(PostTrainingError) as error:
        trainer.optim_step(session, family.with_params(**params))
    assert error.value.reason is Reason.NON_FINITE_LOSS
    assert not trainer.has_gradients(session)
    for name in (session, control):
        train(bench, name, family.params, 1)
    assert_same_state(bench, session, control)


def test_full_weights_step_matrices_with_muon_and_the_head_with_adamw(bench: Bench):
    """The head moves at the rate of the nested parameters alone, and both rules' moments resume bit for bit."""
    trainer, session = bench.trainer, bench.name("full")
    still = replace(MUON.params, adam=AdamParams(learning_rate=0.0))
    trainer.create_session(session, FullConfig(), MUON.config)
    try:
        before = trainer.weights(session)
        train(bench, session, still)
        moments = trainer.optimizer_state(session).moments
        assert not any(head in moments.get("momentum_buffer", {}) for head in moments["exp_avg"])
        names = {name for by_name in moments.values() for name in by_name}
        assert names == before.tensors.keys()
        # One of the models has layers of zeros, and gradients of zeros there.
        assert (
            changed(before, trainer.weights(session)) <= moments.get("momentum_buffer", {}).keys()
        )
        train(bench, session, MUON.params)
        assert changed(before, trainer.weights(session)) & moments["exp_avg"].keys()
        halfway = trainer.weights(session), trainer.optimizer_state(session)
        ends = []
        for _ in range(2):
            trainer.load(session, *halfway)
            train(bench, session, MUON.params, 1)
            ends.append(trainer.weights(session))
        assert not changed(*ends)
    finally:
        trainer.delete_session(session)


def test_scaling_by_the_shape_of_a_matrix(succ16: Bench):
    """B is (16, 4): sqrt(16 / 4) = 2 for "original", .2 * sqrt(16) = .8 for "match_adam"."""
    moves = {}
    for key in ("muon", "muon-original"):
        session = session_of(succ16, FAMILIES[key])
        train(succ16, session, FAMILIES[key].params)
        moves[key] = part(succ16.trainer.weights(session), "lora_B.weight")
    np.testing.assert_allclose(moves["muon-original"] / 2, moves["muon"] / 0.8, rtol=1e-5)


def test_logprobs_of_muon_follow_the_closed_form(succ16: Bench):
    """Against the float64 bigram from the same start: to 5% of the move, which is Newton-Schulz in bfloat16."""
    oracle = load("builtin:bigram16").trainer()
    session = session_of(succ16, MUON)
    oracle.create_session("o", adapter_of(succ16.trainer, session).lora, MUON.config)
    oracle.load("o", succ16.trainer.weights(session), None)
    samples = batch(succ16, 0)
    before = np.concatenate(forward(succ16.trainer, session, samples))
    for trainer, name in ((succ16.trainer, session), (oracle, "o")):
        for _ in range(3):
            run(trainer, name, samples, backward=True)
            trainer.optim_step(name, MUON.params)
    got = np.concatenate(forward(succ16.trainer, session, samples))
    wanted = np.concatenate(forward(oracle, "o", samples))
    assert np.linalg.norm(got - wanted) < 0.05 * np.linalg.norm(wanted - before)
