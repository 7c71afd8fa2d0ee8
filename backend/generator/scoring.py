"""Scores of prompts from hidden states, a few rows of logits at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from backend.generator import torch_sampling
from backend.generator.base import Topk
from backend.generator.prompt_scores import PromptScores

Array = np.ndarray


def score_part(
    scores: PromptScores,
    hidden_TH: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    first_token: int,
    chunk_rows: int,
    is_apart: bool = False,
) -> None:
    """Scores what a part of a prompt predicts and is not scored yet.

    Args:
        hidden_TH: the hidden states of the tokens from number `first_token` on, which must not leave a gap to the parts
            before; those after the prompt are not looked at.
        head: makes logits (rows, V) from hidden states (rows, H).
        chunk_rows: rows of logits at a time.
        is_apart: each row is scored by itself.
    """
    stop = min(first_token + len(hidden_TH) + 1, scores.num_tokens)
    assert scores.next > first_token or scores.is_complete, "a part of the prompt was left out"
    while scores.next < stop:
        end = min(scores.next + chunk_rows, stop)
        rows = hidden_TH[scores.next - 1 - first_token : end - 1 - first_token]
        logits = head(rows)
        for some in torch_sampling.apart(logits) if is_apart else (logits,):
            scores.add(TorchRows(some), scores.next + len(some))


class TorchRows:
    """`Rows` of logits in torch, (B, V)."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._norms = logits.logsumexp(dim=1, keepdim=True)

    def logprobs(self, tokens: Array) -> Array:
        chosen = self._logits.gather(1, torch.from_numpy(tokens).to(self._logits.device))
        return (chosen - self._norms).cpu().numpy()

    def topk(self, k: int) -> Topk:
        return torch_sampling.topk(self._logits, k)

    def draw(self, temperature: float, uniforms: Array) -> Array:
        return torch_sampling.draw_many(self._logits, temperature, uniforms)
