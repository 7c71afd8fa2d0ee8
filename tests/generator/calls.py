"""Calls with defaults, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from backend.generator.base import SampleCall, Stop


def call(
    prompt: Sequence[int] | np.ndarray,
    *,
    max_tokens: int,
    stop_tokens: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    **options: Any,
) -> SampleCall:
    """One sample of the base model at temperature 1, seed 0."""
    defaults: dict[str, Any] = {
        "snapshot": None,
        "num_samples": 1,
        "seed": 0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
    }
    return SampleCall(
        prompt=np.array(prompt, np.int64),
        max_tokens=max_tokens,
        stop=Stop(strings=tuple(stop_strings), tokens=tuple(stop_tokens)),
        **(defaults | options),
    )


def random_prompt(num_tokens: int, *, seed: int = 0, vocab_size: int = 128) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, num_tokens).tolist()
