"""A started engine, as tests use it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from backend.generator.base import Generator, SampleCall, SampleResult
from backend.trainer.base import LoraConfig, Trainer, Weights
from tests.conformance.engines import Engine


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
        """A new session; of the closed-form model the output head alone is trained."""
        session = self.name("session")
        lora = head_lora(rank=rank, alpha=alpha, seed=seed)
        if not self.engine.is_succ16:
            lora = replace(lora, train_attn=True, train_mlp=True)
        self.trainer.create_session(session, lora)
        return session

    def publish(self, session: str) -> str:
        snapshot = self.name("snapshot")
        self.add(snapshot, self.trainer.weights(session))
        return snapshot

    def add(self, snapshot: str, weights: Weights) -> None:
        self.wait(self.generator.add_snapshot(snapshot, weights))

    def drop(self, snapshot: str) -> None:
        """From the event loop, as the service does."""

        async def drop() -> None:
            self.generator.drop_snapshot(snapshot)

        self.wait(drop())

    def sample(self, call: SampleCall) -> SampleResult:
        return self.wait(self.generator.sample(call))

    def sample_all(self, calls: Sequence[SampleCall]) -> list[SampleResult | BaseException]:
        """All at the same time; what a call raised stands for its result."""

        async def gather() -> list[SampleResult | BaseException]:
            running = (self.generator.sample(c) for c in calls)
            return await asyncio.gather(*running, return_exceptions=True)

        return self.wait(gather())


def head_lora(*, rank: int = 4, alpha: float = 16.0, seed: int = 0) -> LoraConfig:
    """The output head alone, which every engine has."""
    return LoraConfig(rank=rank, alpha=alpha, seed=seed, train_attn=False, train_mlp=False)
