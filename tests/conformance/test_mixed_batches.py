"""Laws 4, 6 and 9 of passes that run together: each session gets what it would get alone, for every trainer.

Steps are linearised (an eps far above the gradient), so that a wrong factor shows as well as a wrong sign; weights move
by 1e-4 of the gradient, and differ by less than 1e-5 when sums are taken in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.trainer.base import AdamParams, LoraConfig, Pass, PassResult, Trainer
from tests.conformance.bench import Bench, head_lora
from tests.conformance.data import assert_same_adapter, changed, forward, random_sample
from together_post_training import samples as sample_checks
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.samples import Sample

STEP = AdamParams(learning_rate=100.0, eps=1e6)
SAME_WEIGHTS = 1e-5
CUSTOM = "custom"
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "dro", CUSTOM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """One session, and what it trains with."""

    rank: int
    alpha: float
    seed: int
    train_attn: bool
    train_mlp: bool
    dropout: float
    loss: str

    def lora(self, bench: Bench) -> LoraConfig:
        lora = replace(head_lora(rank=self.rank, alpha=self.alpha, seed=self.seed))
        lora = replace(lora, dropout=self.dropout)
        if bench.engine.is_succ16:
            return lora
        # Experts take no dropout.
        train_mlp = self.train_mlp and not (self.dropout and bench.engine.name.endswith("moe"))
        return replace(lora, train_attn=self.train_attn, train_mlp=train_mlp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Passes that run together, as (actor, lengths of its samples, whether its loss overflows), then who steps."""

    passes: tuple[tuple[int, tuple[int, ...], bool], ...]
    backward: bool
    steps: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    actors: tuple[Actor, ...]
    turns: tuple[Turn, ...]


actors = st.builds(
    Actor,
    rank=st.integers(1, 6),
    alpha=st.sampled_from([4.0, 16.0]),
    seed=st.integers(0, 3),
    train_attn=st.booleans(),
    train_mlp=st.booleans(),
    dropout=st.sampled_from([0.0, 0.0, 0.3]),
    loss=st.sampled_from(LOSSES),
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    made = draw(st.lists(actors, min_size=2, max_size=6))
    everybody = range(len(made))
    lengths = st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple)
    turns = []
    for _ in range(draw(st.integers(1, 3))):
        together = draw(st.lists(st.sampled_from(everybody), min_size=1, unique=True))
        fails = st.sampled_from([False] * 5 + [True])
        passes = tuple((i, draw(lengths), draw(fails)) for i in together)
        steps = draw(st.frozensets(st.sampled_from(everybody)))
        turns.append(Turn(passes=passes, backward=True, steps=steps))
        if draw(st.booleans()):
            turns.append(Turn(passes=passes[::-1], backward=False, steps=frozenset()))
    return Program(actors=tuple(made), turns=tuple(turns))


