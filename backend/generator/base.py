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

    `temperature` 0 is greedy; `top_k` 0 and `min_p` 0 keep all. Sample i draws from the stream of seed + i.
    `max_tokens` 0 only scores the prompt.

    num_scored: how many of the prompt's last tokens are scored; None: all that have one before them.
    target_prompt_tokens: int64 (num prompt tokens - 1, K); row i lists tokens to score at position i + 1, -1 none.
    prompt_alt_tokens: tokens to draw at every prompt position after the first.
    is_seeded: the caller chose the seed: an engine that cannot honour it must warn.
    follows: the call goes on under other weights when `Generator.move` says so.
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
    min_p: float = 0.0
    num_scored: int | None = None
    target_prompt_tokens: Array | None = None
    prompt_alt_tokens: int = 0
    return_routed_experts: bool = False
    is_seeded: bool = True
    follows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Topk:
    """The likeliest tokens, best first: ids int32 (rows, k), logprobs float32 (rows, k).

    Absent cells: token 0, logprob -99999.
    """

    token_ids: Array
    logprobs: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """From `first_token` to the next segment, a sequence was sampled from these weights; None: the base model."""

    snapshot: str | None
    first_token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AltTokens:
    """Row i belongs to prompt position i + 1: tokens int64, logprobs float32, both (num prompt tokens - 1, k)."""

    tokens: Array
    logprobs: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """tokens int32 (n,), the stop's last token included; logprobs float32 (n,), of the untempered, untruncated
    distribution: what a trainer's forward gives for the same tokens.

    segments: which weights it was sampled from; empty: the call's snapshot, all of it.
    routed_experts: int16 (num tokens the model has read, layers with experts, experts per token), in the order of the
        prompt's tokens and then the sequence's, all but its last; present if the call asks and the model has experts.
    """

    tokens: Array
    logprobs: Array
    stop_reason: Literal["stop", "length"]
    topk: Topk | None = None
    segments: tuple[Segment, ...] = ()
    routed_experts: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """prompt_logprobs: float32 (num prompt tokens,), NaN at 0 and where it was not asked for.

    target_prompt_logprobs: float32, of the shape of the call's target_prompt_tokens; 0 where that is -1.
    cache_hit_tokens: of the prompt, those that were not computed again.
    warnings: what the caller should know, e.g. that the engine has no use for a seed.
    """

    sequences: Sequence[SampledSequence]
    prompt_logprobs: Array | None = None
    topk_prompt: Topk | None = None
    target_prompt_logprobs: Array | None = None
    prompt_alt: AltTokens | None = None
    cache_hit_tokens: int = 0
    warnings: tuple[str, ...] = ()


class Generator(Protocol):
    """Samples from many snapshots of one base model. Every method may be called from the event loop; none blocks
    it: the engine works in a thread of its own."""

    @property
    def model(self) -> ModelInfo: ...

    async def add_snapshot(self, snapshot: str, weights: Weights) -> None:
        """Makes weights available under a name that was never used before; they are, when it returns."""
        ...

    def drop_snapshot(self, snapshot: str) -> None:
        """Frees it once no running sample uses it."""
        ...

    def move(self, old: str, new: str) -> None:
        """Calls with `follows` that run under `old` go on under `new`, from their next token on: exactly as if their
        tokens so far had been read under the new weights. Both are here until those calls end."""
        ...

    async def sample(self, call: SampleCall) -> SampleResult:
        """Samples; being cancelled frees the call's share of the engine. `snapshot` None is the base model."""
        ...

    async def close(self) -> None: ...
