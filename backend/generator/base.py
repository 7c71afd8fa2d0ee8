"""What the service asks of a generator, and the values that cross the seam."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from backend.trainer.base import ModelInfo, Weights

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """What ends a sample: any of these strings in the decoded text, any of these tokens."""

    strings: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCall:
    """One prompt and how to continue it. All values were checked; nothing is absent.

    `temperature` 0 is greedy; `top_k` 0 keeps all. Sample i draws from the stream of seed + i. `max_tokens` 0 with
    `prompt_logprobs` only scores the prompt.
    """

    snapshot: str | None
    prompt: Array
    num_samples: int
    max_tokens: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    stop: Stop
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topk:
    """The likeliest tokens, best first: ids int32 (rows, k), logprobs float32 (rows, k).

    Absent cells: token 0, logprob -99999.
    """

    token_ids: Array
    logprobs: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """tokens int32 (n,), the stop's last token included; logprobs float32 (n,), of the untempered, untruncated
    distribution: what a trainer's forward gives for the same tokens."""

    tokens: Array
    logprobs: Array
    stop_reason: Literal["stop", "length"]
    topk: Topk | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """prompt_logprobs: float32 (num prompt tokens,), NaN at 0."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: Array | None = None
    topk_prompt: Topk | None = None
    cache_hit_tokens: int = 0


class Generator(Protocol):
    """Samples from many snapshots of one base model. Every method may be called from the event loop; none blocks
    it: the engine works in a thread of its own."""

    @property
    def model(self) -> ModelInfo: ...

    def add_snapshot(self, snapshot: str, weights: Weights) -> None:
        """Makes weights available under a name that was never used before."""
        ...

    def drop_snapshot(self, snapshot: str) -> None:
        """Frees it once no running sample uses it."""
        ...

    async def sample(self, call: SampleCall) -> SampleResult:
        """Samples; being cancelled frees the call's share of the engine. `snapshot` None is the base model."""
        ...

    async def close(self) -> None: ...
