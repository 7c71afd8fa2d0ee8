"""How the samples of passes are laid out for the model: one after the other in one row, without padding.

Samples of one pass lie side by side, and among them those of equal length, so that attention can compute them as one
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter


@dataclass(frozen=True, slots=True)
class Run:
    """`count` neighbouring sequences of `length` tokens each."""

    count: int
    length: int

    @property
    def num_tokens(self) -> int:
        return self.count * self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Samples of one pass, in the order in which they are packed. Both numbers are indices: of the pass, of samples."""

    work: int
    samples: tuple[int, ...]


# What goes through the model at once: of each pass that has a share in it, one part.
MicroBatch = tuple[Part, ...]


def plan(lengths: Sequence[Sequence[int]], token_budget: int) -> list[MicroBatch]:
    """Every sample of every pass once, in micro-batches of at most `token_budget` tokens or a single sample.

    Pass after pass, the longest sample of each first; samples of equal length keep their order. A pass may go on in
    the next micro-batch.

    Args:
        lengths: for each pass, how many tokens each of its samples has.
    """
    batches: list[list[tuple[int, int]]] = []
    room = 0
    for work, own in enumerate(lengths):
        for i in sorted(range(len(own)), key=lambda i: -own[i]):
            if not batches or own[i] > room:
                batches.append([])
                room = token_budget
            batches[-1].append((work, i))
            room -= own[i]
    return [_parts(batch) for batch in batches]


def runs_of(lengths: Sequence[int]) -> tuple[Run, ...]:
    """Neighbours of equal length, counted."""
    return tuple(Run(len(list(group)), length) for length, group in groupby(lengths))


def _parts(batch: Sequence[tuple[int, int]]) -> MicroBatch:
    return tuple(
        Part(work=work, samples=tuple(i for _, i in group))
        for work, group in groupby(batch, key=itemgetter(0))
    )
