"""Opens the engines of a base model. The one place that imports them, and only those that are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backend.generator.base import Generator
from backend.resources.builtin import BIGRAM
from backend.trainer.base import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """A trainer and a generator over one base model.

    tokenizer_dir: where the tokenizer's files lie; None: the model has none.
    """

    trainer: Trainer
    generator: Generator
    tokenizer_dir: Path | None


OpenEngines = Callable[[str, str], Engines]


def open_engines(name: str, path: str) -> Engines:
    """Loads the model; blocks for as long as that takes.

    Args:
        name: what clients call it.
        path: where to find it: a builtin model's name, a directory, or a Hugging Face id.

    Raises:
        PostTrainingError: MODEL_NOT_FOUND, and what the engines refuse.
    """
    return _open_bigram(path) if path == BIGRAM.name else _open_torch(name, path)


def _open_bigram(path: str) -> Engines:
    from backend.generator.bigram import BigramGenerator
    from backend.trainer import bigram

    model = bigram.load(path)
    return Engines(
        trainer=bigram.BigramTrainer(model), generator=BigramGenerator(model), tokenizer_dir=None
    )


def _open_torch(name: str, path: str) -> Engines:
    from backend.generator.embedded import EmbeddedGenerator
    from backend.trainer import base_model
    from backend.trainer.torch_trainer import TorchTrainer

    base = base_model.load(name, path)
    return Engines(
        trainer=TorchTrainer(base),
        generator=EmbeddedGenerator(base),
        tokenizer_dir=base.tokenizer_dir,
    )
