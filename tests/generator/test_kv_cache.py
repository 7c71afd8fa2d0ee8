"""Rows of keys and values: kept whole while they move, and never more than there is room for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from backend.generator import kv_cache
from backend.generator.kv_cache import KVCache, Row, bytes_per_token, capacity_for

HEADS, DIM = 2, 3


def fill(row: Row, layer: int, length: int, value: float) -> None:
    """Keys of `value`, values of -`value`."""
    keys = torch.full((length, HEADS, DIM), value)
    places = row.index * row.pool.capacity + torch.arange(length)
    row.pool.write(layer, places, keys, -keys)


def holds(row: Row, layer: int, length: int, value: float) -> bool:
    keys, values = row.pool.read_row(layer, row.index, length)
    return bool((keys == value).all() and (values == -value).all())


@pytest.mark.parametrize(
    ("num_tokens", "capacity"),
    [(1, 64), (64, 64), (65, 128), (128, 128), (129, 256), (1000, 1024), (1025, 2048)],
)
def test_capacity_is_the_next_power_of_two(num_tokens, capacity):
    assert capacity_for(num_tokens) == capacity


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["take", "grow", "give back"]), st.integers(0, 99)), max_size=40
    )
)
def test_rows_keep_what_was_written_to_them(steps):
    """Whatever is taken, moved to larger rows and given back around them."""
    cache = KVCache(max_tokens=1024)
    written: dict[Row, tuple[int, float]] = {}
    for number, (step, pick) in enumerate(steps):
        row = list(written)[pick % len(written)] if written else None
        if step == "take" and cache.has_room(64 + pick):
            row = cache.take(64 + pick)
            written[row] = (10 + pick % 50, float(number))
            for layer in (0, 1):
                fill(row, layer, *written[row])
        elif step == "grow" and row and cache.can_grow(row):
            capacity = row.pool.capacity
            cache.grow(row)
            assert row.pool.capacity == 2 * capacity
        elif step == "give back" and row:
            del written[row]
            cache.give_back(row)
        assert cache.num_rows == len(written)
        assert cache.tokens_used == sum(r.pool.capacity for r in written) <= 1024
        for row, (length, value) in written.items():
            assert row.pool.rows[row.index] is row
            assert all(holds(row, layer, length, value) for layer in (0, 1))


def test_a_cache_uses_all_its_tokens_and_no_more():
    cache = KVCache(max_tokens=512)
    rows = []
    while cache.has_room(64):
        rows.append(cache.take(64))
    assert len(rows) == 8
    assert cache.tokens_allocated == 512
    assert not cache.can_grow(rows[0])
    for row in rows:
        cache.give_back(row)
    # What the small rows had is given to a large one.
    assert cache.has_room(512)
    cache.take(512)
    assert cache.tokens_allocated == 512
    assert not cache.has_room(1)


def test_memory_that_runs_out_changes_nothing(monkeypatch):
    cache = KVCache(max_tokens=1024)
    rows = [cache.take(64) for _ in range(2)]
    for row in rows:
        fill(row, 0, 64, 1.0 + row.index)

    def run_out(*_):
        raise MemoryError

    monkeypatch.setattr(kv_cache, "_zeros", run_out)
    with pytest.raises(MemoryError):
        cache.grow(rows[0])
    with pytest.raises(MemoryError):
        cache.take(64)
    assert cache.num_rows == 2
    assert all(holds(row, 0, 64, 1.0 + row.index) for row in rows)


def test_memory_never_written_is_finite():
    """Masked positions are multiplied by 0, which leaves NaN as it is."""
    cache = KVCache(max_tokens=64 * 64)
    for _ in range(40):
        row = cache.take(64)
        fill(row, 0, 1, torch.nan)
        cache.give_back(row)
        row = cache.take(64)
        fill(row, 0, 1, 1.0)
        keys, values = row.pool.read_row(0, row.index, 64)
        assert bool(keys.isfinite().all() and values.isfinite().all())


def test_bytes_per_token_counts_keys_and_values_of_all_layers():
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    assert bytes_per_token(config, torch.float32) == 3 * 2 * 8 * 2 * 4
    assert bytes_per_token(config, torch.bfloat16) == 3 * 2 * 8 * 2 * 2
