"""Bounds of a ratio, and the surrogate objective clipped at them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from together_post_training.losses.base import Array, Inputs, Params
from together_post_training.losses.positions import Positions

Bound = Array | float

# Bounds of each position, which losses that clip read in place of those of the call.
BOUND_INPUTS = ("clip_low_threshold", "clip_high_threshold")


@dataclass(frozen=True, slots=True)
class Surrogate:
    """-w * min(r * A, clip(r, low, high) * A) of each position, its derivative, and where r was cut at which bound."""

    terms: Array
    gradient: Array
    is_high: Array
    is_low: Array


def bounds(inputs: Inputs, params: Params) -> tuple[Bound, Bound]:
    """(low, high): those of each position where given, else the call's."""
    low = inputs.get("clip_low_threshold", params["clip_low_threshold"])
    high = inputs.get("clip_high_threshold", params["clip_high_threshold"])
    assert not isinstance(low, str)
    assert not isinstance(high, str)
    return low, high


def clipped_surrogate(at: Positions, ratio: Array, low: Bound, high: Bound) -> Surrogate:
    """The derivative is that of r alone (d r / d lp = r), and 0 where the clipped term is the smaller one.

    The advantage alone chooses between the two, so a negative weight turns the objective round.
    """
    is_high = (at.advantages > 0) & (ratio > high) & at.counts
    is_low = (at.advantages < 0) & (ratio < low) & at.counts
    used = np.where(is_high, high, np.where(is_low, low, ratio))
    terms = -used * at.scale
    gradient = np.where(is_high | is_low, 0.0, terms)
    return Surrogate(terms, gradient, is_high, is_low)
