"""Packed attention against transformers' own, one unpadded sequence at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backend.trainer import attention
from backend.trainer.attention import PACKED, packed_attention
from backend.trainer.families import FAMILIES
from backend.trainer.packing import Run

LENGTHS = [9, 9, 20, 1, 3, 3, 3]
RUNS = [Run(2, 9), Run(1, 20), Run(1, 1), Run(3, 3)]


def hidden_states(module, tokens: torch.Tensor, **options) -> torch.Tensor:
    with torch.no_grad():
        return module.base_model(input_ids=tokens, use_cache=False, **options).last_hidden_state[0]


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(128, (1, n), generator=generator) for n in LENGTHS]


def packed_states(base) -> torch.Tensor:
    positions = np.concatenate([np.arange(n) for n in LENGTHS])
    return hidden_states(
        base.view(PACKED),
        torch.cat(sequences(), dim=1),
        position_ids=torch.from_numpy(positions)[None],
        runs=RUNS,
    )


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_packed_sequences_equal_each_alone(base_of, model_type):
    """Every family: grouped heads, sliding windows of 8 (Mistral, Gemma 3), layers without positions (SmolLM 3).

    Hidden states are of size 1 (RMSNorm): 1e-4 allows for sums in another order through two layers of weights large
    enough to amplify it.
    """
    base = base_of(model_type)
    alone = torch.cat([hidden_states(base.module, s) for s in sequences()])
    torch.testing.assert_close(packed_states(base), alone, rtol=0, atol=1e-4)


def test_a_sliding_window_hides_what_lies_before_it(base_of):
    """Two layers of 8 tokens see 14 back: the first token reaches the 15th, not the 16th."""
    view = base_of("mistral").view(PACKED)
    tokens = torch.randint(128, (1, 20), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 128
    options = {"position_ids": torch.arange(20)[None], "runs": [Run(1, 20)]}
    moved = (hidden_states(view, tokens, **options) - hidden_states(view, changed, **options)).abs()
    per_token = moved.amax(dim=1)
    assert per_token[14] > 0
    assert per_token[15:].max() == 0


@pytest.mark.parametrize(("length", "window"), [(30, 3), (30, 20), (21, 7), (8, 7)])
def test_windows_in_blocks_are_one_masked_attention(monkeypatch, length, window):
    """Blocks of 8 queries, windows shorter and longer than they; gradients too. 1e-6 is float32's rounding."""
    monkeypatch.setattr(attention, "_WINDOW_BLOCK", 8)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, 2 * length, 8) for heads in (4, 2, 2)]
    leaves = [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]
    runs = [Run(2, length)]
    q, k, v = leaves
    got, _ = packed_attention(torch.nn.Module(), q, k, v, None, runs=runs, sliding_window=window)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < window)
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(t[:, :, rows] for t in leaves), attn_mask=seen, enable_gqa=True
        )
        for rows in (slice(0, length), slice(length, 2 * length))
    ]
    wanted = torch.cat(parts, dim=2).transpose(1, 2)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
    weights = torch.randn(got.shape, generator=generator)
    for one, other in zip(
        torch.autograd.grad((got * weights).sum(), leaves),
        torch.autograd.grad((wanted * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_packed_attention_is_exactly_what_a_sequence_gets_alone():
    """Bit for bit: neighbours change nothing, not even rounding."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, sum(LENGTHS), 8, generator=generator) for heads in (4, 2, 2)
    )
    packed, _ = packed_attention(torch.nn.Module(), query, key, value, None, runs=RUNS, scaling=0.3)
    start = 0
    for n in LENGTHS:
        rows = slice(start, start + n)
        q, k, v = (t[:, :, rows] for t in (query, key, value))
        alone, _ = packed_attention(torch.nn.Module(), q, k, v, None, runs=[Run(1, n)], scaling=0.3)
        assert torch.equal(packed[:, rows], alone)
        start += n


@pytest.mark.parametrize("option", [{"softcap": 50.0}, {"s_aux": torch.zeros(4)}, {"dropout": 0.1}])
def test_features_it_does_not_compute_are_refused(option):
    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        packed_attention(torch.nn.Module(), q, q, q, None, runs=[Run(1, 2)], **option)
