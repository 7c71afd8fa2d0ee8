"""The engine's thread: what arrives together is computed together, and no call can harm another."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError

import pytest

from backend.generator.batch import Batch
from backend.generator.engine import Engine
from backend.generator.kv_cache import KVCache
from backend.generator.sequences import Job, Prefill, Sample
from backend.generator.stepper import Drawn, Stepper
from backend.generator.stopping import Decode
from tests.generator.calls import call
from together_post_training.errors import PostTrainingError, Reason

TIMEOUT_S = 10
POISON = 99


class CountingStepper(Stepper):
    """A model that counts: the next token is the number of tokens so far. Fails on a prompt that holds POISON.

    `gate`: a step waits until it is open; `at_gate` says that one does.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Event()
        self.reads: list[list[int]] = []
        self.batches: list[int] = []

    def read(self, prefills: Sequence[Prefill]) -> list[Drawn]:
        self._pass_gate()
        self.reads.append([len(p.part) for p in prefills])
        if any(POISON in p.tokens for p in prefills):
            raise RuntimeError("poisoned")
        for prefill in prefills:
            prefill.job.scores.next = prefill.job.scores.num_tokens
        last = [prefill for prefill in prefills if prefill.is_last_part]
        return [_next(sample) for prefill in last for sample in prefill.samples if sample.num_left]

    def advance(self, running: Sequence[Sample]) -> list[Drawn]:
        self._pass_gate()
        self.batches.append(len(running))
        return [_next(sample) for sample in running]

    def _pass_gate(self) -> None:
        self.at_gate.set()
        assert self.gate.wait(TIMEOUT_S)


def _next(sample: Sample) -> Drawn:
    return Drawn(sample, sample.num_tokens, -1.0, None)


class Bench:
    """An engine over the counting model, and what a test wants to see of it."""

    def __init__(self) -> None:
        self.stepper = CountingStepper()
        self.cache = KVCache(4096)
        self.batch = Batch(self.cache, max_running=4, max_prefill_tokens=100)
        self.engine = Engine(self.stepper, self.batch)

    def submit(
        self, prompt: Sequence[int], max_tokens: int, decode: Decode | None = None, **options
    ) -> Job:
        job = Job(call(prompt, max_tokens=max_tokens, **options), None, decode)
        self.engine.submit(job)
        return job

    def hold(self) -> None:
        """Returns when the engine stands before its next step."""
        self.stepper.at_gate.clear()
        self.stepper.gate.clear()

    def await_held(self) -> None:
        assert self.stepper.at_gate.wait(TIMEOUT_S)

    def let_go(self) -> None:
        self.stepper.gate.set()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.let_go()
    bench.engine.close()


def tokens_of(job: Job) -> list[list[int]]:
    return [s.tokens.tolist() for s in job.future.result(TIMEOUT_S).sequences]


def test_a_job_is_answered(bench: Bench):
    job = bench.submit([5, 6], 3, num_samples=2)
    assert tokens_of(job) == [[2, 3, 4]] * 2
    assert [s.stop_reason for s in job.future.result().sequences] == ["length"] * 2


def test_what_arrives_during_a_step_is_read_together(bench: Bench):
    bench.hold()
    first = bench.submit([1], 4)
    bench.await_held()
    others = [bench.submit([1] * n, 2) for n in (2, 3)]
    bench.let_go()
    assert tokens_of(first) == [[1, 2, 3, 4]]
    assert [tokens_of(job) for job in others] == [[[2, 3]], [[3, 4]]]
    assert bench.stepper.reads == [[1], [2, 3]]


def test_samples_join_and_leave_while_others_run(bench: Bench):
    """At most 4 run: the fifth joins when the first has left."""
    bench.hold()
    jobs = [bench.submit([1], n) for n in (2, 5, 5, 5)]
    late = bench.submit([1, 1], 3)
    bench.let_go()
    assert [len(tokens_of(job)[0]) for job in (*jobs, late)] == [2, 5, 5, 5, 3]
    assert max(bench.stepper.batches) == 4
    assert bench.cache.num_rows == 0


def test_a_stop_token_ends_a_sample(bench: Bench):
    job = bench.submit([1], 9, stop_tokens=[3])
    assert tokens_of(job) == [[1, 2, 3]]
    assert job.future.result().sequences[0].stop_reason == "stop"


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_cancelled_job_gives_its_rows_back_at_the_next_step(bench: Bench, num_samples):
    bench.hold()
    job = bench.submit([1], 1000, num_samples=num_samples)
    bench.await_held()
    other = bench.submit([1], 1)
    assert job.future.cancel()
    bench.let_go()
    assert tokens_of(other) == [[1]]
    bench.engine.close()
    assert bench.cache.num_rows == 0
    assert len(bench.stepper.batches) <= 2
    with pytest.raises(CancelledError):
        job.future.result()


def test_a_job_cancelled_while_it_waits_is_never_read(bench: Bench):
    bench.hold()
    first = bench.submit([1], 2)
    bench.await_held()
    waiting = bench.submit([1, 1, 1], 5)
    assert waiting.future.cancel()
    bench.let_go()
    tokens_of(first)
    assert [3] not in bench.stepper.reads


