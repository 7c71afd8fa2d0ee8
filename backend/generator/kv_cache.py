"""Keys and values of the samples that are running, and of the prompts that are being read.

Each owns one row. Rows of equal capacity lie together in a pool, so that one attention call serves them all and none
computes with more than twice what it needs; a row that is full moves to the pool of the next size. The rows of a pool
are always its first ones, and of these the first are those of running samples: the place of a row that leaves is filled
with the last.

Shapes: K heads of keys and values, D of a head, W all keys and values of a token, of all layers, side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.configuration_utils import PretrainedConfig

_SMALLEST_CAPACITY = 64

# Of each layer, keys and values (0, K, D): their shapes and dtypes. Filled in by what is written first: nothing about
# the model has to be known here.
Layout = dict[int, tuple[Tensor, Tensor]]


@dataclass(slots=True, eq=False)
class Row:
    """Where one sample's keys and values lie. The cache moves it."""

    pool: Pool
    index: int


class Pool:
    """Rows of one capacity, in tokens.

    num_running: so many rows, the first ones, are of running samples.
    """

    def __init__(self, capacity: int, layout: Layout) -> None:
        self.capacity = capacity
        self.rows: list[Row] = []
        self.num_running = 0
        self.num_allocated = 0
        self._layout = layout
        # Rows from here on were never used since they were allocated.
        self._num_used = 0
        # Keys and values by layer, each (num_allocated, K, capacity, D): what attention reads lies side by side.
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values (n, K, D) at `places` (n,): row * capacity + position."""
        if layer not in self._layout:
            self._layout[layer] = keys[:0].clone(), values[:0].clone()
        rows, positions = places // self.capacity, places % self.capacity
        for stored, new in zip(self._layer(layer), (keys, values), strict=True):
            stored[rows, :, positions] = new

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values of every running sample: views (rows, K, length, D)."""
        keys, values = self._layer(layer)
        num_rows = self.num_running
        return keys[:num_rows, :, :length], values[:num_rows, :, :length]

    def read_row(self, layer: int, index: int, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values of one row: views (K, length, D)."""
        keys, values = self._layer(layer)
        return keys[index, :, :length], values[index, :, :length]

    def flat(self, index: int, start: int, stop: int) -> Tensor:
        """A copy (n, W) of what a row holds from position `start` to `stop`."""
        stored = itertools.chain.from_iterable(map(self._layer, self._layout))
        parts = [s[index, :, start:stop].transpose(0, 1).flatten(1) for s in stored]
        return torch.cat(parts, dim=1)

    def fill(self, index: int, flat_TW: Tensor) -> None:
        """Puts what `flat` gave at the beginning of a row."""
        column = 0
        for layer in self._layout:
            for stored in self._layer(layer):
                num_heads, _, dim = stored[index].shape
                part = flat_TW[:, column : column + num_heads * dim].unflatten(1, (num_heads, dim))
                stored[index, :, : len(part)] = part.transpose(0, 1)
                column += num_heads * dim

    def add(self) -> Row:
        assert len(self.rows) < self.num_allocated
        row = Row(self, len(self.rows))
        if row.index < self._num_used:
            for stored in self._layers.values():
                # What an earlier sample left may be NaN, which masking does not remove: 0 * NaN = NaN.
                for values in stored:
                    values[row.index].zero_()
        self._num_used = max(self._num_used, row.index + 1)
        self.rows.append(row)
        return row

    def run(self, row: Row) -> None:
        """The row is a running sample's from now on."""
        first = self.rows[self.num_running]
        if first is not row:
            for stored in (s for layer in self._layers.values() for s in layer):
                stored[[first.index, row.index]] = stored[[row.index, first.index]]
            self.rows[first.index], self.rows[row.index] = row, first
            first.index, row.index = row.index, first.index
        self.num_running += 1

    def remove(self, row: Row) -> None:
        gap = row.index
        if gap < self.num_running:
            self.num_running -= 1
            self._move(self.num_running, gap)
            gap = self.num_running
        self._move(len(self.rows) - 1, gap)
        self.rows.pop()

    def _move(self, index: int, to: int) -> None:
        if index != to:
            self.copy(index, self, to, self.capacity)
            self.rows[to] = self.rows[index]
            self.rows[to].index = to

    def copy(self, index: int, to: Pool, to_index: int, length: int) -> None:
        """Copies the first `length` tokens of a row, here or into another pool."""
        for layer in self._layers:
            for stored, copied in zip(self._layer(layer), to._layer(layer), strict=True):
                copied[to_index, :, :length] = stored[index, :, :length]

    def resize(self, num_rows: int) -> None:
        """Makes room for exactly this many rows, at least those in use. Changes nothing if memory runs out."""
        used = len(self.rows)
        assert num_rows >= used
        layers = {}
        for layer, both in self._layers.items() if num_rows else ():
            layers[layer] = self._zeros(layer, num_rows)
            for stored, copied in zip(both, layers[layer], strict=True):
                copied[:used] = stored[:used]
        self._layers = layers
        self.num_allocated = num_rows
        self._num_used = used

    def _layer(self, layer: int) -> tuple[Tensor, Tensor]:
        if layer not in self._layers:
            self._layers[layer] = self._zeros(layer, self.num_allocated)
        return self._layers[layer]

    def _zeros(self, layer: int, num_rows: int) -> tuple[Tensor, Tensor]:
        return _zeros(num_rows, self.capacity, self._layout[layer])


def _zeros(num_rows: int, capacity: int, like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """For keys and values of these kinds. Zeros, because attention multiplies what it masks by 0, and memory that was
    never written may hold NaN."""
    keys, values = (x.new_zeros(num_rows, x.shape[1], capacity, x.shape[2]) for x in like)
    return keys, values


class KVCache:
    """Hands out rows, up to a number of tokens in all. Owned by the engine's thread.

    What no row takes up may be lent to whoever keeps keys and values for later. They come back when rows need them.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._layout: Layout = {}
        self._pools: dict[int, Pool] = {}
        self._num_lent = 0
        self._reclaim: Callable[[int], None] | None = None

    @property
    def num_rows(self) -> int:
        return sum(len(pool.rows) for pool in self._pools.values())

    @property
    def tokens_used(self) -> int:
        """By rows."""
        return sum(len(pool.rows) * pool.capacity for pool in self._pools.values())

    @property
    def tokens_allocated(self) -> int:
        """For rows, in use or not."""
        return sum(pool.num_allocated * pool.capacity for pool in self._pools.values())

    def has_room(self, num_tokens: int) -> bool:
        """Whether `take` may be called."""
        return self.tokens_used + capacity_for(num_tokens) <= self._max_tokens

    def take(self, num_tokens: int) -> Row:
        """A row for that many tokens."""
        capacity = capacity_for(num_tokens)
        if capacity not in self._pools:
            self._pools[capacity] = Pool(capacity, self._layout)
        pool = self._pools[capacity]
        if len(pool.rows) == pool.num_allocated:
            self._enlarge(pool)
        return pool.add()

    def give_back(self, row: Row) -> None:
        row.pool.remove(row)

    def can_grow(self, row: Row) -> bool:
        """Whether `grow` may be called."""
        return self.tokens_used + row.pool.capacity <= self._max_tokens

    def grow(self, row: Row) -> None:
        """Moves a running sample's row to one of twice the capacity."""
        old, place = row.pool, self.take(2 * row.pool.capacity)
        try:
            old.copy(row.index, place.pool, place.index, old.capacity)
        except BaseException:  # out of memory
            self.give_back(place)
            raise
        old.remove(row)
        row.pool, row.index = place.pool, place.index
        place.pool.rows[place.index] = row
        place.pool.run(row)

    def on_pressure(self, reclaim: Callable[[int], None]) -> None:
        """`reclaim(n)` is called when n tokens of those that are lent are needed, and returns as many as it can."""
        self._reclaim = reclaim

    def lend(self, num_tokens: int) -> bool:
        """Whether there was room for as many; then they are taken until they are returned."""
        if self._num_free < num_tokens and self._num_idle > self._max_tokens // 4:
            self._trim()
        if self._num_free < num_tokens:
            return False
        self._num_lent += num_tokens
        return True

    def take_back(self, num_tokens: int) -> None:
        """They are no longer lent."""
        self._num_lent -= num_tokens

    @property
    def _num_free(self) -> int:
        return self._max_tokens - self.tokens_allocated - self._num_lent

    @property
    def _num_idle(self) -> int:
        return self.tokens_allocated - self.tokens_used

    def _enlarge(self, pool: Pool) -> None:
        """Doubles a pool, or adds what is left; if nothing is, pools give up what they do not use."""
        used = len(pool.rows)
        missing = max(1, used) * pool.capacity - self._num_free
        if missing > 0 and self._reclaim is not None:
            self._reclaim(missing)
        if self._num_free < pool.capacity:
            self._trim()
        pool.resize(used + max(1, min(used, self._num_free // pool.capacity)))

    def _trim(self) -> None:
        for pool in self._pools.values():
            if pool.num_allocated > len(pool.rows):
                pool.resize(len(pool.rows))


def capacity_for(num_tokens: int) -> int:
    """The smallest size of row that holds as many."""
    return max(_SMALLEST_CAPACITY, 1 << (num_tokens - 1).bit_length())


def bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """What a token takes in the cache."""
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers * num_heads * dim * 2 * dtype.itemsize
