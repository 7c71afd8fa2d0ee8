"""Attention over packed prompts and over the rows of a cache, against the formula written down plainly."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.generator import attention
from backend.generator.attention import DecodePlan, Part, PrefillPlan
from backend.generator.kv_cache import KVCache, Row

DIM, VALUE_DIM = 8, 6
# float32, values of order 1.
TOLERANCE = 2e-6


def random_qkv(
    num_tokens: int, *, heads: int = 6, kv_heads: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(1, heads, num_tokens, DIM, generator=generator),
        torch.randn(1, kv_heads, num_tokens, DIM, generator=generator),
        torch.randn(1, kv_heads, num_tokens, VALUE_DIM, generator=generator),
    )


def rows_for(lengths: list[int]) -> list[Row]:
    cache = KVCache(max_tokens=4096)
    return [cache.take(length) for length in lengths]


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """softmax(q k^T scale) v in float64, causal, (1, T, N, D) for one sequence."""
    num_groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(num_groups, dim=1).double() for x in (k, v))
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    scores = (q.double() @ k.transpose(2, 3) * scale).masked_fill(hidden, -torch.inf)
    return (scores.softmax(dim=3) @ v).transpose(1, 2).float()


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_packed_prompts_see_only_themselves(window, kv_heads):
    lengths = [5, 1, 12, 7]
    q, k, v = random_qkv(sum(lengths), kv_heads=kv_heads)
    plan = PrefillPlan([Part(row, 0, n) for row, n in zip(rows_for(lengths), lengths, strict=True)])
    got = plan.attend(0, q, k, v, scale=0.3, window=window)
    parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
    expected = torch.cat([plain(q, k, v, 0.3, window) for q, k, v in parts], dim=1)
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("window", [1, 5, 16, 40])
def test_windows_are_the_same_in_blocks(monkeypatch, window):
    monkeypatch.setattr(attention, "_BLOCK", 16)
    q, k, v = random_qkv(50)
    plan = PrefillPlan([Part(rows_for([50])[0], 0, 50)])
    got = plan.attend(0, q, k, v, scale=0.3, window=window)
    torch.testing.assert_close(got, plain(q, k, v, 0.3, window), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("window", [None, 3, 30])
def test_a_token_decoded_sees_what_it_would_in_one_pass(window):
    """Samples of different lengths in rows of different sizes, in an order that is not the cache's."""
    cache = KVCache(max_tokens=4096)
    lengths = [3, 70, 9, 20, 64]
    whole = [random_qkv(n + 4, seed=n) for n in lengths]
    rows = [cache.take(n + 4) for n in lengths]
    assert len({row.pool.capacity for row in rows}) == 2
    _read(whole, lengths, rows, window)
    for row in rows:
        row.pool.run(row)
    order = [3, 0, 4, 1, 2]
    for step in range(4):
        positions = [lengths[i] + step for i in order]
        new = [
            [x[:, :, p : p + 1] for x in whole[i]] for i, p in zip(order, positions, strict=True)
        ]
        plan = DecodePlan([rows[i] for i in order], [p + 1 for p in positions])
        q, k, v = (torch.cat(x, dim=2) for x in zip(*new, strict=True))
        for layer in (0, 1):
            got = plan.attend(layer, q, k, v, scale=0.3, window=window)
            for row, (i, p) in enumerate(zip(order, positions, strict=True)):
                expected = plain(*whole[i], 0.3, window)[0, p]
                torch.testing.assert_close(got[0, row], expected, rtol=0, atol=TOLERANCE)


def _read(whole, lengths: list[int], rows: list[Row], window: int | None) -> None:
    plan = PrefillPlan([Part(row, 0, n) for n, row in zip(lengths, rows, strict=True)])
    prompts = [[x[:, :, :n] for x in qkv] for qkv, n in zip(whole, lengths, strict=True)]
    q, k, v = (torch.cat(x, dim=2) for x in zip(*prompts, strict=True))
    for layer in (0, 1):
        plan.attend(layer, q, k, v, scale=0.3, window=window)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
@pytest.mark.parametrize("bounds", [[1, 2, 47], [16, 33], [20, 40], list(range(1, 50))])
def test_parts_of_a_prompt_see_what_was_read_before(monkeypatch, bounds, window):
    """However a prompt is cut, and beside one that is cut elsewhere, in a row of another size."""
    monkeypatch.setattr(attention, "_BLOCK", 16)
    one, other = random_qkv(50), random_qkv(90, seed=1)
    rows = rows_for([50, 90])
    got = []
    for start, stop in itertools.pairwise([0, *bounds, 50]):
        spans = [(one, start, stop), (other, start + 20 if start else 0, stop + 20)]
        q, k, v = (
            torch.cat([qkv[i][:, :, lo:hi] for qkv, lo, hi in spans], dim=2) for i in range(3)
        )
        plan = PrefillPlan(
            [Part(row, lo, hi - lo) for row, (_, lo, hi) in zip(rows, spans, strict=True)]
        )
        plan.attend(1, q, k, v, scale=0.3, window=window)
        out = plan.attend(0, q, k, v, scale=0.3, window=window)
        got.append(out.split([hi - lo for _, lo, hi in spans], dim=1))
    for whole, parts in zip((one, other), zip(*got, strict=True), strict=True):
        read = torch.cat(parts, dim=1)
        expected = plain(*whole, 0.3, window)[:, : read.shape[1]]
        torch.testing.assert_close(read, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("feature", ["softcap", "s_aux"])
def test_attention_that_it_lacks_is_refused(feature):
    module = torch.nn.Module()
    q, k, v = random_qkv(3)
    options: dict[str, Any] = {feature: 1.0}
    plan = PrefillPlan([Part(rows_for([3])[0], 0, 3)])
    with pytest.raises(NotImplementedError, match=feature):
        attention._attention(module, q, k, v, None, plan=plan, **options)
