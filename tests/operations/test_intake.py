"""Submissions in any order, repeated, cancelled, lost; what is acknowledged is in the journal."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.operations.executor import stopped
from backend.operations.intake import _canonical
from backend.operations.memory_journal import MemoryJournal
from tests.operations.bench import Bench, bench, good, overflowing, run, sample, step
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.v1 import data_pb2
from together_post_training.v1 import operations_pb2 as pb
from together_post_training.v1 import trainer_pb2 as t


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), num_operations=st.integers(1, 12))
def test_law_11_operations_take_effect_once_each_in_sequence_order(seed: int, num_operations: int):
    """Whatever the order and repetition of their submissions; every submission gets the same answer."""

    async def main() -> None:
        dice = random.Random(seed)
        arrivals = [n for n in range(1, num_operations + 1) for _ in range(dice.randint(1, 3))]
        dice.shuffle(arrivals)
        async with bench() as made:
            names = await asyncio.gather(*(made.submit(good(n)) for n in arrivals))
            assert [op.name for op in names] == [f"sessions/s/operations/{n}" for n in arrivals]
            for n in range(1, num_operations + 1):
                assert (await made.ended(n)).state == pb.OPERATION_STATE_SUCCEEDED
            first_tokens = [int(p.samples[0].tokens[0]) for p in made.trainer.passes]
            assert first_tokens == [n % 16 for n in range(1, num_operations + 1)]
            again = await made.submit(good(1))
            assert again == await made.ended(1)

    asyncio.run(main())


def test_intake_refuses_a_number_that_was_used_for_other_bytes_and_goes_on():
    async def test(made: Bench) -> None:
        await made.submit(good(1))
        other = good(1)
        other.num_chunks = 7
        with pytest.raises(PostTrainingError) as caught:
            await made.submit(other)
        assert caught.value.reason == Reason.SEQUENCE_REUSED
        assert caught.value.metadata["sequence"] == "1"
        await made.submit(step(2))
        assert (await made.ended(2)).state == pb.OPERATION_STATE_SUCCEEDED

    run(test)


@pytest.mark.parametrize("num_samples", [0, 1, 16, 40])
def test_request_in_canonical_pieces_is_the_request(num_samples: int):
    samples = [sample([n % 16, 1, 2], weights=[0.5, n]) for n in range(num_samples)]
    gradients = [data_pb2.Tensor(raw=bytes([n]) * 4) for n in range(num_samples)]
    requests = (
        t.CustomForwardBackwardRequest(
            session="s", sequence=7, num_chunks=0, samples=samples, gradients=gradients
        ),
        t.ForwardRequest(loss=data_pb2.LossConfig(type="ppo", params={"x": 1}), samples=samples),
        t.SaveCheckpointRequest(name="a", user_metadata={"b": "c", "a": "d"}),
    )
    for request in requests:
        pieces = list(_canonical(request))
        assert type(request).FromString(b"".join(pieces)) == request


def test_intake_answers_a_retry_that_overtakes_the_first_submission():
    """The first one is large, so it is decoded in a thread while its retry arrives."""

    async def test(made: Bench) -> None:
        large = good(1)
        large.samples.extend([sample([1, 2, 3])] * 2000)
        first = asyncio.create_task(made.submit(large))
        while made.registry.live(("s", 1)) is None:
            await asyncio.sleep(0)
        assert not first.done()
        second, found = await asyncio.gather(made.submit(large), made.registry.get(("s", 1)))
        assert (await first).name == second.name == found.name
        await made.ended(1)
        assert len(made.trainer.passes) == 1

    run(test)


def test_intake_uses_up_the_number_of_a_request_that_fails_validation():
    async def test(made: Bench) -> None:
        bad = await made.submit(t.OptimStepRequest(session="s", sequence=1))
        assert bad.state == pb.OPERATION_STATE_FAILED
        assert bad.error.reason == Reason.INVALID_ARGUMENT
        assert await made.submit(t.OptimStepRequest(session="s", sequence=1)) == bad
        await made.submit(good(2, failures_seen_through=1))
        assert (await made.ended(2)).state == pb.OPERATION_STATE_SUCCEEDED

    run(test)


def test_intake_accepts_a_submission_whose_caller_hung_up():
    async def test(made: Bench) -> None:
        large = good(1)
        large.samples.extend([sample([1, 2, 3])] * 2000)
        call = asyncio.create_task(made.submit(large))
        await asyncio.sleep(0.002)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await made.submit(large)
        assert (await made.ended(1)).state == pb.OPERATION_STATE_SUCCEEDED
        assert len(made.trainer.passes) == 1

    run(test)


def test_intake_takes_nothing_that_the_journal_cannot_keep_and_the_number_stays_free():
    class FullJournal(MemoryJournal):
        is_full = True

        async def add_operation(self, *args, **kwargs) -> None:
            await asyncio.sleep(0)
            if self.is_full:
                raise fail(Reason.RESOURCE_EXHAUSTED, "The server's store is full.")
            await super().add_operation(*args, **kwargs)

    journal = FullJournal()

    async def test(made: Bench) -> None:
        results = await asyncio.gather(
            made.submit(good(1)), made.submit(good(1)), return_exceptions=True
        )
        assert all(isinstance(r, PostTrainingError) for r in results)
        with pytest.raises(PostTrainingError, match="Unknown operation"):
            await made.registry.get(("s", 1))
        journal.is_full = False
        await made.submit(good(1))
        assert (await made.ended(1)).state == pb.OPERATION_STATE_SUCCEEDED
        assert len(made.trainer.passes) == 1

    run(test, journal)


def test_operation_whose_result_cannot_be_kept_is_not_announced_as_succeeded():
    class FullJournal(MemoryJournal):
        async def finish_operation(self, *args, **kwargs) -> None:
            raise fail(Reason.RESOURCE_EXHAUSTED, "The server's store is full.")

    async def test(made: Bench) -> None:
        await made.submit(good(1))
        assert (await made.ended(1)).error.reason == Reason.RESOURCE_EXHAUSTED

    run(test, FullJournal())


def test_cancel_of_a_waiting_operation_ends_it_and_voids_its_window():
    async def test(made: Bench) -> None:
        made.trainer.gate.clear()
        await made.submit(good(1))
        await asyncio.to_thread(made.trainer.started.wait)
        for one in (good(2), step(3), good(4), step(5)):
            await made.submit(one)
        waiting = made.registry.live(("s", 2))
        assert waiting is not None
        await made.executor.cancel(waiting, fail(Reason.CANCELLED, "Cancelled by the caller."))
        assert (await made.ended(2)).state == pb.OPERATION_STATE_CANCELLED
        made.trainer.gate.set()
        assert (await made.ended(3)).error.reason == Reason.WINDOW_VOID
        assert (await made.ended(5)).state == pb.OPERATION_STATE_SUCCEEDED
        assert len(made.trainer.passes) == 2

    run(test)


def test_cancel_leaves_a_running_operation_as_it_is():
    async def test(made: Bench) -> None:
        made.trainer.gate.clear()
        await made.submit(good(1))
        await asyncio.to_thread(made.trainer.started.wait)
        running = made.registry.live(("s", 1))
        assert running is not None
        await made.executor.cancel(running, fail(Reason.CANCELLED, "Cancelled by the caller."))
        made.trainer.gate.set()
        assert (await made.ended(1)).state == pb.OPERATION_STATE_SUCCEEDED

    run(test)


def test_cancel_of_a_number_that_was_never_submitted_uses_it_up_and_lets_others_go_on():
    async def test(made: Bench) -> None:
        await made.submit(good(2, failures_seen_through=1))
        error = fail(Reason.CANCELLED, "Cancelled by the caller.")
        await made.intake.use_up(
            made.session, made.executor, 1, error, pb.OPERATION_STATE_CANCELLED
        )
        assert (await made.ended(2)).state == pb.OPERATION_STATE_SUCCEEDED
        late = await made.submit(good(1))
        assert late.state == pb.OPERATION_STATE_CANCELLED
        assert len(made.trainer.passes) == 1

    run(test)


def test_using_up_a_number_that_was_submitted_after_all_leaves_it_as_it_is():
    async def test(made: Bench) -> None:
        await made.submit(good(1))
        error = fail(Reason.SEQUENCE_GAP, "Operation 1 never arrived.")
        kept = await made.intake.use_up(
            made.session, made.executor, 1, error, pb.OPERATION_STATE_FAILED
        )
        assert kept.kind == pb.OPERATION_KIND_FORWARD_BACKWARD
        assert (await made.ended(1)).state == pb.OPERATION_STATE_SUCCEEDED

    run(test)


def test_stopping_a_session_cancels_what_waits_and_ends_what_runs():
    async def test(made: Bench) -> None:
        made.trainer.gate.clear()
        for one in (good(1), good(2), step(4)):
            await made.submit(one)
        await asyncio.to_thread(made.trainer.started.wait)
        made.session.is_running = False
        stopping = asyncio.create_task(made.executor.stop_session(made.session))
        for number in (2, 4):
            ended = await made.ended(number)
            assert ended.state == pb.OPERATION_STATE_CANCELLED
            assert ended.error.reason == Reason.SESSION_STOPPED
        assert not stopping.done()
        made.trainer.gate.set()
        await stopping
        assert (await made.ended(1)).state == pb.OPERATION_STATE_SUCCEEDED
        with pytest.raises(PostTrainingError) as caught:
            await made.submit(good(3))
        assert caught.value.reason == Reason.SESSION_STOPPED
        assert (await made.submit(good(1))).state == pb.OPERATION_STATE_SUCCEEDED

    run(test)


def test_waiting_for_a_number_that_was_not_submitted_yet_gives_its_result():
    async def test(made: Bench) -> None:
        waiting = asyncio.create_task(made.ended(1))
        await asyncio.sleep(0.01)
        await made.submit(good(1))
        assert (await waiting).state == pb.OPERATION_STATE_SUCCEEDED

    run(test)


def test_waiting_ends_after_its_time_with_the_operation_as_it_is_then():
    async def test(made: Bench) -> None:
        nothing = await made.registry.wait(("s", 9), 0.01)
        assert nothing.state == pb.OPERATION_STATE_UNSPECIFIED
        await made.submit(good(2))
        assert (await made.registry.wait(("s", 2), 0.01)).state == pb.OPERATION_STATE_HELD

    run(test)


def test_closing_the_intake_refuses_and_closing_the_waiters_wakes_everyone():
    async def test(made: Bench) -> None:
        waiting = [asyncio.create_task(made.registry.wait(("s", n), 60)) for n in (1, 1, 2)]
        await asyncio.sleep(0.01)
        error = fail(Reason.UNAVAILABLE, "The server is stopping.")
        made.intake.close(error)
        made.registry.waiters.close(error)
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, PostTrainingError)
            assert outcome.reason == Reason.UNAVAILABLE
        with pytest.raises(PostTrainingError, match="stopping"):
            await made.submit(good(1))

    run(test)


def test_engine_exceptions_of_every_kind_end_the_operation_and_nothing_else():
    async def test(made: Bench) -> None:
        for n, error in enumerate([StopIteration("x"), SystemExit(3), KeyError("k")], start=1):
            made.trainer.raises = error
            await made.submit(good(n, failures_seen_through=n - 1))
            assert (await made.ended(n)).error.reason == Reason.INTERNAL
        made.trainer.raises = None
        await made.submit(good(4, failures_seen_through=3))
        assert (await made.ended(4)).state == pb.OPERATION_STATE_SUCCEEDED

    run(test)


def test_operations_of_one_session_are_announced_in_order():
    async def test(made: Bench) -> None:
        for n in range(1, 21):
            await made.submit(overflowing(n) if n % 5 == 0 else good(n, failures_seen_through=n))
        await made.ended(20)
        assert made.session.ended_through == 20
        assert not made.session.num_live

    run(test)


def test_stopped_says_what_to_do():
    assert "from a checkpoint" in stopped("s").message
