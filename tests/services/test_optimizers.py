"""Optimisers over the wire: defaults, refusals, metrics, checkpoints."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.services.harness import Caller, Run, cross_entropy, refusal, sample
from together_post_training.v1 import operations_pb2 as o
from together_post_training.v1 import sessions_pb2 as s
from together_post_training.v1 import trainer_pb2 as t

NAN, INF = float("nan"), float("inf")
TOKENS = [3, 4, 9]
OPTIMIZERS: dict[str, s.OptimizerConfig] = {
    "adam": s.OptimizerConfig(adamw={}),
    "muon": s.OptimizerConfig(muon={}),
    "original": s.OptimizerConfig(
        muon=s.MuonConfig(scaling_strategy=s.MUON_SCALING_STRATEGY_ORIGINAL)
    ),
    "dimuon": s.OptimizerConfig(dimuon={}),
}
PARAMS: dict[str, dict[str, Any]] = {
    "adam": {"adam": t.AdamParams(learning_rate=0.05)},
    "muon": {"muon": t.MuonParams(learning_rate=0.05)},
    "original": {"muon": t.MuonParams(learning_rate=0.05)},
    "dimuon": {"dimuon": t.DimuonParams(learning_rate=0.05)},
}


def backward(run: Run, tokens: list[int] = TOKENS, **fields: Any) -> None:
    done = run.do("ForwardBackward", loss=cross_entropy(), samples=[sample(tokens)], **fields)
    assert done.state == o.OPERATION_STATE_SUCCEEDED, done.error


def step(run: Run, **params: Any) -> o.Operation:
    done = run.do("OptimStep", **params)
    assert done.state == o.OPERATION_STATE_SUCCEEDED, done.error
    return done


def moved(run: Run, **params: Any) -> np.ndarray:
    """The logprobs after a step from one pass."""
    backward(run)
    step(run, **params)
    return run.logprobs(TOKENS)


@pytest.fixture(params=OPTIMIZERS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_session_shows_its_optimizer_and_muon_matches_adam_by_default(caller: Caller, kind: str):
    shown = caller.session(optimizer=OPTIMIZERS[kind]).shown.optimizer
    wanted = s.OptimizerConfig()
    wanted.CopyFrom(OPTIMIZERS[kind])
    if kind == "muon":
        wanted.muon.scaling_strategy = s.MUON_SCALING_STRATEGY_MATCH_ADAM
    assert shown == wanted
    assert caller.session().shown.optimizer.WhichOneof("family") == "adamw"


@pytest.mark.parametrize(
    ("field", "absent", "defaults"),
    [
        (
            "adam",
            t.AdamParams(),
            # Together's, not Tinker's.
            t.AdamParams(
                learning_rate=1e-4,
                beta1=0.9,
                beta2=0.95,
                eps=1e-8,
                weight_decay=0,
                grad_clip_norm=1,
            ),
        ),
        (
            "muon",
            t.MuonParams(),
            t.MuonParams(
                learning_rate=0.02,
                momentum=0.95,
                newton_schulz_steps=5,
                weight_decay=0,
                grad_clip_norm=1,
            ),
        ),
        (
            "dimuon",
            t.DimuonParams(learning_rate=0.02),
            t.DimuonParams(learning_rate=0.02, beta1=0.9, grad_clip_norm=0),
        ),
    ],
)
def test_absent_parameters_are_those_of_the_contract(
    caller: Caller, field: str, absent: Any, defaults: Any
):
    """OP-03: over two steps, so that momenta and clipping show."""
    runs = [caller.session(optimizer=OPTIMIZERS[field]) for _ in range(2)]
    for run, params in zip(runs, (absent, defaults), strict=True):
        backward(run, [5, 5, 5])
        step(run, **{field: params})
        moved(run, **{field: params})
    np.testing.assert_array_equal(runs[0].logprobs(TOKENS), runs[1].logprobs(TOKENS))


def test_eps_of_adamw_is_togethers_where_it_is_absent(caller: Caller):
    """OP-03: a gradient of 1e-9 moves a weight by .09 of the learning rate; with Tinker's 1e-12 by all of it."""
    moves = {}
    for eps in (None, 1e-8, 1e-12):
        run = caller.session()
        backward_of = [sample(TOKENS, weights=[1e-9, 1e-9])]
        run.do("ForwardBackward", loss=cross_entropy(), samples=backward_of)
        adam = t.AdamParams(learning_rate=0.1)
        if eps is not None:
            adam.eps = eps
        moves[eps] = step(run, adam=adam).optim_step.metrics["update_l2:mean"]
    assert moves[None] == moves[1e-8] < moves[1e-12] / 2


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("muon", {"momentum": 0.0}),
        ("muon", {"newton_schulz_steps": 1}),
        ("muon", {"weight_decay": 1.0}),
        ("muon", {"grad_clip_norm": 1e-9}),
        ("dimuon", {"beta1": 0.0}),
        ("dimuon", {"grad_clip_norm": 1e-9}),
    ],
)
def test_every_parameter_has_its_effect(caller: Caller, field: str, change: dict[str, Any]):
    """The norms of clipped gradients of Muon matter where they change between steps: Newton-Schulz forgets them."""
    results = []
    for fields in ({}, change):
        run = caller.session(optimizer=OPTIMIZERS[field])
        kind = t.MuonParams if field == "muon" else t.DimuonParams
        backward(run, [5, 5, 5])
        step(run, **{field: kind(learning_rate=0.05)})
        results.append(moved(run, **{field: kind(learning_rate=0.05, **fields)}))
    assert not np.array_equal(*results)


