"""Dropout of an adapter's inputs, drawn so that it can be drawn again.

    y += scale * B A (m * x) / (1 - p)        each m is 0 with probability p, else 1

as PEFT has it: in front of A, not of the base's own weight. Source: Srivastava et al. 2014, "Dropout", JMLR 15.

What is dropped follows from the session's seed, its optimiser's number of steps, the layer and the sample's number in
the gradient window, and from nothing that was drawn before: not from how a pass was divided or packed, nor from whom it
shared a row with; a pass that failed draws the same when it is tried again, and two halves of a batch draw what the
whole does. The bits are those of Philox, whose stream is a function of key and counter. Source: Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# 16 random bits decide about each input, so that a probability is honoured to 1 / 65,536.
_STEPS = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """A sample's number in its session's gradient window, and how many tokens it has."""

    number: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """Of one session's samples, packed one after the other, at one step of its optimiser."""

    seed: int
    step: int
    probability: float
    samples: Sequence[SampleRows]

    @property
    def factor(self) -> float:
        """What is kept counts for what is dropped: 1 / (1 - p)."""
        return _STEPS / (_STEPS - self._threshold)

    def kept(self, path: str, width: int) -> np.ndarray:
        """bool (T, width): which inputs of the layer at this path are kept."""
        digest = hashlib.sha256(f"{self.seed}/dropout/{path}".encode()).digest()
        key = np.frombuffer(digest[:16], dtype=np.uint64)
        parts = [self._draw(key, sample, width) for sample in self.samples]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _draw(self, key: np.ndarray, sample: SampleRows, width: int) -> np.ndarray:
        # The generator counts in the first word, which so never meets another sample's or step's.
        counter = np.array([0, 0, sample.number, self.step], dtype=np.uint64)
        num_values = sample.num_tokens * width
        words = np.random.Philox(key=key, counter=counter).random_raw(-(-num_values // 4))
        values = words.view(np.uint16)[:num_values]
        return (values >= self._threshold).reshape(sample.num_tokens, width)

    @property
    def _threshold(self) -> int:
        return min(round(self.probability * _STEPS), _STEPS - 1)
