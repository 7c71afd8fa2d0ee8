"""A trainer and a generator over SGLang, as the conformance suite wants them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from backend.generator.base import Generator, SampleCall, SampleResult
from backend.generator.sglang.options import SglangOptions
from backend.generator.sglang.start import SglangServers
from backend.trainer import base_model
from backend.trainer.base import ModelInfo, Trainer, Weights
from backend.trainer.torch_trainer import TorchTrainer
from tests import models
from tests.sglang.environment import ARGUMENTS, Installation


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A model to run the suite over; see `tests.conformance.engines.Engine`."""

    name: str
    make: Callable[[Path], Path]
    is_succ16: bool
    tolerance: float


# On a CPU SGLang pads what the MLP has inside to a multiple of 32, and adapters then do not fit: so it is one here.
KINDS = [
    Kind(name="sglang-succ16", make=models.succ16, is_succ16=True, tolerance=5e-5),
    Kind(
        name="sglang-qwen3",
        make=lambda directory: models.rand(directory, "qwen3", intermediate_size=64),
        is_succ16=False,
        tolerance=1e-4,
    ),
    Kind(
        name="sglang-llama-tied",
        make=lambda directory: models.rand(directory, "llama", tied=True, intermediate_size=64),
        is_succ16=False,
        tolerance=1e-4,
    ),
]


def options(sglang: Installation) -> SglangOptions:
    return SglangOptions(
        python=str(sglang.python), arguments=ARGUMENTS, env=tuple(sglang.variables.items())
    )


def start(kind: Kind, sglang: Installation, scratch: Path) -> tuple[Trainer, Generator]:
    """A server of the generator's own. The model and what is published are written to `scratch`."""
    directory = scratch / "model"
    if not directory.exists():
        kind.make(directory)
    base = base_model.load("torch", str(directory), dtype="float32", device="cpu")
    servers = SglangServers(base, options(sglang), 1, scratch)
    trainer = TorchTrainer(base)
    (generator,) = servers.generators(trainer)
    return trainer, generator


@dataclass(frozen=True, slots=True)
class Greedy:
    """A generator that takes every call for one at temperature 0."""

    generator: Generator

    @property
    def model(self) -> ModelInfo:
        return self.generator.model

    async def add_snapshot(self, snapshot: str, weights: Weights) -> None:
        await self.generator.add_snapshot(snapshot, weights)

    def drop_snapshot(self, snapshot: str) -> None:
        self.generator.drop_snapshot(snapshot)

    def move(self, old: str, new: str) -> None:
        self.generator.move(old, new)

    async def sample(self, call: SampleCall) -> SampleResult:
        return await self.generator.sample(replace(call, temperature=0.0))

    async def close(self) -> None:
        await self.generator.close()
