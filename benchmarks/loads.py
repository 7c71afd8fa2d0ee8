"""Requests to sample, the same for every side of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks import model


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    prompt: list[int]
    num_new: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """prompts, outputs: the fewest and the most tokens; lengths are drawn uniformly."""

    name: str
    count: int
    prompts: tuple[int, int]
    outputs: tuple[int, int]


MIXED = Shape(name="64 mixed", count=64, prompts=(16, 256), outputs=(8, 128))
EVEN = Shape(name="32 x 64", count=32, prompts=(32, 32), outputs=(64, 64))


class Load:
    """The same lengths each time it is asked, and tokens that were never seen before: nothing is in a cache."""

    def __init__(self, shape: Shape) -> None:
        rng = np.random.default_rng(0)
        prompts = rng.integers(shape.prompts[0], shape.prompts[1] + 1, shape.count)
        outputs = rng.integers(shape.outputs[0], shape.outputs[1] + 1, shape.count)
        self._lengths = list(zip(prompts.tolist(), outputs.tolist(), strict=True))
        self._rng = np.random.default_rng(1)

    @property
    def num_new(self) -> int:
        """Tokens to sample, of all requests."""
        return sum(new for _, new in self._lengths)

    @property
    def num_tokens(self) -> int:
        return sum(prompt + new for prompt, new in self._lengths)

    def fresh(self) -> list[Request]:
        return [
            Request(prompt=self._rng.integers(0, model.VOCAB_SIZE, n).tolist(), num_new=new)
            for n, new in self._lengths
        ]
