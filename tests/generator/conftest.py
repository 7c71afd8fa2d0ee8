"""Tiny models and generators on them, made once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from backend.generator.base import SampleCall, SampleResult
from backend.generator.embedded import EmbeddedGenerator
from backend.trainer import base_model
from backend.trainer.base_model import BaseModel
from tests import models

Wait = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny products gain nothing from threads, and pay for waking them."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def wait() -> Iterator[Wait]:
    """Runs a coroutine to its end, always on the same event loop."""
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


@pytest.fixture(scope="session")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., BaseModel]:
    """models.rand's model of a type, loaded; "llama-tied" ties its embeddings."""

    @cache
    def load(name: str) -> BaseModel:
        model_type, _, tied = name.partition("-")
        directory = tmp_path_factory.mktemp(name) / "model"
        return base_model.load(name, str(models.rand(directory, model_type, tied=bool(tied))))

    return load


@pytest.fixture(scope="session")
def generator_of(
    base_of: Callable[[str], BaseModel], wait: Wait
) -> Iterator[Callable[[str], EmbeddedGenerator]]:
    """A generator on base_of's model, made once."""
    made: dict[str, EmbeddedGenerator] = {}

    def get(name: str) -> EmbeddedGenerator:
        if name not in made:
            made[name] = EmbeddedGenerator(base_of(name))
        return made[name]

    yield get
    for generator in made.values():
        wait(generator.close())


@pytest.fixture
def generator(generator_of: Callable[[str], EmbeddedGenerator]) -> EmbeddedGenerator:
    """On a random Qwen3."""
    return generator_of("qwen3")


@pytest.fixture
def sample_all(wait: Wait) -> Callable[..., list[SampleResult]]:
    """Submits calls together and waits for all."""

    def run(generator: EmbeddedGenerator, *calls: SampleCall) -> list[SampleResult]:
        async def gather() -> list[SampleResult]:
            return await asyncio.gather(*(generator.sample(c) for c in calls))

        return wait(gather())

    return run
