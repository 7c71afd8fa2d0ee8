"""Causal attention over packed sequences, as a function that transformers' models call.

Importing this module registers it under the name PACKED. A model in that mode takes one row of packed tokens and
the keyword `runs`, which it passes down; it needs no mask. Each sequence attends to itself alone and is computed
exactly as it would be without neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from backend.trainer.packing import Run

PACKED = "packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    runs: Sequence[Run],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention of packed sequences to themselves.

    Args:
        query: (1, heads, T, D); key and value: (1, heads or fewer, T, D).
        runs: how the T tokens divide into sequences.
        sliding_window: how many tokens, its own included, a token sees; None sees all before it.

    Returns:
        (1, T, heads, D), and no attention weights.
    """
    _refuse_unknown(options)
    sizes = [run.num_tokens for run in runs]
    outputs = []
    for run, q, k, v in zip(
        runs, *(t.split(sizes, dim=2) for t in (query, key, value)), strict=True
    ):
        mask = _band(run.length, sliding_window, query.device)
        output = F.scaled_dot_product_attention(
            _unpack(q, run),
            _unpack(k, run),
            _unpack(v, run),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return packed.unsqueeze(0), None


def _unpack(packed: Tensor, run: Run) -> Tensor:
    """(1, heads, count * length, D) as (count, heads, length, D), without a copy."""
    return packed[0].unflatten(1, (run.count, run.length)).transpose(0, 1)


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """The mask of a sequence longer than the window; None where the causal mask says it all."""
    if window is None or length <= window:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril() & ones.triu(1 - window)


def _refuse_unknown(options: dict[str, object]) -> None:
    """Features that change the result are refused when a model is loaded; this holds if one slips through."""
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise NotImplementedError(f"packed attention does not compute {name}")
    if options.get("dropout"):
        raise NotImplementedError("packed attention does not compute dropout")


def _no_mask(*_: object, **__: object) -> None:
    """Packed attention masks by itself."""


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _no_mask)
