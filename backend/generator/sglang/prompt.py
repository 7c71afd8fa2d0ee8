"""What is known of a call's prompt, put together from the readings that it took. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backend.generator.base import SampleCall, SampledSequence, SampleResult, Topk
from backend.generator.sampling import ABSENT_LOGPROB
from backend.generator.sglang.replies import Read, padded
from backend.generator.sglang.requests import Reading


class PromptResult:
    """cached_tokens: those of the first reading that the server had read before; None without any."""

    def __init__(self, call: SampleCall) -> None:
        num_tokens, k = len(call.prompt), call.topk_prompt_logprobs
        self.cached_tokens: int | None = None
        self._call = call
        self._logprobs = np.full(num_tokens, np.nan, np.float32) if call.prompt_logprobs else None
        self._topk = _absent(num_tokens, k) if k else None
        targets = call.target_prompt_tokens
        self._target = None if targets is None else np.zeros(targets.shape, np.float32)

    def add(self, reading: Reading, read: Read) -> None:
        if self.cached_tokens is None:
            self.cached_tokens = read.cached_tokens
        if reading.first is None:
            return
        here = slice(reading.first, len(reading.tokens))
        if reading.chosen:
            self._add_target(reading, read, here)
            return
        if self._logprobs is not None:
            self._logprobs[here] = read.logprobs
        if self._topk is not None and read.topk is not None:
            best = padded(read.topk, self._call.topk_prompt_logprobs)
            self._topk.token_ids[here] = best.token_ids
            self._topk.logprobs[here] = best.logprobs

    def result(
        self, sequences: Sequence[SampledSequence], cached_tokens: int, warnings: tuple[str, ...]
    ) -> SampleResult:
        return SampleResult(
            sequences=sequences,
            prompt_logprobs=self._logprobs,
            topk_prompt=self._topk,
            target_prompt_logprobs=self._target,
            cache_hit_tokens=cached_tokens,
            warnings=warnings,
        )

    def _add_target(self, reading: Reading, read: Read, here: slice) -> None:
        """Row i of the call's targets is about position i + 1."""
        targets = self._call.target_prompt_tokens
        assert targets is not None
        assert read.chosen is not None
        assert self._target is not None
        rows = slice(here.start - 1, here.stop - 1)
        wanted = targets[rows]
        columns = np.searchsorted(np.array(reading.chosen), np.maximum(wanted, reading.chosen[0]))
        found = np.take_along_axis(read.chosen, columns, axis=1)
        self._target[rows] = np.where(wanted < 0, np.float32(0), found)


def _absent(num_tokens: int, k: int) -> Topk:
    return Topk(
        token_ids=np.zeros((num_tokens, k), np.int32),
        logprobs=np.full((num_tokens, k), ABSENT_LOGPROB, np.float32),
    )
