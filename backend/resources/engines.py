"""Opens the engines of a base model. The one place that imports them, and only those that are needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from backend.generator.base import Generator
from backend.generator.sglang.options import SglangOptions
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
    kv_cache_bytes: int | None = None
    """Memory of an embedded generator for keys and values. None: 2 GiB, or more if the model's window needs it."""
    max_running: int = 128
    """Samples that an embedded generator computes at once."""
    max_prefill_tokens: int = 512
    """Tokens of prompts that an embedded generator reads in one step while samples run."""

    num_generator_replicas: int = 1
    """Generators of each model, among which calls are shared out."""
    batch_invariant: bool = False
    """The embedded generator gives the same bits whatever else it computes; see `EmbeddedGenerator`."""
    sglang: SglangOptions | None = None
    """Sample through SGLang; None: with the embedded generator."""


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


def open_engines(
    name: str, path: str, options: EngineOptions = DEFAULT_OPTIONS, scratch: Path | None = None
) -> Engines:
    """Loads the model; blocks for as long as that takes.

    Args:
        name: what clients call it.
        path: where to find it: a builtin model's name, a directory, or a Hugging Face id.
        scratch: a directory for what engines hand to other programs: given where one of them does.

    Raises:
        PostTrainingError: MODEL_NOT_FOUND, and what the engines refuse.
    """
    if path != BIGRAM.name:
        return _open_torch(name, path, options, scratch)
    if replace(options, num_generator_replicas=1) != DEFAULT_OPTIONS:
        log.warning(
            "%r has no use for the options of engines: it computes in float64 on the CPU", name
        )
    return _open_bigram(path, options)


def _open_bigram(path: str, options: EngineOptions) -> Engines:
    from backend.generator.bigram import BigramGenerator
    from backend.trainer import bigram, bigram_trainer

    model = bigram.load(path)
    num_replicas = options.num_generator_replicas
    return Engines(
        trainer=bigram_trainer.BigramTrainer(model),
        generator=_as_one([BigramGenerator(model) for _ in range(num_replicas)]),
        tokenizer_dir=None,
        # It computes on the event loop, a little of each call in turn.
        max_sampling=16,
        num_generator_replicas=num_replicas,
    )


def _open_torch(name: str, path: str, options: EngineOptions, scratch: Path | None) -> Engines:
    from backend.generator.embedded import EmbeddedGenerator
    from backend.generator.sglang.start import SglangServers
    from backend.trainer import base_model
    from backend.trainer.torch_trainer import TorchTrainer

    base = base_model.load(name, path, dtype=options.dtype, device=options.device)
    num_replicas = options.num_generator_replicas
    servers = None
    if options.sglang is not None:
        assert scratch is not None, "SGLang reads snapshots from files"
        # Before the trainer, which looks at what memory they leave it.
        servers = SglangServers(base, options.sglang, num_replicas, scratch)
    try:
        trainer = TorchTrainer(
            base, token_budget=options.token_budget, activation_bytes=options.activation_bytes
        )
        generators: Sequence[Generator] = (
            servers.generators(trainer)
            if servers
            else [
                EmbeddedGenerator(
                    base,
                    max_running=options.max_running,
                    cache_bytes=options.kv_cache_bytes,
                    max_prefill_tokens=options.max_prefill_tokens,
                    batch_invariant=options.batch_invariant,
                )
                for _ in range(num_replicas)
            ]
        )
    except BaseException:
        if servers:
            servers.close()
        raise
    return Engines(
        trainer=trainer,
        generator=_as_one(generators),
        tokenizer_dir=base.tokenizer_dir,
        max_sampling=_MAX_SAMPLING * len(generators),
        num_generator_replicas=len(generators),
    )


def _as_one(replicas: Sequence[Generator]) -> Generator:
    from backend.generator.replicas import Replicas

    return Replicas(replicas) if len(replicas) > 1 else replicas[0]