def test_scaling_strategies_differ(caller: Caller):
    runs = [caller.session(optimizer=OPTIMIZERS[kind]) for kind in ("muon", "original")]
    first, second = (moved(run, **PARAMS["muon"]) for run in runs)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize(
    ("optimizer", "params", "named"),
    [
        ("muon", {"muon": t.MuonParams(learning_rate=-0.1)}, "learning_rate is -0.1"),
        ("muon", {"muon": t.MuonParams(learning_rate=NAN)}, "learning_rate is nan"),
        ("muon", {"muon": t.MuonParams(momentum=1.0)}, "momentum is 1.0"),
        ("muon", {"muon": t.MuonParams(momentum=-0.1)}, "momentum is -0.1"),
        ("muon", {"muon": t.MuonParams(newton_schulz_steps=0)}, "newton_schulz_steps is 0"),
        ("muon", {"muon": t.MuonParams(newton_schulz_steps=21)}, "1 to 20"),
        ("muon", {"muon": t.MuonParams(weight_decay=INF)}, "weight_decay is inf"),
        ("muon", {"muon": t.MuonParams(grad_clip_norm=-1)}, "grad_clip_norm is -1.0"),
        ("muon", {"muon": {"adam": {"eps": 0.0}}}, "adam eps is 0.0"),
        ("muon", {"muon": {"adam": {"grad_clip_norm": 1.0}}}, "set muon.grad_clip_norm"),
        ("dimuon", {"dimuon": t.DimuonParams()}, "learning_rate is absent"),
        ("dimuon", {"dimuon": t.DimuonParams(learning_rate=INF)}, "learning_rate is inf"),
        ("dimuon", {"dimuon": {"learning_rate": 1, "beta1": 1.0}}, "beta1 is 1.0"),
        ("dimuon", {"dimuon": {"learning_rate": 1, "grad_clip_norm": -1}}, "grad_clip_norm is -1"),
        ("adam", {}, "set adam"),
        ("muon", {}, "set muon"),
        ("dimuon", {}, "set dimuon."),
        ("adam", PARAMS["muon"], "optimiser is adamw.*for muon.*send those of adamw"),
        ("adam", PARAMS["dimuon"], "optimiser is adamw.*for dimuon"),
        ("muon", PARAMS["adam"], "optimiser is muon.*for adamw"),
        ("muon", PARAMS["dimuon"], "optimiser is muon.*for dimuon"),
        ("dimuon", PARAMS["adam"], "optimiser is dimuon.*for adamw"),
        ("dimuon", PARAMS["muon"], "optimiser is dimuon.*for muon"),
    ],
)
def test_parameters_are_refused_and_the_gradient_stays(
    caller: Caller, optimizer: str, params: dict[str, Any], named: str
):
    """What the caller learns of at once, it can send again in another form."""
    run, control = (caller.session(optimizer=OPTIMIZERS[optimizer]) for _ in range(2))
    for each in (run, control):
        backward(each)
    refused = run.submit("OptimStep", **params)
    assert refused.state == o.OPERATION_STATE_FAILED
    assert refused.error.reason == "INVALID_ARGUMENT"
    assert re.search(named, refused.error.message), refused.error.message
    step(run, **PARAMS[optimizer], failures_seen_through=run.sequence)
    step(control, **PARAMS[optimizer])
    np.testing.assert_array_equal(run.logprobs(TOKENS), control.logprobs(TOKENS))


def test_unknown_scaling_strategies_are_refused(caller: Caller):
    refused = refusal(
        caller.sessions.CreateSession,
        s.CreateSessionRequest(
            base_model="builtin:bigram16",
            optimizer=s.OptimizerConfig(muon=s.MuonConfig(scaling_strategy=9)),  # pyright: ignore[reportArgumentType]
        ),
    )
    assert refused.reason == "INVALID_ARGUMENT"
    assert "MATCH_ADAM" in refused.message


