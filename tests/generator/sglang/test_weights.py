"""Whose turn it is: laws of `WeightTurns`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from backend.generator.sglang.client import ServerLost
from backend.generator.sglang.weights import WeightTurns
from together_post_training.errors import PostTrainingError, Reason, fail


@dataclass
class Server:
    """number: of its starts. refuse: what it says to these weights."""

    number: int = 1
    live: str | None = None
    replaced: list[str | None] = field(default_factory=list)
    refuse: dict[str | None, Exception] = field(default_factory=dict)
    running: list[str | None] = field(default_factory=list)
    now: float = 0.0

    async def replace(self, weights: str | None) -> None:
        assert not self.running, "nobody runs while weights are replaced"
        await asyncio.sleep(0)
        if weights in self.refuse:
            raise self.refuse[weights]
        self.live = weights
        self.replaced.append(weights)

    def turns(self, patience_s: float = 1.0) -> WeightTurns:
        return WeightTurns(
            self.replace,
            lambda: self.number,
            lambda: None,
            patience_s=patience_s,
            monotonic=lambda: self.now,
        )


async def work(server: Server, turns: WeightTurns, weights: str | None, steps: int = 3) -> None:
    async with turns.turn(weights):
        server.running.append(weights)
        for _ in range(steps):
            assert server.live == weights
            await asyncio.sleep(0)
        server.running.remove(weights)


def test_each_runs_under_its_own_weights_and_all_come_to_run():
    async def main() -> int:
        server = Server()
        turns = server.turns(patience_s=0)
        wanted = [None, "a", "b", "a", None, "b"] * 20
        await asyncio.gather(*(work(server, turns, weights) for weights in wanted))
        return len(server.replaced)

    # In groups: those who wait for the same run together.
    assert asyncio.run(main()) <= 4


def test_who_waits_long_enough_is_not_passed_any_more():
    """A stream of calls for what is there does not keep others out."""

    async def main() -> list[str]:
        server = Server()
        turns = server.turns(patience_s=1.0)
        order: list[str] = []

        async def noted(name: str, weights: str | None, steps: int) -> None:
            await work(server, turns, weights, steps)
            order.append(name)

        first = asyncio.create_task(noted("first", None, 20))
        await asyncio.sleep(0)
        waits = asyncio.create_task(noted("other", "a", 1))
        await asyncio.sleep(0)
        joins = asyncio.create_task(noted("joins", None, 1))
        await asyncio.sleep(0)
        server.now = 2.0
        late = asyncio.create_task(noted("late", None, 1))
        await asyncio.gather(first, waits, joins, late)
        return order

    assert asyncio.run(main()) == ["joins", "first", "other", "late"]


def test_who_gives_up_waiting_is_forgotten():
    async def main() -> list[str | None]:
        server = Server()
        turns = server.turns()
        runs = asyncio.create_task(work(server, turns, None, 5))
        await asyncio.sleep(0)
        waits = asyncio.create_task(work(server, turns, "a"))
        await asyncio.sleep(0)
        waits.cancel()
        await runs
        await work(server, turns, None)
        return server.replaced

    assert asyncio.run(main()) == []


def test_weights_that_are_refused_fail_those_who_want_them_alone():
    async def main() -> Reason:
        refused = fail(Reason.UNAVAILABLE, "no")
        server = Server(refuse={"a": refused})
        turns = server.turns()
        with pytest.raises(PostTrainingError) as error:
            await work(server, turns, "a")
        await work(server, turns, None)
        await work(server, turns, "b")
        return error.value.reason

    assert asyncio.run(main()) is Reason.UNAVAILABLE


def test_a_server_lost_on_the_way_has_nobody_knows_what():
    async def main() -> list[str | None]:
        server = Server(refuse={"a": ServerLost("gone")})
        turns = server.turns()
        with pytest.raises(ServerLost):
            await work(server, turns, "a")
        server.refuse.clear()
        await work(server, turns, None)
        return server.replaced

    assert asyncio.run(main()) == [None]


def test_a_server_that_was_started_again_has_the_base_weights():
    async def main() -> list[str | None]:
        server = Server()
        turns = server.turns()
        await work(server, turns, "a")
        server.number, server.live = 2, None
        await work(server, turns, None)
        await work(server, turns, "a")
        return server.replaced

    assert asyncio.run(main()) == ["a", "a"]
