"""Keys and values of tokens that were read before, so that a prompt that begins with them need not read them again.

What was read under some weights serves those weights alone. Tokens are kept in blocks, each after the blocks of all the
tokens before it; a row takes a copy of what it needs, so nothing that runs ever depends on a block, and blocks can be
forgotten at any time. They are when rows need the memory: the one that was used least recently first.

Shapes: W all keys and values of a token, of all layers, side by side.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backend.generator.kv_cache import KVCache, Row

BLOCK_TOKENS = 16


@dataclass(slots=True, eq=False)
class Block:
    """Tokens after those of `parent`, and their keys and values (BLOCK_TOKENS, W); the root has none of all that."""

    parent: Block | None = None
    tokens: bytes = b""
    values: Tensor | None = None
    children: dict[bytes, Block] = field(default_factory=dict)


class PrefixCache:
    """Owned by the engine's thread. Takes its memory from what the rows of `cache` leave.

    Weights are known by identity; the base model's are None, and always known.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._roots: dict[Hashable, Block] = {None: Block()}
        # Of all blocks, the most recently used last. A block comes after those that follow it in a sequence, so the
        # first one never has any.
        self._blocks: OrderedDict[Block, None] = OrderedDict()
        cache.on_pressure(self._reclaim)

    @property
    def num_tokens(self) -> int:
        return len(self._blocks) * BLOCK_TOKENS

    def add(self, weights: Hashable) -> None:
        """From now on, what is read under these weights is kept."""
        self._roots.setdefault(weights, Block())

    def drop(self, weights: Hashable) -> None:
        """Forgets all that was read under these weights, and keeps nothing any more."""
        root = self._roots.pop(weights, None)
        for block in _descendants(root) if root else ():
            block.children.clear()
            del self._blocks[block]
            self._cache.take_back(BLOCK_TOKENS)

    def find(self, weights: Hashable, tokens_T: Tensor) -> list[Block]:
        """The blocks that the tokens begin with."""
        block = self._roots.get(weights)
        found: list[Block] = []
        if block is not None:
            for key in _keys(tokens_T):
                block = block.children.get(key)
                if block is None:
                    break
                found.append(block)
        self._touch(found)
        return found

    def load(self, blocks: list[Block], row: Row) -> None:
        """Copies blocks that follow one another to the beginning of a row."""
        parts = [block.values for block in blocks if block.values is not None]
        if parts:
            row.pool.fill(row.index, torch.cat(parts))

    def store(self, weights: Hashable, tokens_T: Tensor, row: Row) -> None:
        """Keeps what a row holds of its first tokens, as far as there is room."""
        if weights not in self._roots:
            return
        chain = self.find(weights, tokens_T)
        keys = list(_keys(tokens_T))[len(chain) :]
        if not keys:
            return
        start = len(chain) * BLOCK_TOKENS
        flat_TW = row.pool.flat(row.index, start, start + len(keys) * BLOCK_TOKENS)
        parts = flat_TW.split(BLOCK_TOKENS)
        # What overflowed would go on failing calls that never computed it. A sum is not finite if a number is not.
        sums_T = flat_TW.sum(dim=1, dtype=torch.float32)
        is_sound = sums_T.isfinite().view(-1, BLOCK_TOKENS).all(dim=1).tolist()
        kept = set(chain)
        for key, part, is_finite in zip(keys, parts, is_sound, strict=True):
            values = part.clone()
            if not is_finite or not self._borrow(kept):
                break
            parent = chain[-1] if chain else self._roots[weights]
            block = Block(parent, key, values)
            parent.children[key] = block
            self._blocks[block] = None
            chain.append(block)
            kept.add(block)
        self._touch(chain)

    def _touch(self, chain: list[Block]) -> None:
        for block in reversed(chain):
            self._blocks.move_to_end(block)

    def _borrow(self, kept: set[Block]) -> bool:
        """Room for one more block, if need be at the cost of another that is not among `kept`."""
        while not self._cache.lend(BLOCK_TOKENS):
            if not self._blocks or next(iter(self._blocks)) in kept:
                return False
            self._evict()
        return True

    def _reclaim(self, num_tokens: int) -> None:
        for _ in range(min(-(-num_tokens // BLOCK_TOKENS), len(self._blocks))):
            self._evict()

    def _evict(self) -> None:
        block, _ = self._blocks.popitem(last=False)
        assert not block.children
        assert block.parent is not None
        del block.parent.children[block.tokens]
        self._cache.take_back(BLOCK_TOKENS)


def _keys(tokens_T: Tensor) -> Iterator[bytes]:
    """Of each whole block of tokens, int64 (T,) on the CPU."""
    data = tokens_T.numpy().tobytes()
    size = BLOCK_TOKENS * tokens_T.element_size()
    return (data[i : i + size] for i in range(0, len(data) - size + 1, size))


def _descendants(block: Block) -> Iterator[Block]:
    stack = list(block.children.values())
    while stack:
        block = stack.pop()
        stack += block.children.values()
        yield block
