"""What the metrics of a run with rollouts say of its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.cookbook.recipe import Run

# float32 in another order moves a log-probability by less. The recipes report the mean of the differences between
# sampler and trainer, and half the mean of their squares.
LOGPROB_TOLERANCE = 1e-4
SQUARED_TOLERANCE = LOGPROB_TOLERANCE**2 / 2


def check_on_policy(run: Run, steps: int) -> None:
    """In each step the trainer gave the samples the log-probabilities that they were drawn with."""
    mean, squared = (run.series(f"optim/kl_sample_train_{kind}") for kind in ("v1", "v2"))
    assert len(mean) == len(squared) == steps
    assert max(map(abs, mean)) < LOGPROB_TOLERANCE
    assert max(squared) < SQUARED_TOLERANCE
    check_rollouts(run, steps)


def check_rollouts(run: Run, steps: int) -> None:
    """Each step has rewards and a policy that is still one."""
    rewards, entropies = run.series("env/all/reward/total"), run.series("optim/entropy")
    assert len(rewards) == len(entropies) == steps
    assert all(map(math.isfinite, rewards))
    assert all(map(math.isfinite, entropies))
    assert min(entropies) > 0


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
