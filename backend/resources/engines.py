"""Opens the engines of a base model. The one place that imports them, and only those that are needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from backend.generator.base import Generator
from backend.resources.builtin import BIGRAM
from backend.trainer.base import Trainer

log = logging.getLogger(__name__)

_MAX_SAMPLING = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the engines of transformers' models compute."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What weights are kept in; auto: float32 on a CPU, bfloat16 on a GPU. Adapters, and weights that are trained
    whole, are float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    token_budget: int | None = None
    """Tokens that go through the trainer at once, unless a single sample has more; None: by what memory there is."""
    activation_bytes: int | None = None
    """Memory for what a pass keeps for backward; longer samples are computed twice. None: half of what is free."""

    num_generator_replicas: int = 1
    """Generators of each model, among which calls are shared out."""


DEFAULT_OPTIONS = EngineOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """A trainer and a generator over one base model.

    tokenizer_dir: where the tokenizer's files lie; None: the model has none.
    max_sampling: calls that the generator is given at a time. Enough to keep it busy: the others wait outside, where
        they are cheap and nobody's many keep another's few waiting.
    num_generator_replicas: how many generators it consists of.
    """

    trainer: Trainer
    generator: Generator
    tokenizer_dir: Path | None
    max_sampling: int = _MAX_SAMPLING
    num_generator_replicas: int = 1


OpenEngines = Callable[[str, str], Engines]


def open_engines(name: str, path: str, options: EngineOptions = DEFAULT_OPTIONS) -> Engines:
    """Loads the model; blocks for as long as that takes.

    Args:
        name: what clients call it.
        path: where to find it: a builtin model's name, a directory, or a Hugging Face id.

    Raises:
        PostTrainingError: MODEL_NOT_FOUND, and what the engines refuse.
    """
    if path != BIGRAM.name:
        return _open_torch(name, path, options)
    if replace(options, num_generator_replicas=1) != DEFAULT_OPTIONS:
        log.warning(
            "%r has no use for the options of engines: it computes in float64 on the CPU", name
        )
    return _open_bigram(path, options)


def _open_bigram(path: str, options: EngineOptions) -> Engines:
    from backend.generator.bigram import BigramGenerator
    from backend.trainer import bigram, bigram_trainer

    model = bigram.load(path)
    return Engines(
        trainer=bigram_trainer.BigramTrainer(model),
        generator=_replicated(lambda: BigramGenerator(model), options),
        tokenizer_dir=None,
        # It computes on the event loop, a little of each call in turn.
        max_sampling=16,
        num_generator_replicas=options.num_generator_replicas,
    )


def _open_torch(name: str, path: str, options: EngineOptions) -> Engines:
    from backend.generator.embedded import EmbeddedGenerator
    from backend.trainer import base_model
    from backend.trainer.torch_trainer import TorchTrainer

    base = base_model.load(name, path, dtype=options.dtype, device=options.device)
    trainer = TorchTrainer(
        base, token_budget=options.token_budget, activation_bytes=options.activation_bytes
    )
    return Engines(
        trainer=trainer,
        generator=_replicated(lambda: EmbeddedGenerator(base), options),
        tokenizer_dir=base.tokenizer_dir,
        max_sampling=_MAX_SAMPLING * options.num_generator_replicas,
        num_generator_replicas=options.num_generator_replicas,
    )


def _replicated(make: Callable[[], Generator], options: EngineOptions) -> Generator:
    from backend.generator.replicas import Replicas

    replicas = [make() for _ in range(options.num_generator_replicas)]
    return Replicas(replicas) if len(replicas) > 1 else replicas[0]
