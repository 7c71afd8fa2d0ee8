"""Engines as fixtures. Each is started once; every test makes sessions and snapshots of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from backend.generator.base import Generator, SampleCall, SampleResult
from backend.trainer.base import LoraConfig, Trainer
from tests.conformance.engines import ENGINES, Engine

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A started engine, with fresh names and a loop for the generator."""

    engine: Engine
    trainer: Trainer
    generator: Generator
    wait: Callable[[Coroutine[Any, Any, Any]], Any]
    numbers: Iterator[int]

    @property
    def tolerance(self) -> float:
        return self.engine.tolerance

    def name(self, kind: str) -> str:
        return f"{kind}-{next(self.numbers)}"

    def session(self, *, rank: int = 4, alpha: float = 16.0, seed: int = 0) -> str:
        """A new session that trains what every engine has: the output head."""
        session = self.name("session")
        self.trainer.create_session(session, head_lora(rank=rank, alpha=alpha, seed=seed))
        return session

    def publish(self, session: str) -> str:
        snapshot = self.name("snapshot")
        self.generator.add_snapshot(snapshot, self.trainer.adapter(session))
        return snapshot

    def sample(self, call: SampleCall) -> SampleResult:
        return self.wait(self.generator.sample(call))


def head_lora(*, rank: int = 4, alpha: float = 16.0, seed: int = 0) -> LoraConfig:
    return LoraConfig(rank=rank, alpha=alpha, seed=seed, train_attn=False, train_mlp=False)


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