class Work:
    """Makes the passes of a program; sampling logprobs are those of the base, a little off."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._base = bench.session()

    def of(
        self, session: str, actor: Actor, lengths: Sequence[int], fails: bool, **options
    ) -> Pass:
        vocab_size = self._bench.trainer.model.limits.vocab_size
        plain = [
            random_sample(100 * actor.seed + 10 * i + n, vocab_size, n)
            for i, n in enumerate(lengths)
        ]
        if actor.loss == CUSTOM and not fails:
            gradients = [np.linspace(-1, 1, n, dtype=np.float32) for n in lengths]
            return self._pass(session, plain, "cross_entropy", gradients=gradients, **options)
        if actor.loss in ("cross_entropy", CUSTOM) and not fails:
            return self._pass(session, plain, "cross_entropy", **options)
        offset = -1000.0 if fails else 0.2
        samples = [
            Sample(
                tokens=one.tokens,
                inputs={
                    **one.inputs,
                    "logprobs": (lp + offset).astype(np.float32),
                    "advantages": np.linspace(0.5, 1.5, len(lp), dtype=np.float32),
                },
            )
            for one, lp in zip(plain, forward(self._bench.trainer, self._base, plain), strict=True)
        ]
        return self._pass(
            session, samples, "importance_sampling" if fails else actor.loss, **options
        )

    def _pass(self, session: str, samples: list[Sample], loss: str, **options) -> Pass:
        checked = sample_checks.check(samples, loss, self._bench.trainer.model.limits)
        return Pass(session=session, samples=checked, loss=loss, **options)


def attempt(trainer: Trainer, work: Pass) -> PassResult | PostTrainingError:
    try:
        return trainer.run(work)
    except PostTrainingError as error:
        return error


def assert_same_outcome(got, wanted, tolerance: float) -> None:
    assert type(got) is type(wanted)
    if isinstance(wanted, PostTrainingError):
        assert got.reason is wanted.reason
        return
    for one, other in zip(got.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)
    assert got.metrics == pytest.approx(wanted.metrics, rel=1e-3, abs=1e-3)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs())
def test_law_9_sessions_that_share_batches_end_where_each_ends_alone(
    bench: Bench, program: Program
):
    """Ranks, targets, losses and dropout differ; some passes fail; between steps, passes add up."""
    trainer, work = bench.trainer, Work(bench)
    together = [bench.name("together") for _ in program.actors]
    alone = [bench.name("alone") for _ in program.actors]
    for names in (together, alone):
        for name, actor in zip(names, program.actors, strict=True):
            trainer.create_session(name, actor.lora(bench))
    for turn in program.turns:

        def passes(names: Sequence[str], turn: Turn = turn) -> list[Pass]:
            return [
                work.of(names[i], program.actors[i], lengths, fails, backward=turn.backward)
                for i, lengths, fails in turn.passes
            ]

        outcomes = trainer.run_batch(passes(together))
        for got, single in zip(outcomes, passes(alone), strict=True):
            assert_same_outcome(got, attempt(trainer, single), 10 * bench.tolerance)
        for i in turn.steps:
            assert trainer.has_gradients(together[i]) == trainer.has_gradients(alone[i])
            if trainer.has_gradients(together[i]):
                trainer.optim_step(together[i], STEP)
                trainer.optim_step(alone[i], STEP)
    for one, other in zip(together, alone, strict=True):
        assert_same_adapter(trainer.weights(one), trainer.weights(other), atol=SAME_WEIGHTS)
        trainer.delete_session(one)
        trainer.delete_session(other)


def trained(bench: Bench, work: Work, session: str, *lengths: int, seed: int = 0) -> Pass:
    actor = Actor(
        rank=4,
        alpha=16.0,
        seed=seed,
        train_attn=True,
        train_mlp=True,
        dropout=0.0,
        loss="cross_entropy",
    )
    return work.of(session, actor, lengths, False, backward=True)


def results(outcomes: Sequence[PassResult | PostTrainingError]) -> list[PassResult]:
    assert all(isinstance(outcome, PassResult) for outcome in outcomes), outcomes
    return [outcome for outcome in outcomes if isinstance(outcome, PassResult)]


def test_law_4_a_batch_of_one_is_the_pass_itself_to_the_bit(bench: Bench):
    work, (one, other) = Work(bench), (bench.session(), bench.session())
    (got,) = results(bench.trainer.run_batch([trained(bench, work, one, 7, 3)]))
    wanted = bench.trainer.run(trained(bench, work, other, 7, 3))
    assert [a.tobytes() for a in got.logprobs] == [b.tobytes() for b in wanted.logprobs]
    assert got.metrics == wanted.metrics
    for session in (one, other):
        bench.trainer.optim_step(session, STEP)
    assert not changed(bench.trainer.weights(one), bench.trainer.weights(other))


def test_law_4_the_same_batch_gives_the_same_bits_whatever_ran_before(bench: Bench):
    work, sessions = Work(bench), [bench.session(), bench.session()]
    passes = [trained(bench, work, s, 9, 2, seed=i) for i, s in enumerate(sessions)]
    first = results(bench.trainer.run_batch(passes))
    bench.trainer.run_batch([trained(bench, work, bench.session(), 12, 12, 1)])
    for session in sessions:
        bench.trainer.clear_gradients(session)
    again = results(bench.trainer.run_batch(passes))
    for one, other in zip(first, again, strict=True):
        assert [a.tobytes() for a in one.logprobs] == [b.tobytes() for b in other.logprobs]


def test_law_4_outcomes_are_in_the_order_of_the_passes(bench: Bench):
    """And each sample's logprobs in the order of the samples, whatever their lengths."""
    work, sessions = Work(bench), [bench.session(seed=i) for i in range(3)]
    passes = [
        trained(bench, work, session, *lengths, seed=i)
        for i, (session, lengths) in enumerate(
            zip(sessions, ((2, 9, 2), (12,), (5, 1)), strict=True)
        )
    ]
    forwards = results(bench.trainer.run_batch(passes))
    backwards = results(bench.trainer.run_batch(passes[::-1]))[::-1]
    for work_, one, other in zip(passes, forwards, backwards, strict=True):
        assert [len(lp) for lp in one.logprobs] == [s.num_tokens for s in work_.samples]
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=bench.tolerance)


