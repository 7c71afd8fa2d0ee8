"""Steps that tests of the torch trainer share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from backend.trainer.base import AdamParams, Adapter, Trainer
from together_post_training.samples import Sample

# A step that moves nothing and leaves the gradient itself as the first moment.
_SHOW_GRADIENT = AdamParams(learning_rate=0.0, beta1=0.0)


def random_adapter(trainer: Trainer, session: str, *, seed: int = 0, size: float = 0.2) -> Adapter:
    """Of the session's shape, A and B both random: nothing hides behind B = 0."""
    fresh = trainer.weights(session)
    assert isinstance(fresh, Adapter)
    rng = np.random.default_rng(seed)
    tensors = {
        name: rng.normal(scale=size, size=tensor.shape).astype(np.float32)
        for name, tensor in fresh.tensors.items()
    }
    return replace(fresh, tensors=tensors)


def take_gradient(trainer: Trainer, session: str) -> dict[str, np.ndarray]:
    """The window's gradient, by tensor name; consumes the window and leaves the weights as they are."""
    trainer.optim_step(session, _SHOW_GRADIENT)
    return dict(trainer.optimizer_state(session).moments["exp_avg"])


def joined(tensors: dict[str, np.ndarray], names: Sequence[str]) -> np.ndarray:
    """One float64 vector of all, in the order of `names`."""
    return np.concatenate([np.asarray(tensors[name], np.float64).ravel() for name in names])


def relative_error(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """The length of the difference over the length of what is wanted, all tensors together."""
    assert got.keys() == wanted.keys()
    names = sorted(wanted)
    difference = np.linalg.norm(joined(got, names) - joined(wanted, names))
    return float(difference / np.linalg.norm(joined(wanted, names)))


def policy_samples(samples: Sequence[Sample], logprobs: Sequence[np.ndarray]) -> list[Sample]:
    """With sampling logprobs near the given ones (ratios of about 0.6 to 1.6, some 1), advantages and weights."""
    rng = np.random.default_rng(0)
    return [
        Sample(
            tokens=one.tokens,
            inputs={
                "target_tokens": one.inputs["target_tokens"],
                "logprobs": (lp + rng.choice([-0.5, -0.1, 0.1, 0.5], lp.shape)).astype(np.float32),
                "advantages": rng.normal(size=lp.shape).astype(np.float32),
                "weights": rng.choice([0.0, 0.5, 1.0], lp.shape).astype(np.float32),
            },
        )
        for one, lp in zip(samples, logprobs, strict=True)
    ]
