"""Engines as fixtures. Each is started once; every test makes sessions and snapshots of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator

import pytest

from tests.conformance.bench import Bench
from tests.conformance.engines import ENGINES, Engine


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def start(loop: asyncio.AbstractEventLoop) -> Iterator[Callable[[Engine], Bench]]:
    """Starts an engine when it is first asked for, and closes all at the end."""
    started: dict[str, Bench] = {}

    def get(engine: Engine) -> Bench:
        if engine.name not in started:
            trainer, generator = engine.start()
            started[engine.name] = Bench(
                engine=engine,
                trainer=trainer,
                generator=generator,
                wait=loop.run_until_complete,
                numbers=itertools.count(),
            )
        return started[engine.name]

    yield get
    for bench in started.values():
        loop.run_until_complete(bench.generator.close())


@pytest.fixture(params=ENGINES, ids=lambda engine: engine.name)
def bench(request: pytest.FixtureRequest, start: Callable[[Engine], Bench]) -> Bench:
    """Each engine in turn."""
    return start(request.param)


@pytest.fixture(
    params=[engine for engine in ENGINES if engine.is_succ16], ids=lambda engine: engine.name
)
def succ16(request: pytest.FixtureRequest, start: Callable[[Engine], Bench]) -> Bench:
    """Each engine whose numbers are known in closed form."""
    return start(request.param)