def test_law_9_a_pass_that_fails_in_company_fails_alone(bench: Bench):
    """An overflowing loss, and a session that nobody knows: the others' gradients are theirs alone."""
    work, trainer = Work(bench), bench.trainer
    names = ("good", "bad", "control")
    sessions = {name: bench.session(seed=1) for name in names}
    actor = Actor(rank=4, alpha=16, seed=2, train_attn=True, train_mlp=True, dropout=0, loss="ppo")
    bad = work.of(sessions["bad"], actor, [5, 3], True, backward=True)
    unknown = trained(bench, work, "nobody", 4)
    good = trained(bench, work, sessions["good"], 6, 4)
    outcomes = trainer.run_batch([bad, good, unknown])
    reasons = [o.reason for o in outcomes if isinstance(o, PostTrainingError)]
    assert reasons == [Reason.NON_FINITE_LOSS, Reason.SESSION_NOT_FOUND]
    assert isinstance(outcomes[1], PassResult)
    assert not trainer.has_gradients(sessions["bad"])
    trainer.run(trained(bench, work, sessions["control"], 6, 4))
    for session in (sessions["good"], sessions["control"]):
        trainer.optim_step(session, STEP)
    got, wanted = (trainer.weights(sessions[name]) for name in ("good", "control"))
    assert_same_adapter(got, wanted, atol=SAME_WEIGHTS)
    # The failed session goes on as if nothing had been.
    fresh = bench.session(seed=1)
    for session in (sessions["bad"], fresh):
        trainer.run(trained(bench, work, session, 8))
        trainer.optim_step(session, STEP)
    assert_same_adapter(trainer.weights(sessions["bad"]), trainer.weights(fresh), atol=SAME_WEIGHTS)


def test_law_9_gradients_that_are_not_finite_fail_their_own_pass(bench: Bench):
    """A caller's own derivatives, which no loss has looked at."""
    work, trainer = Work(bench), bench.trainer
    bad, good = bench.session(), bench.session()
    broken = trained(bench, work, bad, 3, 4)
    gradients = [np.ones(3, np.float32), np.array([0, np.nan, 0, 1], np.float32)]
    outcomes = trainer.run_batch(
        [replace(broken, gradients=gradients), trained(bench, work, good, 5)]
    )
    assert isinstance(outcomes[0], PostTrainingError)
    assert outcomes[0].reason is Reason.NON_FINITE_LOSS
    assert isinstance(outcomes[1], PassResult)
    assert not trainer.has_gradients(bad)
    assert trainer.has_gradients(good)


def test_law_9_a_deleted_session_leaks_nothing_into_batches(bench: Bench):
    work, trainer = Work(bench), bench.trainer
    kept, gone = bench.session(seed=1), bench.session(seed=2)
    for _ in range(2):
        trainer.run_batch([trained(bench, work, kept, 5), trained(bench, work, gone, 9, 4)])
        trainer.optim_step(kept, STEP)
        trainer.optim_step(gone, STEP)
    trainer.run_batch([trained(bench, work, gone, 9)])
    trainer.delete_session(gone)
    trainer.create_session(gone, head_lora(seed=2))
    control = bench.name("control")
    trainer.create_session(control, head_lora(seed=2))
    assert not trainer.has_gradients(gone)
    assert not changed(trainer.weights(gone), trainer.weights(control))
    for session in (gone, control):
        trainer.run_batch([trained(bench, work, session, 9, 4)])
        trainer.optim_step(session, STEP)
    assert not changed(trainer.weights(gone), trainer.weights(control))


def test_law_9_idle_sessions_do_not_move_beside_a_batch(bench: Bench):
    work, trainer = Work(bench), bench.trainer
    idle, busy, other = (bench.session(seed=i) for i in range(3))
    trainer.run(trained(bench, work, idle, 6))
    trainer.optim_step(idle, STEP)
    weights, state = trainer.weights(idle), trainer.optimizer_state(idle)
    trainer.run_batch([trained(bench, work, busy, 5), trained(bench, work, other, 5)])
    trainer.optim_step(busy, STEP)
    assert not changed(weights, trainer.weights(idle))
    assert trainer.optimizer_state(idle).num_steps == state.num_steps == 1
    assert not trainer.has_gradients(idle)


def test_batches_without_backward_leave_no_gradient(bench: Bench):
    work, sessions = Work(bench), [bench.session(seed=i) for i in range(2)]
    passes = [replace(trained(bench, work, s, 4), backward=False) for s in sessions]
    results(bench.trainer.run_batch(passes))
    assert not any(bench.trainer.has_gradients(s) for s in sessions)
    assert bench.trainer.run_batch([]) == []
