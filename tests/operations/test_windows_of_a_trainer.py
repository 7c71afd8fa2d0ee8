"""Law 8, with a trainer: what a failed operation does to its gradient window."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.trainer import bigram, bigram_trainer
from backend.trainer.base import AdamParams, Pass, Weights
from tests.operations.bench import (
    LORA,
    MODEL,
    Bench,
    bench,
    decode_pass,
    good,
    overflowing,
    refused,
    run,
    step,
)
from together_post_training.errors import Reason
from together_post_training.v1 import operations_pb2 as pb
from together_post_training.v1 import trainer_pb2 as t

Kind = Literal["good", "refused", "overflowing", "bad step", "step"]
programs = st.lists(
    st.sampled_from(["good", "good", "good", "refused", "overflowing", "bad step", "step", "step"]),
    min_size=1,
    max_size=14,
)


def request(kind: Kind, sequence: int, **fields: int) -> Message:
    match kind:
        case "good":
            return good(sequence, **fields)
        case "refused":
            return refused(sequence, **fields)
        case "overflowing":
            return overflowing(sequence, **fields)
        case "bad step":
            return step(sequence, learning_rate=-1.0, **fields)
        case "step":
            return step(sequence, **fields)


def weights_of_a_fresh_run(windows: Sequence[Sequence[int]]) -> Weights:
    """Trains on nothing but these: for each window, the numbers of its good operations."""
    trainer = bigram_trainer.BigramTrainer(bigram.load(MODEL))
    trainer.create_session("s", LORA)
    for window in windows:
        for number in window:
            work = decode_pass(good(number), trainer.model).work
            assert isinstance(work, Pass)
            trainer.run(work)
        if window:
            trainer.optim_step("s", AdamParams(learning_rate=0.1, eps=1e-3))
    return trainer.weights("s")


def assert_same_weights(got: Weights, expected: Weights) -> None:
    """To the bit: the same operations in the same order."""
    for name, tensor in expected.tensors.items():
        np.testing.assert_array_equal(got.tensors[name], tensor)


async def send_along(made: Bench, requests: Sequence[Message]) -> list[pb.Operation]:
    """All before any has ended, as a pipelining caller does."""
    made.trainer.gate.clear()
    for one in requests:
        await made.submit(one)
    made.trainer.gate.set()
    return [await made.ended(n + 1) for n in range(len(requests))]


def clean_windows(program: Sequence[Kind]) -> list[list[int]]:
    """The good numbers of each window that an optim_step ends and in which nothing failed."""
    windows, good_ones, is_void = [], [], False
    for number, kind in enumerate(program, start=1):
        if kind == "good":
            good_ones.append(number)
        elif kind != "step":
            is_void = True
        else:
            if not is_void:
                windows.append(good_ones)
            good_ones, is_void = [], False
    return windows


@settings(max_examples=40)
@given(programs)
def test_law_8_a_window_with_a_failure_changes_nothing_and_the_next_equals_a_fresh_run(
    program: list[Kind],
):
    async def main() -> None:
        async with bench() as made:
            await send_along(made, [request(kind, n) for n, kind in enumerate(program, start=1)])
            assert_same_weights(made.adapter(), weights_of_a_fresh_run(clean_windows(program)))
            assert made.session.policy_version == sum(map(bool, clean_windows(program)))

    asyncio.run(main())


@settings(max_examples=40)
@given(programs)
def test_law_8_a_caller_that_has_seen_the_failures_goes_on_without_the_failed_operations(
    program: list[Kind],
):
    async def main() -> None:
        async with bench() as made:
            windows, window, seen = [], [], 0
            for n, kind in enumerate(program, start=1):
                await made.submit(request(kind, n, failures_seen_through=seen))
                ended = await made.ended(n)
                is_fine = ended.state == pb.OPERATION_STATE_SUCCEEDED
                assert is_fine == (kind in ("good", "step"))
                seen = seen if is_fine else n
                if kind == "good":
                    window.append(n)
                elif kind == "step":
                    windows.append(window)
                    window = []
            assert_same_weights(made.adapter(), weights_of_a_fresh_run(windows))

    asyncio.run(main())


@pytest.mark.parametrize("bad", [refused, overflowing])
def test_window_fails_what_was_sent_along_naming_the_cause(bad):
    async def test(made: Bench) -> None:
        ended = await send_along(made, [good(1), bad(2), good(3), step(4), good(5), step(6)])
        assert [e.state for e in ended] == [4, 5, 5, 5, 4, 4]
        for e in ended[2:4]:
            assert e.error.reason == Reason.WINDOW_VOID
            assert e.error.metadata["cause_sequence"] == "2"
        assert_same_weights(made.adapter(), weights_of_a_fresh_run([[5]]))
        assert ended[5].optim_step.policy_version == 1

    run(test)


def test_window_is_voided_by_a_custom_pass_that_failed():
    async def test(made: Bench) -> None:
        bad = t.CustomForwardBackwardRequest(session="s", sequence=2, samples=good(2).samples)
        bad.gradients.add().floats.values.extend([float("inf")] * 3)
        ended = await send_along(made, [good(1), bad, good(3), step(4), good(5), step(6)])
        assert [e.state for e in ended] == [4, 5, 5, 5, 4, 4]
        assert ended[2].error.reason == Reason.WINDOW_VOID
        assert_same_weights(made.adapter(), weights_of_a_fresh_run([[5]]))

    run(test)


def test_window_drops_the_other_chunks_of_a_call_when_one_failed():
    async def test(made: Bench) -> None:
        chunks = {"num_chunks": 3}
        sent = [good(1), good(2, **chunks), overflowing(3, **chunks), good(4, **chunks)]
        ended = await send_along(made, sent)
        assert [e.state for e in ended] == [4, 4, 5, 5]
        again = [good(n, num_chunks=3, failures_seen_through=4) for n in (5, 6, 7)]
        for one in (*again, step(8, failures_seen_through=4)):
            await made.submit(one)
        assert (await made.ended(8)).state == pb.OPERATION_STATE_SUCCEEDED
        assert_same_weights(made.adapter(), weights_of_a_fresh_run([[5, 6, 7]]))

    run(test)


def test_window_is_not_voided_by_a_forward_that_failed():
    async def test(made: Bench) -> None:
        bad = t.ForwardRequest(session="s", sequence=2, samples=refused(2).samples)
        bad.loss.type = "cross_entropy"
        ended = await send_along(made, [good(1), bad, step(3)])
        assert [e.state for e in ended] == [4, 5, 4]
        assert_same_weights(made.adapter(), weights_of_a_fresh_run([[1]]))

    run(test)


def test_window_is_emptied_by_a_load_and_voided_by_one_that_failed():
    async def test(made: Bench) -> None:
        save = t.SaveCheckpointRequest(session="s", sequence=1, kind=t.CHECKPOINT_KIND_TRAINING)
        save.name = "a"
        load = t.LoadCheckpointRequest(session="s", sequence=4, path="tinker://s/weights/a")
        ended = await send_along(made, [save, good(2), overflowing(3), load, step(5)])
        assert [e.state for e in ended] == [4, 4, 5, 4, 4]
        assert ended[4].optim_step.metrics["empty_window:max"] == 1
        assert_same_weights(made.adapter(), weights_of_a_fresh_run([]))
        missing = t.LoadCheckpointRequest(session="s", sequence=6, path="tinker://s/weights/b")
        made.trainer.gate.clear()
        for one in (missing, good(7), step(8)):
            await made.submit(one)
        made.trainer.gate.set()
        assert (await made.ended(6)).error.reason == Reason.CHECKPOINT_NOT_FOUND
        assert (await made.ended(8)).error.reason == Reason.WINDOW_VOID

    run(test)


def test_window_is_closed_by_an_optim_step_whose_gradient_was_not_finite():
    async def test(made: Bench) -> None:
        large = good(1)  # Its square, the second moment, is beyond float32.
        large.samples[0].loss_fn_inputs["weights"].floats.values.extend([1e25] * 3)
        ended = await send_along(made, [large, step(2), good(3), step(4)])
        assert ended[1].error.reason == Reason.NON_FINITE_LOSS
        assert ended[3].state == pb.OPERATION_STATE_SUCCEEDED
        assert_same_weights(made.adapter(), weights_of_a_fresh_run([[3]]))

    run(test)


def test_window_trusts_no_gradient_after_an_engine_failed_inside():
    async def test(made: Bench) -> None:
        await made.submit(good(1))
        await made.ended(1)
        made.trainer.raises = RuntimeError("secret path /etc")
        await made.submit(good(2))
        failed = (await made.ended(2)).error
        made.trainer.raises = None
        assert failed.reason == Reason.INTERNAL
        assert "secret" not in failed.message
        for one in (good(3, failures_seen_through=2), step(4, failures_seen_through=2)):
            await made.submit(one)
        await made.ended(4)
        assert_same_weights(made.adapter(), weights_of_a_fresh_run([[3]]))

    run(test)


def test_window_after_an_optim_step_that_failed_inside_waits_until_that_was_seen():
    """Who knows what it changed: nothing that was sent along trains on."""

    async def test(made: Bench) -> None:
        made.trainer.step_raises = RuntimeError("out of memory")
        ended = await send_along(made, [good(1), step(2), good(3), step(4)])
        assert [e.error.reason for e in ended[1:]] == ["INTERNAL", "WINDOW_VOID", "WINDOW_VOID"]
        made.trainer.step_raises = None
        for one in (good(5, failures_seen_through=4), step(6, failures_seen_through=4)):
            await made.submit(one)
        assert (await made.ended(6)).state == pb.OPERATION_STATE_SUCCEEDED
        assert_same_weights(made.adapter(), weights_of_a_fresh_run([[5]]))

    run(test)
