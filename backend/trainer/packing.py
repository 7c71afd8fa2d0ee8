"""How the samples of a pass are laid out for the model: one after the other in one row, without padding.

Samples of equal length lie side by side, so that attention can compute them as one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

# Tokens that a micro-batch holds unless one sample alone has more. Activations take memory in proportion (1.8 MB a
# token for a model of 135 M parameters); on a CPU the time per token is flat from about 500 on.
DEFAULT_TOKEN_BUDGET = 1024


@dataclass(frozen=True, slots=True)
class Run:
    """`count` neighbouring sequences of `length` tokens each."""

    count: int
    length: int

    @property
    def num_tokens(self) -> int:
        return self.count * self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What goes through the model at once.

    samples: indices into the pass's samples, in the order in which they are packed.
    runs: the same sequences, those of equal length together.
    """

    samples: tuple[int, ...]
    runs: tuple[Run, ...]

    @property
    def num_tokens(self) -> int:
        return sum(run.num_tokens for run in self.runs)


def plan(lengths: Sequence[int], token_budget: int) -> list[MicroBatch]:
    """Every sample once, longest first, in micro-batches of at most `token_budget` tokens or a single sample.

    Samples of equal length keep their order.
    """
    batches: list[list[int]] = []
    room = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or lengths[i] > room:
            batches.append([])
            room = token_budget
        batches[-1].append(i)
        room -= lengths[i]
    return [_micro_batch(batch, lengths) for batch in batches]


def runs_of(lengths: Sequence[int]) -> tuple[Run, ...]:
    """Neighbours of equal length, counted."""
    return tuple(Run(len(list(group)), length) for length, group in groupby(lengths))


def _micro_batch(batch: list[int], lengths: Sequence[int]) -> MicroBatch:
    return MicroBatch(samples=tuple(batch), runs=runs_of([lengths[i] for i in batch]))
