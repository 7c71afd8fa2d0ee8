"""TR-07: a fault of the executor's own ends what waits and what comes, and says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.operations.bench import bench, good, step
from together_post_training.errors import Reason
from together_post_training.v1 import operations_pb2 as pb
from together_post_training.v1 import trainer_pb2 as t


@pytest.mark.parametrize(
    ("part", "method"),
    [
        ("_scheduler", "next_batch"),
        ("_scheduler", "release"),
        ("_registry", "started"),
        ("_registry", "succeed"),
    ],
)
def test_executor_that_fails_itself_fails_what_waits_and_what_comes(
    part: str, method: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    """Whether the fault is in the choice of an operation, its turn, or the writing down of its result."""

    def broken(*args: object) -> None:
        raise KeyError("secret")

    async def main() -> None:
        async with bench() as made:
            await made.submit(good(1))
            before = await made.ended(1)
            monkeypatch.setattr(getattr(made.executor, part), method, broken)
            made.trainer.gate.clear()
            for request in (good(2), t.WeightsSyncRequest(session="s", sequence=3), step(4)):
                await made.submit(request)
            made.trainer.gate.set()
            await made.ended(4)
            await made.submit(step(5))
            for n in (2, 3, 4, 5):
                operation = await made.ended(n)
                assert operation.state == pb.OPERATION_STATE_FAILED
                assert operation.error.reason == Reason.INTERNAL
                assert "KeyError" in operation.error.message
                assert "checkpoint" in operation.error.message
                assert "secret" not in str(operation)
            assert await made.ended(1) == before
            assert made.deaths
            await asyncio.wait_for(made.executor.stop_session(made.session), 5)
            assert await made.executor.drain(1.0)

    asyncio.run(main())
    assert {r.levelname for r in caplog.records if r.exc_info} == {"CRITICAL"}


def test_executor_that_fails_beside_the_turns_fails_that_operation_and_what_waits(
    monkeypatch: pytest.MonkeyPatch,
):
    async def broken(*args: object) -> None:
        raise KeyError

    async def main() -> None:
        async with bench() as made:
            monkeypatch.setattr(made.executor, "_run_aside", broken)
            await made.submit(t.WeightsSyncRequest(session="s", sequence=1))
            await made.submit(step(2))
            for n in (1, 2):
                assert (await made.ended(n)).error.reason == Reason.INTERNAL
            assert made.deaths == [True]

    asyncio.run(main())
