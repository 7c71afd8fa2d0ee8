"""Samples and steps that both suites use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from backend.generator.base import SampleCall, Stop
from backend.trainer.base import AdamParams, Adapter, Pass, PassResult, Trainer, Weights
from together_post_training import samples as sample_checks
from together_post_training.samples import Sample

HIT = 4 - float(np.log(np.exp(4) + 15))  # -0.242738
MISS = HIT - 4  # -4.242738

# AdamW's first step is -lr * sign(g) at any scale of g. With an eps far above g it is -lr / eps * g
# instead, -g / 100 to 1e-4 relative for |g| up to 100, which shows sums, factors and clipping.
LINEAR = AdamParams(learning_rate=1e4, eps=1e6)


def sample(tokens: Sequence[int], targets: Sequence, **inputs: Sequence | np.ndarray) -> Sample:
    """Floats become float32; arrays keep their dtype."""
    arrays = {
        key: values if isinstance(values, np.ndarray) else np.array(values, np.float32)
        for key, values in inputs.items()
    }
    targets_N = np.array(targets, np.int64)
    return Sample(tokens=np.array(tokens, np.int64), inputs={"target_tokens": targets_N, **arrays})


def run(
    trainer: Trainer,
    session: str,
    samples: Sequence[Sample],
    loss: str = "cross_entropy",
    *,
    params: Mapping[str, float] | None = None,
    backward: bool = False,
    gradients: Sequence[np.ndarray] | None = None,
) -> PassResult:
    """One pass over checked samples, as the service submits it."""
    checked = sample_checks.check(samples, loss, trainer.model.limits)
    return trainer.run(
        Pass(
            session=session,
            samples=checked,
            loss=loss,
            params=params or {},
            backward=backward,
            gradients=gradients,
        )
    )


def forward(trainer: Trainer, session: str, samples: Sequence[Sample]) -> list[np.ndarray]:
    """The target logprobs of each sample."""
    return list(run(trainer, session, samples).logprobs)


def train(
    trainer: Trainer,
    session: str,
    samples: Sequence[Sample],
    loss: str = "cross_entropy",
    *,
    adam: AdamParams,
) -> dict[str, float]:
    """forward_backward and optim_step; the step's metrics."""
    run(trainer, session, samples, loss, backward=True)
    return trainer.optim_step(session, adam)


def random_sample(seed: int, vocab_size: int, num_tokens: int, **inputs: np.ndarray) -> Sample:
    whole = np.random.default_rng(seed).integers(0, vocab_size, num_tokens + 1)
    return sample(whole[:-1].tolist(), whole[1:].tolist(), **inputs)


def changed(before: Weights, after: Weights) -> set[str]:
    """The names of tensors that are not bitwise equal."""
    assert before.tensors.keys() == after.tensors.keys()
    return {n for n in before.tensors if not np.array_equal(before.tensors[n], after.tensors[n])}


def assert_same_adapter(got: Weights, wanted: Weights, *, atol: float) -> None:
    assert got.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        np.testing.assert_allclose(got.tensors[name], tensor, rtol=0, atol=atol, err_msg=name)


def part(adapter: Weights, end: str) -> np.ndarray:
    """The output head's A ("lora_A.weight") or B."""
    (name,) = (n for n in adapter.tensors if "lm_head" in n and n.endswith(end))
    return adapter.tensors[name]


def adapter_of(trainer: Trainer, session: str) -> Adapter:
    adapter = trainer.weights(session)
    assert isinstance(adapter, Adapter)
    return adapter


def always(trainer: Trainer, session: str, *, token: int, delta: float) -> Weights:
    """Of a succ16 session's shape: adds `delta` to one token's logit, after every token."""
    adapter = adapter_of(trainer, session)
    zeros = replace(adapter, tensors={n: np.zeros_like(t) for n, t in adapter.tensors.items()})
    # h is 4 times a unit vector, so A @ h is a vector of ones.
    part(zeros, "lora_A.weight")[:] = 0.25
    part(zeros, "lora_B.weight")[token, 0] = delta / adapter.lora.scale
    return zeros


def call(
    prompt: Sequence[int],
    *,
    stop_tokens: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    **more: Any,
) -> SampleCall:
    """With defaults: the base model, one sample of one token at temperature 1, seed 1, no stop."""
    defaults: dict[str, Any] = {
        "snapshot": None,
        "num_samples": 1,
        "max_tokens": 1,
        "seed": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
    }
    return SampleCall(
        prompt=np.array(prompt, np.int64),
        stop=Stop(strings=tuple(stop_strings), tokens=tuple(stop_tokens)),
        **{**defaults, **more},
    )
