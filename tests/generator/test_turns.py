"""At most so many at a time; the others wait, and may leave."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.generator.turns import Turns


class Room:
    """Calls that stay until they are let go."""

    def __init__(self, max_running: int) -> None:
        self.turns = Turns(max_running)
        self.running: dict[str, asyncio.Event] = {}
        self.order: list[str] = []
        self.most = 0

    def come(self, name: str, flow: str = "f", cost: int = 1) -> asyncio.Task[None]:
        return asyncio.ensure_future(self._stay(name, flow, cost))

    async def _stay(self, name: str, flow: str, cost: int) -> None:
        async with self.turns.turn(flow, cost):
            self.running[name] = asyncio.Event()
            self.order.append(name)
            self.most = max(self.most, len(self.running))
            try:
                await self.running[name].wait()
            finally:
                del self.running[name]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_calls_wait_and_run_in_the_order_of_their_coming():
    async def main() -> None:
        room = Room(2)
        tasks = [room.come(f"call {i}") for i in range(6)]
        await settle()
        assert (room.turns.num_running, room.turns.num_waiting) == (2, 4)
        while room.running:
            next(iter(room.running.values())).set()
            await settle()
        await asyncio.gather(*tasks)
        assert room.order == [f"call {i}" for i in range(6)]
        assert room.most == 2
        assert (room.turns.num_running, room.turns.num_waiting) == (0, 0)

    asyncio.run(main())


def test_call_that_is_cancelled_while_it_waits_leaves_at_once():
    async def main() -> None:
        room = Room(1)
        first, second, third = (room.come(str(i)) for i in range(3))
        await settle()
        second.cancel()
        await settle()
        assert room.turns.num_waiting == 1
        room.running["0"].set()
        await settle()
        assert room.order == ["0", "2"]
        room.running["2"].set()
        await asyncio.gather(first, third)

    asyncio.run(main())


def test_call_that_is_cancelled_as_its_turn_comes_hands_it_on():
    async def main() -> None:
        room = Room(1)
        first, second, third = (room.come(str(i)) for i in range(3))
        await settle()
        room.running["0"].set()
        while not first.done():
            await asyncio.sleep(0)
        assert "1" not in room.running  # it was woken and has not run yet
        second.cancel()
        await settle()
        assert room.order == ["0", "2"]
        room.running["2"].set()
        await asyncio.gather(first, third)
        assert room.turns.num_running == 0

    asyncio.run(main())


def test_few_calls_of_one_flow_do_not_wait_for_the_many_of_another():
    async def main() -> None:
        room = Room(1)
        tasks = [room.come(f"many {i}", "many", 10) for i in range(50)]
        await settle()
        tasks.append(room.come("one", "other", 10))
        await settle()
        while room.running:
            next(iter(room.running.values())).set()
            await settle()
        await asyncio.gather(*tasks)
        assert room.order.index("one") <= 3
        assert [name for name in room.order if name != "one"] == [f"many {i}" for i in range(50)]

    asyncio.run(main())


def test_call_that_fails_hands_its_turn_on():
    async def main() -> None:
        turns = Turns(1)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                async with turns.turn("f", 1):
                    raise ZeroDivisionError
        assert turns.num_running == 0

    asyncio.run(main())


@settings(max_examples=50)
@given(
    max_running=st.integers(1, 4),
    actions=st.lists(
        st.tuples(st.sampled_from(["come", "end", "cancel"]), st.integers(0, 30)), max_size=40
    ),
)
def test_never_more_run_than_may_and_none_is_idle_while_others_wait(max_running, actions):
    async def main() -> None:
        room = Room(max_running)
        tasks: list[asyncio.Task[None]] = []
        for action, number in actions:
            if action == "come":
                name = str(len(tasks))
                tasks.append(room.come(name, flow=str(number % 3), cost=1 + number))
            elif action == "end" and room.running:
                list(room.running.values())[number % len(room.running)].set()
            elif tasks:
                tasks[number % len(tasks)].cancel()
            await settle()
            assert room.turns.num_running == len(room.running) <= max_running
            assert not room.turns.num_waiting or room.turns.num_running == max_running
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (room.turns.num_running, room.turns.num_waiting) == (0, 0)

    asyncio.run(main())
