"""The engines that the conformance suites run over. To add one, add a line to ENGINES.

An engine is a trainer and a generator of one base model. `is_succ16` marks those whose model is the
closed-form bigram: 16 tokens, the successor's logit 4 and every other 0 (after RMSNorm one-hot
embeddings become 4 times a unit vector, the head is 1 at the successor); they also run the cases
whose numbers are worked out by hand. All run the relational laws.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from backend.generator.base import Generator
from backend.generator.embedded import EmbeddedGenerator
from backend.generator.replicas import Replicas
from backend.trainer import base_model
from backend.trainer.base import Trainer
from backend.trainer.bigram import BigramModel, load
from backend.trainer.torch_trainer import TorchTrainer
from tests import models


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """`start` builds a fresh pair; `tolerance`: largest difference between ways to compute a logprob;
    `repeat_tolerance`: between two answers to the same call, alone."""

    name: str
    start: Callable[[], tuple[Trainer, Generator]]
    is_succ16: bool
    tolerance: float
    repeat_tolerance: float = 0.0


def _pair(model: BigramModel) -> tuple[Trainer, Generator]:
    return model.trainer(), model.generator()


def _bigram_replicas(count: int) -> tuple[Trainer, Generator]:
    model = _random_bigram()
    return model.trainer(), Replicas([model.generator() for _ in range(count)])


def _random_bigram() -> BigramModel:
    """Logits with a spread of about 2, so that a shift or a dropped adapter shows."""
    head = np.random.default_rng(7).normal(scale=2.0, size=(48, 48))
    return BigramModel(name="random-bigram", head=head, max_seq_length=64)


def _torch(
    make: Callable[[Path], Path], device: base_model.Device = "cpu", *, num_generators: int = 1
) -> tuple[Trainer, Generator]:
    """All engines on one copy of the weights."""
    with tempfile.TemporaryDirectory() as scratch:
        where = str(make(Path(scratch) / "model"))
        base = base_model.load("torch", where, dtype="float32", device=device)
    generators = [EmbeddedGenerator(base) for _ in range(num_generators)]
    return TorchTrainer(base), Replicas(generators) if num_generators > 1 else generators[0]


ENGINES = [
    # What crosses the seam is float32: 4 has a spacing of 5e-7.
    Engine(
        name="bigram16",
        start=lambda: _pair(load("builtin:bigram16")),
        is_succ16=True,
        tolerance=1e-6,
    ),
    Engine(
        name="random-bigram",
        start=lambda: _pair(_random_bigram()),
        is_succ16=False,
        tolerance=1e-6,
    ),
    Engine(
        name="random-bigram-replicas",
        start=lambda: _bigram_replicas(3),
        is_succ16=False,
        tolerance=1e-6,
    ),
    # float32 on weights that are large on purpose: ways to add up differ by up to 8e-5.
    Engine(
        name="torch-succ16",
        start=lambda: _torch(models.succ16),
        is_succ16=True,
        tolerance=5e-5,
    ),
    Engine(
        name="torch-qwen3",
        start=lambda: _torch(lambda directory: models.rand(directory, "qwen3")),
        is_succ16=False,
        tolerance=1e-4,
    ),
    Engine(
        name="torch-qwen3-replicas",
        start=lambda: _torch(lambda directory: models.rand(directory, "qwen3"), num_generators=2),
        is_succ16=False,
        tolerance=1e-4,
    ),
    Engine(
        name="torch-qwen3-moe",
        start=lambda: _torch(lambda directory: models.rand(directory, "qwen3_moe")),
        is_succ16=False,
        tolerance=1e-4,
    ),
    Engine(
        name="torch-llama-tied",
        start=lambda: _torch(lambda directory: models.rand(directory, "llama", tied=True)),
        is_succ16=False,
        tolerance=1e-4,
    ),
]

if torch.cuda.is_available():
    # Sums in other orders than on a CPU; TF32, which rounds to 10 bits, is off unless someone turns it on.
    ENGINES += [
        Engine(
            name="cuda-succ16",
            start=lambda: _torch(models.succ16, "cuda"),
            is_succ16=True,
            tolerance=5e-5,
        ),
        Engine(
            name="cuda-qwen3",
            start=lambda: _torch(lambda directory: models.rand(directory, "qwen3"), "cuda"),
            is_succ16=False,
            tolerance=2e-4,
        ),
    ]
