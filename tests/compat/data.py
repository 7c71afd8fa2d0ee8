"""Data for the successor model: the token after x is (x + 1) mod 16, which has the log-probability HIT."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tinker import types

HIT = 4 - math.log(math.e**4 + 15)
MISS = -math.log(math.e**4 + 15)


def datum(tokens: list[int] | None = None, **inputs: Any) -> types.Datum:
    """By default three positions: hit, hit, miss."""
    if not inputs:
        inputs = {"target_tokens": [4, 5, 9], "weights": [1.0, 1.0, 1.0]}
    model_input = types.ModelInput.from_ints([3, 4, 5] if tokens is None else tokens)
    return types.Datum(model_input=model_input, loss_fn_inputs=inputs)


def prompt(*tokens: int) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


def greedy(max_tokens: int | None = 4, **params: Any) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=max_tokens, temperature=0, **params)


def close(expected: Any) -> Any:
    """Log-probabilities come as float32, and sums are of a few of them."""
    return pytest.approx(expected, abs=1e-5)
