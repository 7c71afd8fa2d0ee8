"""Passes of several sessions in one call of the trainer: which, in what order, and what each gets of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence

import pytest
from google.protobuf.message import Message

from backend.trainer.base import Pass, PassResult
from tests.operations.bench import Bench, bench, good, of, overflowing, refused, step
from tests.operations.test_windows_of_a_trainer import (
    assert_same_weights,
    weights_of_a_fresh_run,
)
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.v1 import operations_pb2 as pb
from together_post_training.v1 import trainer_pb2 as t

SUCCEEDED, FAILED = pb.OPERATION_STATE_SUCCEEDED, pb.OPERATION_STATE_FAILED
# Each pass of these tests has 3 tokens: six of them fit.
MERGE_TOKENS = 18


def on_bench(test: Callable[[Bench], Awaitable[None]], merge_tokens: int = MERGE_TOKENS) -> None:
    async def main() -> None:
        async with bench(sessions="abcd", merge_tokens=merge_tokens) as made:
            await test(made)

    asyncio.run(main())


def forward(sequence: int) -> t.ForwardRequest:
    like = good(sequence)
    return t.ForwardRequest(session="s", sequence=sequence, loss=like.loss, samples=like.samples)


async def together(made: Bench, requests: Sequence[Message]) -> None:
    """Submits them while the trainer is busy with an operation of session d, whose number is 1."""
    made.trainer.gate.clear()
    made.trainer.started.clear()
    await made.submit(of("d", good(1)))
    await asyncio.to_thread(made.trainer.started.wait)
    for request in requests:
        await made.submit(request)
    made.trainer.gate.set()
    await made.ended(1, "d")
    made.trainer.calls.remove(("pass", "d"))


async def state(made: Bench, session: str, sequence: int) -> int:
    return (await made.ended(sequence, session)).state


def test_executor_runs_passes_that_wait_in_one_call_and_each_session_gets_its_own():
    async def test(made: Bench) -> None:
        await together(made, [of("a", good(1)), of("b", good(1)), of("c", good(1))])
        for name in "abc":
            assert await state(made, name, 1) == SUCCEEDED
            await made.submit(of(name, step(2)))
            await made.ended(2, name)
            assert_same_weights(made.adapter(name), weights_of_a_fresh_run([[1]]))
        assert made.trainer.calls[0] == ("pass", "a", "b", "c")

    on_bench(test)


def test_executor_runs_each_pass_alone_when_it_may_not_merge():
    async def test(made: Bench) -> None:
        await together(made, [of("a", good(1)), of("b", good(1))])
        await made.ended(1, "b")
        assert made.trainer.calls == [("pass", "a"), ("pass", "b")]

    on_bench(test, merge_tokens=0)


def test_executor_runs_steps_first_and_no_pass_before_its_own_sessions_step():
    async def test(made: Bench) -> None:
        await together(
            made,
            [
                *(of("a", one) for one in (good(1), step(2), good(3))),
                *(of("b", one) for one in (good(1), good(2), step(3))),
                *(of("c", one) for one in (good(1), step(2), good(3))),
            ],
        )
        for name in "abc":
            assert await state(made, name, 3) == SUCCEEDED
        assert made.trainer.calls == [
            ("pass", "a", "b", "c"),
            ("step", "a"),
            ("step", "c"),
            ("pass", "b", "c", "a"),
            ("step", "b"),
        ]

    on_bench(test)


def test_executor_does_not_mix_passes_with_and_without_gradients():
    async def test(made: Bench) -> None:
        await together(made, [of("a", good(1)), of("b", forward(1)), of("c", good(1))])
        await made.ended(1, "b")
        assert made.trainer.calls == [("pass", "a", "c"), ("pass", "b")]

    on_bench(test)


def test_executor_fails_alone_what_fails_among_others():
    async def test(made: Bench) -> None:
        await together(made, [of("a", good(1)), of("b", overflowing(1)), of("c", good(1))])
        bad = await made.ended(1, "b")
        assert bad.error.reason == Reason.NON_FINITE_LOSS
        for name in "abc":
            await made.submit(of(name, step(2)))
        assert [await state(made, name, 2) for name in "abc"] == [SUCCEEDED, FAILED, SUCCEEDED]
        for name, windows in (("a", [[1]]), ("b", []), ("c", [[1]])):
            assert_same_weights(made.adapter(name), weights_of_a_fresh_run(windows))

    on_bench(test)


def test_executor_leaves_a_pass_of_a_void_window_out_of_the_call():
    async def test(made: Bench) -> None:
        b = [of("b", one) for one in (refused(1), good(2), step(3), good(4), step(5))]
        await together(made, [of("a", good(1)), *b, of("c", good(1))])
        assert [await state(made, "b", n) for n in range(1, 6)] == [5, 5, 5, 4, 4]
        assert made.trainer.calls[0] == ("pass", "a", "c")
        assert_same_weights(made.adapter("b"), weights_of_a_fresh_run([[4]]))

    on_bench(test)


def test_executor_drops_a_sessions_gradients_before_its_pass_joins_others():
    """Those of the other chunks of a call that failed."""

    async def test(made: Bench) -> None:
        for one in (good(1, num_chunks=2), overflowing(2, num_chunks=2)):
            await made.submit(of("b", one))
        await made.ended(2, "b")
        again = good(3, num_chunks=1, failures_seen_through=2)
        await together(made, [of("a", good(1)), of("b", again)])
        await made.submit(of("b", step(4, failures_seen_through=2)))
        assert await state(made, "b", 4) == SUCCEEDED
        assert ("pass", "a", "b") in made.trainer.calls
        assert_same_weights(made.adapter("b"), weights_of_a_fresh_run([[3]]))

    on_bench(test)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("secret"), Reason.INTERNAL),
        (fail(Reason.OUT_OF_MEMORY, "Out of memory."), Reason.OUT_OF_MEMORY),
    ],
)
def test_executor_fails_all_that_ran_together_when_the_whole_call_fails(
    error: Exception, reason: Reason, monkeypatch: pytest.MonkeyPatch
):
    def broken(works: Sequence[object]) -> None:
        raise error

    async def test(made: Bench) -> None:
        monkeypatch.setattr(made.trainer, "run_batch", broken)
        await together(made, [of("a", good(1)), of("a", step(2)), of("b", good(1))])
        for name in "ab":
            ended = await made.ended(1, name)
            assert ended.error.reason == reason
            assert "secret" not in ended.error.message
        assert (await made.ended(2, "a")).error.reason == Reason.WINDOW_VOID
        monkeypatch.undo()
        for one in (good(3, failures_seen_through=2), step(4, failures_seen_through=2)):
            await made.submit(of("a", one))
        assert await state(made, "a", 4) == SUCCEEDED
        assert_same_weights(made.adapter("a"), weights_of_a_fresh_run([[3]]))
        assert not made.deaths

    on_bench(test)


def test_executor_leaves_a_cancelled_pass_out_of_the_call():
    async def test(made: Bench) -> None:
        made.trainer.gate.clear()
        await made.submit(of("d", good(1)))
        for name in "abc":
            await made.submit(of(name, good(1)))
        operation = made.registry.live(("b", 1))
        assert operation is not None
        await made.executor.cancel(operation, fail(Reason.CANCELLED, "Not wanted any more."))
        made.trainer.gate.set()
        await made.ended(1, "c")
        assert ("pass", "a", "c") in made.trainer.calls
        assert await state(made, "b", 1) == pb.OPERATION_STATE_CANCELLED

    on_bench(test)


def test_executor_stops_a_session_only_when_the_call_that_holds_its_pass_has_ended(
    monkeypatch: pytest.MonkeyPatch,
):
    """Its weights are in use until then. What runs beside it ends as if nothing had happened."""
    running, may_end = threading.Event(), threading.Event()

    async def test(made: Bench) -> None:
        plain = made.trainer.run_batch

        def held(works: Sequence[Pass]) -> list[PassResult | PostTrainingError]:
            running.set()
            may_end.wait()
            return plain(works)

        monkeypatch.setattr(made.trainer, "run_batch", held)
        await together(made, [of(name, one) for name in "ab" for one in (good(1), step(2))])
        await asyncio.to_thread(running.wait)
        made.sessions["a"].is_running = False
        stopping = asyncio.create_task(made.executor.stop_session(made.sessions["a"]))
        assert await state(made, "a", 2) == pb.OPERATION_STATE_CANCELLED
        for _ in range(20):
            await asyncio.sleep(0)
        assert not stopping.done()
        may_end.set()
        await stopping
        made.trainer.delete_session("a")
        assert [await state(made, name, 1) for name in "ab"] == [SUCCEEDED] * 2
        assert await state(made, "b", 2) == SUCCEEDED
        assert_same_weights(made.adapter("b"), weights_of_a_fresh_run([[1]]))

    on_bench(test)
