"""Generators over stand-ins of SGLang's server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from backend.generator.sglang.generator import SglangGenerator
from backend.generator.sglang.model import ServedModel
from backend.generator.sglang.options import SglangOptions
from backend.generator.sglang.server import GivenServer
from backend.trainer import base_model
from backend.trainer.base_model import BaseModel
from tests import models
from tests.generator.sglang.stand_in import StandIn
from tests.generator.sglang.stand_in_engine import StandInEngine, letter


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A stand-in, and a generator over it."""

    stand_in: StandIn
    generator: SglangGenerator

    @property
    def engine(self) -> StandInEngine:
        return self.stand_in.engine


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    directory = tmp_path_factory.mktemp("succ16") / "model"
    return base_model.load("succ16", str(models.succ16(directory)), dtype="float32", device="cpu")


@pytest.fixture
def opened(base: BaseModel, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`async with opened(...) as pair`: engine settings, and `max_running`."""
    stand_ins: list[StandIn] = []

    @asynccontextmanager
    async def open_(*, max_running: int = 1024, **settings: Any) -> AsyncIterator[Pair]:
        stand_in = StandIn(StandInEngine(Path(base.info.location), **settings))
        stand_ins.append(stand_in)
        options = SglangOptions(max_running=max_running, restart_wait_s=5.0)
        server = await asyncio.to_thread(GivenServer, stand_in.url, options)
        generator = SglangGenerator(
            ServedModel(base), server, options, tmp_path / "handed-out", _decode
        )
        try:
            yield Pair(stand_in=stand_in, generator=generator)
        finally:
            await generator.close()

    yield open_
    for stand_in in stand_ins:
        stand_in.close()


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    return asyncio.run


def _decode(tokens) -> str:
    return "".join(map(letter, tokens))
