"""A server whose generator takes a token's step, or a snapshot, when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from backend.generator.bigram import BigramGenerator
from backend.resources.engines import Engines
from backend.trainer import bigram
from backend.trainer.base import Weights
from backend.trainer.bigram_trainer import BigramTrainer
from tests.services.harness import MODEL, Running, loop, serving


class Steps:
    """In the place of the generator's lock: each entry is a step, and waits until it is allowed."""

    def __init__(self) -> None:
        self._allowed = asyncio.Semaphore(0)
        self.is_open = True
        self.num_waiting = 0

    async def __aenter__(self) -> None:
        if self.is_open:
            return
        self.num_waiting += 1
        try:
            await self._allowed.acquire()
        finally:
            self.num_waiting -= 1

    async def __aexit__(self, *_: object) -> None:
        pass

    def allow(self, count: int) -> None:
        for _ in range(count):
            loop().call_soon_threadsafe(self._allowed.release)

    def open(self) -> None:
        self.is_open = True
        self.allow(1000)


class GatedGenerator(BigramGenerator):
    """`steps.is_open` False, `may_add` cleared: they wait. `raises`: what add_snapshot does."""

    def __init__(self) -> None:
        super().__init__(bigram.load(MODEL))
        self.steps = Steps()
        self._step = self.steps  # pyright: ignore[reportAttributeAccessIssue]
        self.may_add = asyncio.Event()
        self.may_add.set()
        self.raises: BaseException | None = None
        self.added: list[str] = []
        self.dropped: list[str] = []

    async def add_snapshot(self, snapshot: str, weights: Weights) -> None:
        await self.may_add.wait()
        if self.raises is not None:
            raise self.raises
        await super().add_snapshot(snapshot, weights)
        self.added.append(snapshot)

    def drop_snapshot(self, snapshot: str) -> None:
        super().drop_snapshot(snapshot)
        self.dropped.append(snapshot)

    def let_add(self) -> None:
        loop().call_soon_threadsafe(self.may_add.set)


@contextmanager
def serving_gated(store: Path, **config: Any) -> Iterator[tuple[Running, GatedGenerator]]:
    generator = GatedGenerator()

    def engines(name: str, path: str) -> Engines:
        return Engines(
            trainer=BigramTrainer(bigram.load(MODEL)), generator=generator, tokenizer_dir=None
        )

    with serving(store, engines=engines, **config) as running:
        try:
            yield running, generator
        finally:
            generator.steps.open()
            generator.let_add()
