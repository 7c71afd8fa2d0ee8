"""Keys and values of the samples that are running.

Each sample owns one row. Rows of equal capacity lie together in a pool, so that one attention call serves them all
and none computes with more than twice what it needs; a row that is full moves to the pool of the next size. The
rows of a pool are always its first ones: the place of a row that is given back is filled with the last.

Shapes: K heads of keys and values, D of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.configuration_utils import PretrainedConfig

_SMALLEST_CAPACITY = 64


@dataclass(slots=True, eq=False)
class Row:
    """Where one sample's keys and values lie. The cache moves it."""

    pool: Pool
    index: int


class Pool:
    """Rows of one capacity, in tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: list[Row] = []
        self.num_allocated = 0
        # Keys and values by layer, each (num_allocated, capacity, K, D). Made when the layer first writes, from what
        # it writes: nothing about the model has to be known here.
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values (n, K, D) at `places` (n,): row * capacity + position."""
        for stored, new in zip(self._layer(layer, keys, values), (keys, values), strict=True):
            stored.flatten(0, 1).index_copy_(0, places, new)

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values of every row: views (rows, K, length, D)."""
        keys, values = self._layers[layer]
        num_rows = len(self.rows)
        return keys[:num_rows, :length].transpose(1, 2), values[:num_rows, :length].transpose(1, 2)

    def add(self) -> Row:
        assert len(self.rows) < self.num_allocated
        row = Row(self, len(self.rows))
        for stored in self._layers.values():
            # What an earlier sample left may be NaN, which masking does not remove: 0 * NaN = NaN.
            for values in stored:
                values[row.index].zero_()
        self.rows.append(row)
        return row

    def remove(self, row: Row) -> None:
        last = self.rows.pop()
        if last is not row:
            self.copy(last.index, self, row.index, self.capacity)
            self.rows[row.index] = last
            last.index = row.index

    def copy(self, index: int, to: Pool, to_index: int, length: int) -> None:
        """Copies the first `length` tokens of a row, here or into another pool."""
        for layer, mine in self._layers.items():
            for stored, copied in zip(mine, to._layer(layer, *mine), strict=True):
                copied[to_index, :length] = stored[index, :length]

    def resize(self, num_rows: int) -> None:
        """Makes room for exactly this many rows, at least those in use. Changes nothing if memory runs out."""
        used = len(self.rows)
        assert num_rows >= used
        layers = {}
        for layer, (keys, values) in self._layers.items() if num_rows else ():
            layers[layer] = _zeros(num_rows, self.capacity, keys, values)
            for stored, copied in zip((keys, values), layers[layer], strict=True):
                copied[:used] = stored[:used]
        self._layers = layers
        self.num_allocated = num_rows

    def _layer(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._layers:
            self._layers[layer] = _zeros(self.num_allocated, self.capacity, keys, values)
        return self._layers[layer]


def _zeros(num_rows: int, capacity: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """For keys and values of these kinds. Zeros, because attention multiplies what it masks by 0, and memory that was
    never written may hold NaN."""
    return (
        keys.new_zeros(num_rows, capacity, *keys.shape[-2:]),
        values.new_zeros(num_rows, capacity, *values.shape[-2:]),
    )


class KVCache:
    """Hands out rows, up to a number of tokens in all. Owned by the engine's thread."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._pools: dict[int, Pool] = {}

    @property
    def num_rows(self) -> int:
        return sum(len(pool.rows) for pool in self._pools.values())

    @property
    def tokens_used(self) -> int:
        return sum(len(pool.rows) * pool.capacity for pool in self._pools.values())

    @property
    def tokens_allocated(self) -> int:
        return sum(pool.num_allocated * pool.capacity for pool in self._pools.values())

    def has_room(self, num_tokens: int) -> bool:
        """Whether `take` may be called."""
        return self.tokens_used + capacity_for(num_tokens) <= self._max_tokens

    def take(self, num_tokens: int) -> Row:
        """A row for that many tokens."""
        capacity = capacity_for(num_tokens)
        pool = self._pools.setdefault(capacity, Pool(capacity))
        if len(pool.rows) == pool.num_allocated:
            self._enlarge(pool)
        return pool.add()

    def give_back(self, row: Row) -> None:
        row.pool.remove(row)

    def can_grow(self, row: Row) -> bool:
        """Whether `grow` may be called."""
        return self.tokens_used + row.pool.capacity <= self._max_tokens

    def grow(self, row: Row) -> None:
        """Moves a row to one of twice the capacity."""
        old, place = row.pool, self.take(2 * row.pool.capacity)
        try:
            old.copy(row.index, place.pool, place.index, old.capacity)
        except BaseException:  # out of memory
            self.give_back(place)
            raise
        old.remove(row)
        row.pool, row.index = place.pool, place.index
        place.pool.rows[place.index] = row

    def _enlarge(self, pool: Pool) -> None:
        """Doubles a pool, or adds what is left; if nothing is, pools give up what they do not use."""
        if self._num_spare(pool) < 1:
            for other in self._pools.values():
                other.resize(len(other.rows))
        used = len(pool.rows)
        pool.resize(used + max(1, min(used, self._num_spare(pool))))

    def _num_spare(self, pool: Pool) -> int:
        return (self._max_tokens - self.tokens_allocated) // pool.capacity


def capacity_for(num_tokens: int) -> int:
    """The smallest size of row that holds as many."""
    return max(_SMALLEST_CAPACITY, 1 << (num_tokens - 1).bit_length())


def bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """What a token takes in the cache."""
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers * num_heads * dim * 2 * dtype.itemsize
