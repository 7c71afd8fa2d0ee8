"""What the policy losses share: the positions of a sample that count, and their ratios."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from together_post_training.losses.base import Array, Inputs

# What every policy loss reads.
POLICY_INPUTS = ("target_tokens", "logprobs", "advantages")


@dataclass(frozen=True, slots=True)
class Positions:
    """Float64 (N,) but for `counts`, bool (N,): where neither the weight nor the advantage is 0.

    Elsewhere `log_ratio` is 0 and `ratio` 1, so that nothing overflows where nothing counts and multiplying by the
    scale, which is 0 there, gives 0.

    scale: w * A.  num_counted: of `counts`.  log_ratio: log p - log q.  ratio: p / q, infinite where it overflows.
    """

    advantages: Array
    scale: Array
    counts: Array
    num_counted: int
    log_ratio: Array
    ratio: Array


def positions(lp: Array, inputs: Inputs) -> Positions:
    advantages = np.asarray(inputs["advantages"], np.float64)
    given = inputs.get("weights")
    scale = advantages if given is None else advantages * given
    counts = scale != 0
    log_ratio = np.where(counts, log_ratio_of(lp, inputs), 0.0)
    num_counted = int(np.count_nonzero(counts))
    return Positions(advantages, scale, counts, num_counted, log_ratio, np.exp(log_ratio))


def log_ratio_of(lp: Array, inputs: Inputs) -> Array:
    """log p - log q, float64."""
    return np.subtract(lp, inputs["logprobs"], dtype=np.float64)


def weights_of(lp: Array, inputs: Inputs) -> Array:
    """Float64, 1 where none are given."""
    given = inputs.get("weights")
    return np.ones(lp.shape) if given is None else np.asarray(given, np.float64)


def sequence_ratio(log_ratio: Array, included: Array | None) -> float:
    """exp(mean of log p - log q over the included positions), all if None; 1 if there are none."""
    used = log_ratio if included is None else log_ratio[included]
    return float(np.exp(used.mean())) if used.size else 1.0
