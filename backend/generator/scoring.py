"""Log-probabilities of prompts, from hidden states, a few rows of logits at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from backend.generator import torch_sampling
from backend.generator.base import Topk
from backend.generator.sampling import ABSENT_LOGPROB

Array = np.ndarray


def score_prompt(
    hidden_TH: Tensor,
    tokens_T: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    chunk_rows: int,
    k: int,
) -> tuple[Array, Topk | None]:
    """Scores each token of a prompt given those before it.

    Args:
        hidden_TH: the hidden states of the same tokens.
        head: makes logits (rows, V) from hidden states (rows, H).
        chunk_rows: rows of logits at a time.
        k: how many of the likeliest tokens to list; 0 lists none.

    Returns:
        logprobs float32 (T,), NaN at 0, and the likeliest tokens of each position, none at 0.
    """
    logprobs = np.full(len(tokens_T), np.nan, np.float32)
    token_ids = np.zeros((len(tokens_T), k), np.int32)
    best = np.full((len(tokens_T), k), ABSENT_LOGPROB, np.float32)
    for start in range(1, len(tokens_T), chunk_rows):
        here = slice(start, min(start + chunk_rows, len(tokens_T)))
        logits = head(hidden_TH[start - 1 : here.stop - 1])
        chosen = logits.gather(1, tokens_T[here, None])[:, 0]
        logprobs[here] = (chosen - logits.logsumexp(dim=1)).cpu().numpy()
        if k:
            some = torch_sampling.topk(logits, k)
            token_ids[here], best[here] = some.token_ids, some.logprobs
    return logprobs, Topk(token_ids=token_ids, logprobs=best) if k else None
