"""Prefixes that were read before: found again under the same weights, whole and in order, and given up for rows."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend.generator.kv_cache import KVCache, Row
from backend.generator.prefix_cache import BLOCK_TOKENS, PrefixCache

LAYERS = (0, 2, 5)


class Weights:
    """Known by identity, as a snapshot's are."""


def write(row: Row, tokens: Tensor, salt: float) -> None:
    """Keys and values that differ by token, position, layer and salt."""
    positions = torch.arange(len(tokens))
    places = row.index * row.pool.capacity + positions
    for layer in LAYERS:
        value = tokens + 1000.0 * positions + 10_000_000.0 * layer + salt
        keys = value.double()[:, None, None] + torch.arange(6).view(1, 2, 3)
        row.pool.write(layer, places, keys, -keys[:, :, :2])


def contents(row: Row, length: int) -> list[Tensor]:
    return [
        part.clone() for layer in LAYERS for part in row.pool.read_row(layer, row.index, length)
    ]


def tokens_of(*numbers: int) -> Tensor:
    """A block of each number."""
    return torch.tensor(numbers, dtype=torch.int64).repeat_interleave(BLOCK_TOKENS)


def stored(cache: KVCache, prefixes: PrefixCache, weights, tokens: Tensor, salt: float) -> None:
    row = cache.take(len(tokens))
    write(row, tokens, salt)
    prefixes.store(weights, tokens, row)
    cache.give_back(row)


@settings(max_examples=60)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["store", "load", "drop", "rows"]),
            st.integers(0, 2),
            st.lists(st.integers(0, 2), max_size=6),
            st.integers(0, 20),
        ),
        max_size=30,
    ),
    max_tokens=st.sampled_from([256, 384, 2048]),
)
def test_what_is_found_is_what_was_read_under_the_same_weights(steps, max_tokens):
    """Whatever is stored, dropped and given up in between, and within the memory that there is."""
    cache = KVCache(max_tokens)
    prefixes = PrefixCache(cache)
    weights = [None, Weights(), Weights()]
    for some in weights[1:]:
        prefixes.add(some)
    for kind, which, numbers, extra in steps:
        if kind == "drop" and which:
            prefixes.drop(weights[which])
            weights[which] = Weights()
            prefixes.add(weights[which])
            continue
        tokens = torch.cat([tokens_of(*numbers), torch.full((extra,), 9)])
        salt = float(id(weights[which]) % 99_991)
        if kind == "rows":
            rows = []
            while cache.has_room(64 * (1 + extra)):
                rows.append(cache.take(64 * (1 + extra)))
            for row in rows:
                cache.give_back(row)
        elif len(tokens):
            row = cache.take(len(tokens))
            write(row, tokens, salt)
            expected = contents(row, len(tokens))
            if kind == "store":
                prefixes.store(weights[which], tokens, row)
            found = prefixes.find(weights[which], tokens)
            length = len(found) * BLOCK_TOKENS
            assert length <= len(tokens)
            cache.give_back(row)
            row = cache.take(len(tokens))
            prefixes.load(found, row)
            for got, want in zip(contents(row, length), expected, strict=True):
                assert torch.equal(got, want[:, :length])
            cache.give_back(row)
        assert cache.tokens_allocated + prefixes.num_tokens <= max_tokens


def test_the_longest_prefix_is_found():
    cache = KVCache(4096)
    prefixes = PrefixCache(cache)
    stored(cache, prefixes, None, tokens_of(1, 2, 3), 0.0)
    stored(cache, prefixes, None, tokens_of(1, 2, 4, 5), 0.0)
    for asked, num_blocks in (
        (tokens_of(1, 2, 3, 9), 3),
        (tokens_of(1, 2, 4, 5, 6), 4),
        (tokens_of(1, 9), 1),
        (tokens_of(2, 1), 0),
        (tokens_of(1, 2)[:-1], 1),
        (tokens_of(), 0),
    ):
        assert len(prefixes.find(None, asked)) == num_blocks
    assert prefixes.num_tokens == 5 * BLOCK_TOKENS, "what they share is there once"


def test_weights_find_only_their_own():
    cache = KVCache(4096)
    prefixes = PrefixCache(cache)
    one, other = Weights(), Weights()
    prefixes.add(one)
    prefixes.add(other)
    stored(cache, prefixes, one, tokens_of(1, 2), 0.0)
    assert len(prefixes.find(one, tokens_of(1, 2))) == 2
    assert prefixes.find(other, tokens_of(1, 2)) == []
    assert prefixes.find(None, tokens_of(1, 2)) == []


def test_weights_that_are_dropped_leave_nothing():
    cache = KVCache(4096)
    prefixes = PrefixCache(cache)
    weights = Weights()
    prefixes.add(weights)
    stored(cache, prefixes, weights, tokens_of(1, 2, 3), 0.0)
    (block,) = prefixes.find(weights, tokens_of(1))
    assert block.values is not None
    values = weakref.ref(block.values)
    del block
    prefixes.drop(weights)
    assert prefixes.num_tokens == 0
    stored(cache, prefixes, weights, tokens_of(1, 2), 0.0)
    assert prefixes.num_tokens == 0, "a sample that was still running keeps nothing either"
    gone = weakref.ref(weights)
    del weights
    gc.collect()
    assert gone() is None
    assert values() is None


def test_the_least_recently_used_goes_first():
    """Room for four blocks; a block never goes before those that follow it."""
    cache = KVCache(128)
    prefixes = PrefixCache(cache)
    stored(cache, prefixes, None, tokens_of(1, 2), 0.0)
    stored(cache, prefixes, None, tokens_of(5), 0.0)
    prefixes.find(None, tokens_of(1))
    stored(cache, prefixes, None, tokens_of(6), 0.0)
    assert prefixes.num_tokens == 64
    stored(cache, prefixes, None, tokens_of(7), 0.0)
    assert [len(prefixes.find(None, tokens_of(*n))) for n in ((1, 2), (5,), (6,), (7,))] == [
        1,
        1,
        1,
        1,
    ]


def test_rows_get_all_memory_that_prefixes_hold():
    cache = KVCache(512)
    prefixes = PrefixCache(cache)
    stored(cache, prefixes, None, tokens_of(*range(1, 17)), 0.0)
    assert prefixes.num_tokens > 0
    assert cache.has_room(512)
    cache.take(512)
    assert prefixes.num_tokens == 0
    assert cache.tokens_allocated == 512


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_overflowed_is_not_kept(bad):
    """Nor what follows: it would be found before what it depends on."""
    cache = KVCache(4096)
    prefixes = PrefixCache(cache)
    row = cache.take(48)
    tokens = tokens_of(1, 2, 3)
    write(row, tokens, 0.0)
    keys = torch.full((1, 2, 3), 1.0, dtype=torch.float64)
    keys[0, 1, 2] = bad
    row.pool.write(2, torch.tensor([row.index * row.pool.capacity + 20]), keys, keys[:, :, :2])
    prefixes.store(None, tokens, row)
    assert len(prefixes.find(None, tokens)) == 1
