"""How many calls are on the wire at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from together_post_training.client.window import Window


class FullServer:
    """Takes so many calls at a time, for a while each, and refuses the others."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.num_taken = 0
        self.num_refused = 0
        self.answered: list[int] = []

    async def call(self, window: Window, name: int) -> None:
        number = window.number()
        while True:
            async with window.place(number):
                if self.num_taken < self.num_places:
                    await self._answer(name)
                    window.note_answer()
                    return
                self.num_refused += 1
                window.note_refusal()
            await asyncio.sleep(0)

    async def _answer(self, name: int) -> None:
        self.num_taken += 1
        for _ in range(5):
            await asyncio.sleep(0)
        self.num_taken -= 1
        self.answered.append(name)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(main())


@settings(max_examples=30)
@given(st.integers(1, 20), st.integers(1, 60), st.integers(1, 60))
def test_every_call_is_answered_once_whatever_the_server_takes(num_places, num_calls, max_calls):
    async def test() -> None:
        server, window = FullServer(num_places), Window(max_calls)
        await asyncio.gather(*(server.call(window, i) for i in range(num_calls)))
        assert sorted(server.answered) == list(range(num_calls))
        assert window.num_out == 0
        assert 1 <= window.limit <= max_calls

    run(test)


def test_full_server_is_sent_what_it_takes_and_little_more():
    """Of 2000 calls, about one in each round of 20 finds it full."""

    async def test() -> None:
        server, window = FullServer(20), Window(500)
        await asyncio.gather(*(server.call(window, i) for i in range(2000)))
        assert 1 <= server.num_refused <= 150
        assert 10 <= window.limit <= 22

    run(test)


def test_window_opens_again_when_the_server_takes_more():
    async def test() -> None:
        server, window = FullServer(5), Window(100)
        await asyncio.gather(*(server.call(window, i) for i in range(200)))
        assert window.limit <= 7
        server.num_places = 1000
        await asyncio.gather(*(server.call(window, i) for i in range(3000)))
        assert window.limit > 30

    run(test)


def test_oldest_call_goes_first_also_when_it_was_refused():
    async def test() -> None:
        window = Window(1)
        old, new = window.number(), window.number()
        order = []

        async def send(number: int) -> None:
            async with window.place(number):
                order.append(number)

        async with window.place(window.number()):
            sending = [asyncio.ensure_future(send(number)) for number in (new, old)]
            await asyncio.sleep(0)
        await asyncio.gather(*sending)
        assert order == [old, new]

    run(test)


def test_call_that_is_cancelled_leaves_its_place_to_others():
    async def test() -> None:
        window = Window(1)
        order = []

        async def send(name: str) -> None:
            async with window.place(window.number()):
                order.append(name)
                await asyncio.sleep(0.01)

        first, second, third, fourth = (
            asyncio.ensure_future(send(name)) for name in ("first", "second", "third", "fourth")
        )
        await asyncio.sleep(0)
        second.cancel()  # it waits
        while not first.done():
            await asyncio.sleep(0)
        third.cancel()  # it was given the place at this moment, and may not have run yet
        await asyncio.wait([fourth])
        assert [name for name in order if name != "third"] == ["first", "fourth"]
        assert window.num_out == 0

    run(test)
