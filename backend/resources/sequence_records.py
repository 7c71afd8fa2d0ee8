"""What the generator sampled, kept for losses that read it: tokens and log-probabilities by sequence id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from backend.resources.records import LIFETIME_S, Records

Array = np.ndarray

MAX_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRecord:
    """One sampled sequence: prompt int32 (P,), tokens int32 (N,), logprobs float32 (N,) as they were sampled."""

    prompt: Array
    tokens: Array
    logprobs: Array

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.prompt, self.tokens, self.logprobs


class SequenceRecords(Records[SequenceRecord]):
    """See `Records`."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        lifetime_s: float = LIFETIME_S,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__(clock, lifetime_s=lifetime_s, max_bytes=max_bytes)
