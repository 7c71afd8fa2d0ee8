"""Causal attention over packed sequences, as a function that transformers' models call.

Importing this module registers it under the name PACKED. A model in that mode takes one row of packed tokens and
the keyword `runs`, which it passes down; it needs no mask. Each sequence attends to itself alone and is computed
exactly as it would be without neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from backend.trainer.packing import Run

PACKED = "packed"

# Queries computed at a time where a window is shorter than the sequence: bounds the mask to (block, block + window).
_WINDOW_BLOCK = 512


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
    if _takes_varlen(query, value, runs, sliding_window):
        return _varlen(query, key, value, tuple(runs), scaling), None
    sizes = [run.num_tokens for run in runs]
    outputs = []
    for run, *parts in zip(
        runs, *(t.split(sizes, dim=2) for t in (query, key, value)), strict=True
    ):
        q, k, v = (_unpack(part, run) for part in parts)
        output = _attend(q, k, v, scaling, sliding_window)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return packed.unsqueeze(0), None


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None) -> Tensor:
    """Sequences of one length n: (count, heads, n, D), of k and v perhaps fewer heads, to the same shape."""
    length, is_grouped = q.shape[2], q.shape[1] != k.shape[1]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped
        )
    outputs = []
    for start in range(0, length, _WINDOW_BLOCK):
        stop, first = min(start + _WINDOW_BLOCK, length), max(0, start + 1 - window)
        keys, values = k[:, :, first:stop], v[:, :, first:stop]
        mask = _band(stop - start, stop - first, window, q.dtype, q.device)
        block = q[:, :, start:stop]
        outputs.append(
            F.scaled_dot_product_attention(
                block, keys, values, attn_mask=mask, scale=scale, enable_gqa=is_grouped
            )
        )
    return torch.cat(outputs, dim=2)


def _takes_varlen(query: Tensor, value: Tensor, runs: Sequence[Run], window: int | None) -> bool:
    """Whether one kernel computes all sequences: on a GPU, in half precision, of heads that it knows, windows not
    counting. Anything else goes through SDPA, a length at a time."""
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[3] == value.shape[3] <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and (window is None or max(run.length for run in runs) <= window)
    )


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...], scale: float | None
) -> Tensor:
    """As `packed_attention`."""
    starts, longest = _starts(runs, query.device), max(run.length for run in runs)
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    output = varlen_attn(
        q,
        k,
        v,
        starts,
        starts,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)
    return output.unsqueeze(0)


@lru_cache(maxsize=4)
def _starts(runs: tuple[Run, ...], device: torch.device) -> Tensor:
    """int32 (sequences + 1,): where each begins, and where the last ends. The same for all layers."""
    lengths = [run.length for run in runs for _ in range(run.count)]
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def _unpack(packed: Tensor, run: Run) -> Tensor:
    """(1, heads, count * length, D) as (count, heads, length, D), without a copy."""
    return packed[0].unflatten(1, (run.count, run.length)).transpose(0, 1)


@lru_cache(maxsize=8)
def _band(
    num_queries: int, num_keys: int, window: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """(queries, keys): 0 where one of the last tokens of a stretch sees one of its keys, -inf elsewhere.

    The same for all layers, and for all blocks of a sequence but the ends; who holds on to it in backward shares it.
    """
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    last = num_keys - num_queries
    is_seen = ones.tril(last) & ones.triu(last + 1 - window)
    return torch.zeros(is_seen.shape, dtype=dtype, device=device).masked_fill_(~is_seen, -torch.inf)


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