def test_a_failed_reading_fails_its_jobs_alone(bench: Bench):
    bench.hold()
    running = bench.submit([1], 6)
    bench.await_held()
    poisoned = bench.submit([POISON], 5)
    bench.let_go()
    with pytest.raises(PostTrainingError, match="poisoned") as error:
        poisoned.future.result(TIMEOUT_S)
    assert error.value.reason is Reason.INTERNAL
    assert tokens_of(running) == [[1, 2, 3, 4, 5, 6]]
    assert tokens_of(bench.submit([1], 2)) == [[1, 2]]
    assert bench.cache.num_rows == 0


def test_a_failed_step_fails_what_runs_and_the_engine_goes_on(bench: Bench, monkeypatch):
    def fail_once(running: Sequence[Sample]) -> list[Drawn]:
        monkeypatch.undo()
        raise MemoryError("no more of it")

    monkeypatch.setattr(bench.stepper, "advance", fail_once)
    with pytest.raises(PostTrainingError, match="no more of it"):
        bench.submit([1], 5).future.result(TIMEOUT_S)
    assert tokens_of(bench.submit([1], 3)) == [[1, 2, 3]]
    assert bench.cache.num_rows == 0


def test_a_failure_between_steps_fails_what_is_there_and_the_engine_goes_on(
    bench: Bench, monkeypatch
):
    def fail_once() -> None:
        monkeypatch.undo()
        raise MemoryError("no more of it")

    monkeypatch.setattr(bench.batch, "make_room", fail_once)
    with pytest.raises(PostTrainingError, match="no more of it"):
        bench.submit([1], 5).future.result(TIMEOUT_S)
    assert tokens_of(bench.submit([1], 3)) == [[1, 2, 3]]
    assert bench.cache.num_rows == 0


def test_a_call_that_cannot_move_fails_alone(bench: Bench, monkeypatch):
    def no_memory(*_: object) -> None:
        raise MemoryError("no more of it")

    bench.hold()
    stays = bench.submit([1], 6)
    bench.await_held()
    moves = bench.submit([1], 6)
    monkeypatch.setattr(moves, "move", no_memory)
    moved = bench.engine.move(moves, None, None, bench.engine)
    bench.let_go()
    moved.result(TIMEOUT_S)
    with pytest.raises(PostTrainingError, match="no more of it"):
        moves.future.result(TIMEOUT_S)
    assert tokens_of(stays) == [[1, 2, 3, 4, 5, 6]]
    assert bench.cache.num_rows == 0


def test_text_that_cannot_be_decoded_fails_its_own_call(bench: Bench):
    def decode(tokens: Sequence[int]) -> str:
        raise UnicodeError("not text")

    bench.hold()
    plain = bench.submit([1], 4)
    broken = bench.submit([1], 4, decode, stop_strings=["x"], num_samples=2)
    bench.let_go()
    with pytest.raises(PostTrainingError, match="not text"):
        broken.future.result(TIMEOUT_S)
    assert tokens_of(plain) == [[1, 2, 3, 4]]
    assert bench.cache.num_rows == 0


def test_a_call_that_fails_in_a_step_that_ends_another_of_its_samples_fails_alone(bench: Bench):
    """The first sample fails on its last token, and the second has its last one in the same step."""
    job: Job
    failed: list[Sample] = []

    def decode(tokens: Sequence[int]) -> str:
        if not failed and len(job.samples[0].tokens) == 4:
            failed.append(job.samples[0])
            raise UnicodeError("not text")
        return ""

    bench.hold()
    plain = bench.submit([1], 6)
    job = bench.submit([1], 4, decode, stop_strings=["x"], num_samples=2)
    bench.let_go()
    with pytest.raises(PostTrainingError, match="not text"):
        job.future.result(TIMEOUT_S)
    assert tokens_of(plain) == [[1, 2, 3, 4, 5, 6]]
    assert bench.cache.num_rows == 0


def test_a_job_that_asks_for_nothing_is_answered(bench: Bench):
    assert tokens_of(bench.submit([1, 2], 0)) == []


@pytest.mark.parametrize("arrives", ["running", "waiting"])
def test_closing_fails_what_is_unfinished(bench: Bench, arrives: str):
    bench.hold()
    running = bench.submit([1], 1000)
    bench.await_held()
    closing = threading.Thread(target=bench.engine.close)
    closing.start()
    late = bench.submit([1], 5) if arrives == "waiting" else running
    bench.let_go()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    for job in (running, late):
        with pytest.raises(PostTrainingError, match="closed") as error:
            job.future.result(TIMEOUT_S)
        assert error.value.reason is Reason.UNAVAILABLE


def test_nothing_runs_while_there_is_nothing_to_do(bench: Bench):
    tokens_of(bench.submit([1], 2))
    steps = len(bench.stepper.reads) + len(bench.stepper.batches)
    assert not threading.Event().wait(0.05)
    assert len(bench.stepper.reads) + len(bench.stepper.batches) == steps == 2