def test_metrics_of_a_step_say_what_it_did(caller: Caller, kind: str):
    run = caller.session(optimizer=OPTIMIZERS[kind])
    field, params = next(iter(PARAMS[kind].items()))
    clipped = type(params)()
    clipped.CopyFrom(params)
    clipped.grad_clip_norm = 1e-3
    free = type(params)()
    free.CopyFrom(params)
    free.grad_clip_norm = 1e3
    for number, (each, is_clipped) in enumerate(((clipped, 1.0), (free, 0.0)), start=1):
        backward(run)
        metrics = dict(step(run, **{field: each}).optim_step.metrics)
        assert metrics.pop("unclipped_grad_l2:mean") > 0.01
        assert metrics.pop("update_l2:mean") > 0.01
        assert metrics == {
            "learning_rate:mean": 0.05,
            "step:max": number,
            "grad_clipped:mean": is_clipped,
        }


def test_dimuon_says_what_it_is_with_its_first_step_alone(caller: Caller):
    run, other = (caller.session(optimizer=OPTIMIZERS["dimuon"]) for _ in range(2))
    for each in (run, other):
        backward(each)
        (warning,) = step(each, **PARAMS["dimuon"]).warnings
        assert "Dimuon's formula is not public" in warning
    backward(run)
    assert not step(run, **PARAMS["dimuon"]).warnings
    muon = caller.session(optimizer=OPTIMIZERS["muon"])
    backward(muon)
    assert not step(muon, **PARAMS["muon"]).warnings


def test_resume_with_the_optimizer_is_never_stopped(caller: Caller, kind: str):
    """Law 13: bit for bit, by a new session and by loading into the old one."""
    run = caller.session(optimizer=OPTIMIZERS[kind])
    for tokens in ([3, 4, 9], [1, 7, 2]):
        backward(run, tokens)
        step(run, **PARAMS[kind])
    run.save("mid")
    resumed = caller.session(resume_from=run.path("mid"), load_optimizer=True)
    assert resumed.shown.optimizer == run.shown.optimizer
    wanted = moved(run, **PARAMS[kind])
    np.testing.assert_array_equal(moved(resumed, **PARAMS[kind]), wanted)
    loaded = run.do("LoadCheckpoint", path=run.path("mid"), optimizer=True)
    assert loaded.load_checkpoint.policy_version == 2
    np.testing.assert_array_equal(moved(run, **PARAMS[kind]), wanted)


def test_weights_alone_resume_under_any_optimizer(caller: Caller, kind: str):
    run = caller.session(optimizer=OPTIMIZERS["muon"])
    moved(run, **PARAMS["muon"])
    run.save("w")
    fresh = caller.session(resume_from=run.path("w"), optimizer=OPTIMIZERS[kind])
    np.testing.assert_array_equal(fresh.logprobs(TOKENS), run.logprobs(TOKENS))
    backward(fresh)
    assert step(fresh, **PARAMS[kind]).optim_step.metrics["step:max"] == 1


@pytest.mark.parametrize(("saved", "loading"), [("adam", "muon"), ("muon", "dimuon")])
def test_state_of_another_optimizer_is_refused_and_changes_nothing(
    caller: Caller, saved: str, loading: str
):
    run = caller.session(optimizer=OPTIMIZERS[saved])
    moved(run, **PARAMS[saved])
    run.save("w")
    other, control = (caller.session(optimizer=OPTIMIZERS[loading]) for _ in range(2))
    failed = other.do("LoadCheckpoint", path=run.path("w"), optimizer=True)
    assert failed.error.reason == "INCOMPATIBLE_CHECKPOINT"
    for family in ({"adam": "adamw"}.get(saved, saved), loading):
        assert family in failed.error.message
    backward(other, failures_seen_through=other.sequence)
    step(other, **PARAMS[loading])
    np.testing.assert_array_equal(other.logprobs(TOKENS), moved(control, **PARAMS[loading]))


def test_an_optimizer_beside_load_optimizer_is_refused(caller: Caller):
    run = caller.session()
    run.save("w")
    refused = refusal(
        caller.sessions.CreateSession,
        s.CreateSessionRequest(
            resume_from=run.path("w"), load_optimizer=True, optimizer=OPTIMIZERS["muon"]
        ),
    )
    assert refused.reason == "INVALID_ARGUMENT"
    assert "load_optimizer" in refused.message


def test_a_step_that_overflows_changes_nothing(caller: Caller, kind: str):
    """OP-08: and the next window is a fresh run's."""
    run, control = (caller.session(optimizer=OPTIMIZERS[kind]) for _ in range(2))
    field, params = next(iter(PARAMS[kind].items()))
    absurd = type(params)()
    absurd.CopyFrom(params)
    absurd.learning_rate = 1e300
    backward(run)
    failed = run.do("OptimStep", **{field: absurd})
    assert failed.error.reason == "NON_FINITE_LOSS"
    assert "1e+300" in failed.error.message
    got, wanted = (moved(each, **PARAMS[kind]) for each in (run, control))
    np.testing.assert_array_equal(got, wanted)
