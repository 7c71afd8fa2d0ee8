"""Attention over packed prompts and over the rows of a cache, against the formula written down plainly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from backend.generator import attention
from backend.generator.attention import DecodePlan, PrefillPlan
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
    got = PrefillPlan([(n, []) for n in lengths]).attend(0, q, k, v, scale=0.3, window=window)
    parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
    expected = torch.cat([plain(q, k, v, 0.3, window) for q, k, v in parts], dim=1)
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("window", [1, 5, 16, 40])
def test_windows_are_the_same_in_blocks(monkeypatch, window):
    monkeypatch.setattr(attention, "_WINDOW_BLOCK", 16)
    q, k, v = random_qkv(50)
    got = PrefillPlan([(50, [])]).attend(0, q, k, v, scale=0.3, window=window)
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
    plan = PrefillPlan([(n, [row]) for n, row in zip(lengths, rows, strict=True)])
    prompts = [[x[:, :, :n] for x in qkv] for qkv, n in zip(whole, lengths, strict=True)]
    q, k, v = (torch.cat(x, dim=2) for x in zip(*prompts, strict=True))
    for layer in (0, 1):
        plan.attend(layer, q, k, v, scale=0.3, window=window)


def test_a_prompt_is_stored_for_each_of_its_samples():
    cache = KVCache(max_tokens=4096)
    rows = [cache.take(9) for _ in range(4)]
    q, k, v = random_qkv(8)
    PrefillPlan([(3, rows[:3]), (5, rows[3:])]).attend(0, q, k, v, scale=0.3, window=None)
    keys, values = rows[0].pool.read(0, 5)
    for row in rows[:3]:
        torch.testing.assert_close(keys[row.index, :, :3], k[0, :, :3], rtol=0, atol=0)
        torch.testing.assert_close(values[row.index, :, :3], v[0, :, :3], rtol=0, atol=0)
    torch.testing.assert_close(keys[rows[3].index], k[0, :, 3:], rtol=0, atol=0)


@pytest.mark.parametrize("feature", ["softcap", "s_aux"])
def test_attention_that_it_lacks_is_refused(feature):
    module = torch.nn.Module()
    q, k, v = random_qkv(3)
    options: dict[str, Any] = {feature: 1.0}
    with pytest.raises(NotImplementedError, match=feature):
        attention._attention(module, q, k, v, None, plan=PrefillPlan([(3, [])]), **options)
