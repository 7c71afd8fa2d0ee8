"""What is known of a prompt's tokens, filled in part by part while the prompt is read.

Everything is about a position given the tokens before it, so position 0 has nothing. An engine supplies logits, as
`Rows`; which positions are scored, what is asked of them and by which numbers alternatives are drawn is decided here,
the same for every engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from backend.generator import sampling
from backend.generator.base import AltTokens, SampleCall, SampledSequence, SampleResult, Topk
from backend.generator.sampling import ABSENT_LOGPROB, alternative_uniforms

Array = np.ndarray


class Rows(Protocol):
    """The logits of B consecutive positions."""

    def logprobs(self, tokens: Array) -> Array:
        """Untempered, float32 (B, K), of tokens int64 (B, K)."""
        ...

    def topk(self, k: int) -> Topk: ...

    def draw(self, temperature: float, uniforms: Array) -> Array:
        """See `sampling.draw_many`: int64 (B, n), for uniforms (B, n)."""
        ...


class NumpyRows:
    """`Rows` of logits in numpy, (B, V)."""

    def __init__(self, logits: Array) -> None:
        self._logits = logits
        self._norms = sampling.log_norms(logits)

    def logprobs(self, tokens: Array) -> Array:
        chosen = np.take_along_axis(self._logits, tokens, axis=1)
        return (chosen - self._norms[:, None]).astype(np.float32)

    def topk(self, k: int) -> Topk:
        return sampling.topk(self._logits, k)

    def draw(self, temperature: float, uniforms: Array) -> Array:
        return sampling.draw_many(self._logits, temperature, uniforms)


class PromptScores:
    """What a call wants to know of its prompt. Owned by whoever reads the prompt, which may be in parts, in order.

    next: the first position that is still to be scored; `num_tokens` when none is. What tokens before `next` - 1
        predict is not asked for, so they may come from a cache.
    logprobs, topk, target, alt: as in SampleResult; None where the call does not ask.
    """

    def __init__(self, call: SampleCall) -> None:
        num_tokens, k = len(call.prompt), call.topk_prompt_logprobs
        self._call = call
        self.num_tokens = num_tokens
        # The last tokens, so many, are scored; alternatives and targets are asked for apart.
        self._first_ranked = 1 if call.num_scored is None else num_tokens - call.num_scored
        self.next = self._first()
        self.logprobs: Array | None = None
        self.topk: Topk | None = None
        self.target: Array | None = None
        self.alt: AltTokens | None = None
        if call.prompt_logprobs:
            self.logprobs = np.full(num_tokens, np.nan, np.float32)
        if k:
            self.topk = Topk(
                token_ids=np.zeros((num_tokens, k), np.int32),
                logprobs=np.full((num_tokens, k), ABSENT_LOGPROB, np.float32),
            )
        if call.target_prompt_tokens is not None:
            self.target = np.zeros(call.target_prompt_tokens.shape, np.float32)
        if call.prompt_alt_tokens:
            shape = (num_tokens - 1, call.prompt_alt_tokens)
            self.alt = AltTokens(tokens=np.zeros(shape, np.int64), logprobs=np.zeros(shape, "f4"))

    @property
    def is_complete(self) -> bool:
        return self.next == self.num_tokens

    @property
    def are_finite(self) -> bool:
        """Whether the model gave numbers; asked when complete."""
        parts = [
            self.logprobs[self._first_ranked :] if self.logprobs is not None else None,
            self.topk.logprobs if self.topk is not None else None,
            self.target,
            self.alt.logprobs if self.alt is not None else None,
        ]
        return all(part is None or bool(np.isfinite(part).all()) for part in parts)

    def result(self, sequences: Sequence[SampledSequence]) -> SampleResult:
        assert self.is_complete
        return SampleResult(
            sequences=sequences,
            prompt_logprobs=self.logprobs,
            topk_prompt=self.topk,
            target_prompt_logprobs=self.target,
            prompt_alt=self.alt,
        )

    def add(self, rows: Rows, stop: int) -> None:
        """Scores the positions from `next` to `stop`, which `rows` are for."""
        start, self.next = self.next, stop
        self._add_ranked(rows, start, stop)
        call = self._call
        if self.target is not None and call.target_prompt_tokens is not None:
            tokens = call.target_prompt_tokens[start - 1 : stop - 1]
            found = rows.logprobs(np.maximum(tokens, 0))
            self.target[start - 1 : stop - 1] = np.where(tokens < 0, np.float32(0), found)
        if self.alt is not None:
            uniforms = alternative_uniforms(call.seed, start, stop, call.prompt_alt_tokens)
            drawn = rows.draw(call.temperature, uniforms)
            self.alt.tokens[start - 1 : stop - 1] = drawn
            self.alt.logprobs[start - 1 : stop - 1] = rows.logprobs(drawn)

    def _add_ranked(self, rows: Rows, start: int, stop: int) -> None:
        first = max(start, self._first_ranked)
        if first >= stop:
            return
        here, skipped = slice(first, stop), first - start
        if self.logprobs is not None:
            tokens = np.array(self._call.prompt[start:stop], np.int64)
            self.logprobs[here] = rows.logprobs(tokens[:, None])[skipped:, 0]
        if self.topk is not None:
            best = rows.topk(self._call.topk_prompt_logprobs)
            self.topk.token_ids[here] = best.token_ids[skipped:]
            self.topk.logprobs[here] = best.logprobs[skipped:]

    def _first(self) -> int:
        """The first position that anything is asked of."""
        call, firsts = self._call, [self.num_tokens]
        if call.prompt_logprobs or call.topk_prompt_logprobs:
            firsts.append(self._first_ranked)
        if call.prompt_alt_tokens:
            firsts.append(1)
        if call.target_prompt_tokens is not None:
            named = np.flatnonzero((call.target_prompt_tokens >= 0).any(axis=1))
            firsts += (named[:1] + 1).tolist()
        return min(firsts)
