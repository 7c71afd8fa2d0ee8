"""A language model small enough to check by hand.

    logits after token x = (head + scale * B @ A) @ h,   h = hidden_scale * (the x-th unit vector)

`builtin:bigram16`: 16 tokens and hidden_scale 4, what one-hot embeddings of 16 tokens become in a
transformer that ends in RMSNorm. The successor (x + 1) mod 16 has logit 4, every other token 0, so
its log-probability is 4 - ln(e^4 + 15) = -0.242738, and each other's -4.242738.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from backend.trainer.base import Array, FullWeights, ModelInfo, Weights
from together_post_training.errors import Reason, fail
from together_post_training.samples import Limits

if TYPE_CHECKING:
    from backend.generator.bigram import BigramGenerator
    from backend.trainer.bigram_trainer import BigramTrainer

HEAD = "lm_head.weight"
LORA_A = "base_model.model.lm_head.lora_A.weight"
LORA_B = "base_model.model.lm_head.lora_B.weight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BigramModel:
    """The frozen base, shared by a trainer and its generators.

    head: float64 (V, V); hidden_scale * head[j, i] is the logit of token j after token i.
    decode: text of a list of tokens; None: the model has no text, and stop strings are refused.
    """

    name: str
    head: Array
    hidden_scale: float = 1.0
    max_seq_length: int = 1024
    eos_tokens: tuple[int, ...] = ()
    max_lora_rank: int = 64
    decode: Callable[[Sequence[int]], str] | None = None

    @property
    def vocab_size(self) -> int:
        return len(self.head)

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            name=self.name,
            architecture="Bigram",
            limits=Limits(vocab_size=self.vocab_size, max_seq_length=self.max_seq_length),
            eos_tokens=self.eos_tokens,
            max_lora_rank=self.max_lora_rank,
        )

    def logprobs(self, weights: Weights | None) -> Array:
        """float64 (V, V): [i, j] is log p(j | i), of the base alone when `weights` is None."""
        logits = self.hidden_scale * self._head_of(weights).T
        shifted = logits - logits.max(axis=1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))

    def _head_of(self, weights: Weights | None) -> Array:
        if weights is None:
            return self.head
        if isinstance(weights, FullWeights):
            return weights.tensors[HEAD].astype(np.float64)
        a, b = (weights.tensors[name].astype(np.float64) for name in (LORA_A, LORA_B))
        return self.head + weights.lora.scale * (b @ a)

    def trainer(self) -> BigramTrainer:
        from backend.trainer.bigram_trainer import BigramTrainer

        return BigramTrainer(self)

    def generator(self) -> BigramGenerator:
        from backend.generator.bigram import BigramGenerator

        return BigramGenerator(self)


def successor_head(vocab_size: int) -> Array:
    """The head of a model that expects each token's successor, and 0 after the last one."""
    return np.roll(np.eye(vocab_size), 1, axis=0)


def decode_letters(tokens: Sequence[int]) -> str:
    """Token i is the i-th letter: 0 = 'a'."""
    return "".join(chr(ord("a") + int(token)) for token in tokens)


def load(name: str) -> BigramModel:
    """Raises MODEL_NOT_FOUND for another name than builtin:bigram16."""
    if name == "builtin:bigram16":
        return BigramModel(
            name=name, head=successor_head(16), hidden_scale=4.0, decode=decode_letters
        )
    raise fail(
        Reason.MODEL_NOT_FOUND,
        f"Unknown bigram model {name!r}: the only one is builtin:bigram16.",
        model=name,
    )
