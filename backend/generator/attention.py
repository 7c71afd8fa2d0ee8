"""Attention for generation, plugged into transformers: packed parts of prompts, and one token for each running sample.

Both see the tokens of all sequences as one row of T without padding, and store keys and values in the cache
themselves, so that the model runs without a cache of its own. What to do comes as the keyword `plan`.

Shapes: T packed tokens, N heads, K heads of keys and values, G = N / K heads that share one, D of a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from backend.generator.kv_cache import Pool, Row

NAME = "together_generator"
CPU = torch.device("cpu")

# Queries per block where they do not see all before them: bounds the mask to (block, block + window).
_BLOCK = 512


class Plan(Protocol):
    """Which of the packed tokens attends to what."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        """query (1, N, T, D), key and value (1, K, T, D) -> (1, T, N, D).

        A token sees itself and those before it, with `window` only so many in all.
        """
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """Packed tokens that go on a sequence of which `row` holds `start` tokens."""

    row: Row
    start: int
    num_tokens: int


class PrefillPlan:
    """Parts of sequences, one after another; each is stored in its row."""

    def __init__(self, parts: Sequence[Part], device: torch.device = CPU) -> None:
        self._parts: list[tuple[int, int, Part]] = []
        stop = 0
        for part in parts:
            start, stop = stop, stop + part.num_tokens
            self._parts.append((start, stop, part))
        self._stores = _stores(self._parts, device)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        keys_T, values_T = key[0].transpose(0, 1), value[0].transpose(0, 1)
        for store in self._stores:
            store.write(layer, keys_T, values_T)
        out_T = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
        for start, stop, part in self._parts:
            q, k, v = (x[0, :, start:stop] for x in (query, key, value))
            length = part.start + part.num_tokens
            if part.start:
                k, v = part.row.pool.read_row(layer, part.row.index, length)
            elif window is None or length <= window:
                out_T[start:stop] = _causal(q, k, v, scale)
                continue
            out_T[start:stop] = _masked(q, k, v, scale, window or length)
        return out_T[None]


class DecodePlan:
    """One token for each running sample, of all that run.

    Args:
        rows: of the samples, in the order of their tokens.
        lengths: of the samples, the new token included.
    """

    def __init__(
        self, rows: Sequence[Row], lengths: Sequence[int], device: torch.device = CPU
    ) -> None:
        members: dict[Pool, list[int]] = {}
        for i, row in enumerate(rows):
            members.setdefault(row.pool, []).append(i)
        self._groups = []
        for pool, order in members.items():
            order.sort(key=lambda i: rows[i].index)
            assert len(order) == pool.num_running
            self._groups.append(_Group(pool, order, [lengths[i] for i in order], device))

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        q_T, k_T, v_T = (x[0].transpose(0, 1) for x in (query, key, value))
        if len(self._groups) == 1 and self._groups[0].is_in_order:
            return self._groups[0].attend(layer, q_T, k_T, v_T, scale, window)[None]
        out_T = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
        for group in self._groups:
            order = group.order
            rows = (x.index_select(0, order) for x in (q_T, k_T, v_T))
            out_T.index_copy_(0, order, group.attend(layer, *rows, scale, window))
        return out_T[None]


class _Group:
    """The samples whose rows share a pool, in the order of their rows."""

    def __init__(
        self, pool: Pool, order: list[int], lengths: list[int], device: torch.device
    ) -> None:
        self._pool = pool
        self.is_in_order = order == list(range(len(order)))
        self.order = torch.tensor(order, device=device)
        self._lengths = torch.tensor(lengths, device=device)
        self._longest = max(lengths)
        rows = torch.arange(len(order), device=device)
        self._places = rows * pool.capacity + self._lengths - 1
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """q (n, N, D), k and v (n, K, D) -> (n, N, D)."""
        self._pool.write(layer, self._places, k, v)
        keys, values = self._pool.read(layer, self._longest)
        # The heads that share keys become queries of one head: the keys are read once, and never repeated.
        grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
        out = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=self._mask(window, q.dtype), scale=scale
        )
        return out.reshape(q.shape[0], q.shape[1], v.shape[2])

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """(n, 1, 1, longest): 0 where a sample's token sees, -inf elsewhere."""
        if window not in self._masks:
            positions = torch.arange(self._longest, device=self._lengths.device)
            lengths = self._lengths[:, None]
            hidden = positions >= lengths
            if window is not None:
                hidden |= positions < lengths - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask.masked_fill_(hidden, -torch.inf)
            self._masks[window] = mask[:, None, None]
        return self._masks[window]


@dataclass(frozen=True, slots=True)
class _Store:
    """Packed tokens `sources` (n,), None for all, go to `places` (n,) of a pool."""

    pool: Pool
    sources: Tensor | None
    places: Tensor

    def write(self, layer: int, keys_T: Tensor, values_T: Tensor) -> None:
        if self.sources is not None:
            keys_T = keys_T.index_select(0, self.sources)
            values_T = values_T.index_select(0, self.sources)
        self.pool.write(layer, self.places, keys_T, values_T)


def _stores(parts: Iterable[tuple[int, int, Part]], device: torch.device) -> list[_Store]:
    by_pool: dict[Pool, list[tuple[int, int, Part]]] = {}
    for entry in parts:
        by_pool.setdefault(entry[2].row.pool, []).append(entry)
    stores = []
    for pool, entries in by_pool.items():
        places = torch.cat(
            [
                torch.arange(part.num_tokens, device=device)
                + (part.row.index * pool.capacity + part.start)
                for _, _, part in entries
            ]
        )
        sources = None
        if len(by_pool) > 1:
            sources = torch.cat([torch.arange(*span, device=device) for *span, _ in entries])
        stores.append(_Store(pool, sources, places))
    return stores


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """q (N, n, D), k and v (K, n, D) -> (n, N, D)."""
    out = F.scaled_dot_product_attention(*_grouped(q, k, v), is_causal=True, scale=scale)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _masked(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int) -> Tensor:
    """q (N, n, D) of the last n of m tokens, k and v (K, m, D) -> (n, N, D); each sees no more than `window` tokens,
    itself included."""
    num_tokens, num_before = q.shape[1], k.shape[1] - q.shape[1]
    blocks = []
    for start in range(0, num_tokens, _BLOCK):
        stop = min(start + _BLOCK, num_tokens)
        first, end = max(0, num_before + start - window + 1), num_before + stop
        queries = torch.arange(num_before + start, end, device=q.device)
        distance = queries[:, None] - torch.arange(first, end, device=q.device)
        seen = (distance >= 0) & (distance < window)
        out = F.scaled_dot_product_attention(
            *_grouped(q[:, start:stop], k[:, first:end], v[:, first:end]),
            attn_mask=seen,
            scale=scale,
        )
        blocks.append(out.permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(blocks)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(K, G, n, D) each; keys and values are views that repeat without a copy."""
    q = q.unflatten(0, (k.shape[0], -1))
    num_groups = q.shape[1]
    return (
        q,
        k[:, None].expand(-1, num_groups, -1, -1),
        v[:, None].expand(-1, num_groups, -1, -1),
    )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: Plan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """What transformers' models call. Features that it lacks are refused when a model is loaded; this holds if one
    slips through."""
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise NotImplementedError(f"generation does not compute {name}")
    layer = module.layer_idx
    assert isinstance(layer, int)
    return plan.attend(layer, query, key, value, scale=scaling, window=sliding_window), None


def _no_mask(*_: object, **__: object) -> None:
    """The plan knows who sees whom."""


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)
