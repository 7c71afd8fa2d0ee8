"""How far a generator's log-probabilities are from its trainer's, on the same tokens and weights.

The trainer's are what a loss computes with, the generator's what it is given as `logprobs`: in exact arithmetic they
are equal. Both engines are asked as the service asks them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from backend.generator.base import Generator, SampleCall, Stop
from backend.trainer.base import (
    AdamParams,
    FullConfig,
    LoraConfig,
    ModelInfo,
    Pass,
    Trainer,
    WeightsConfig,
)
from together_post_training.errors import PostTrainingError
from together_post_training.samples import build, check

Array = np.ndarray

TEMPERATURES = (0.0, 0.7, 1.0, 1.5)
# Largest |difference| in float32, where both add up in other orders.
FLOAT32_TOLERANCE = 5e-5

_NUM_PROMPTS = 4
_NUM_SAMPLES = 2
_NUM_TOKENS = 32
_TRAINING_STEPS = 3

_WITH_HEAD = LoraConfig(rank=8, alpha=32.0, seed=0)

# None: the base model. The output head is what an adapter most often loses on its way.
WEIGHTS: Mapping[str, WeightsConfig | None] = {
    "base": None,
    "LoRA without lm_head": replace(_WITH_HEAD, train_unembed=False),
    "LoRA with lm_head": _WITH_HEAD,
    "full weights": FullConfig(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of `num_tokens` log-probabilities.

    how: "T = 0.7", of what was sampled at that temperature, or "scored", of prompts.
    max_diff, mean_diff: of |generator - trainer|, in nats. kl: the k3 estimator of KL(generator || trainer) (Schulman,
    "Approximating KL divergence", 2020), by tokens drawn from the generator; at other temperatures than 1, and for
    prompts, the tokens are drawn from something else and it is but a third measure of distance.
    """

    weights: str
    how: str
    num_tokens: int
    max_diff: float
    mean_diff: float
    kl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """An engine does not take these weights."""

    weights: str
    why: str


async def measure(trainer: Trainer, generator: Generator) -> list[Agreement | Refused]:
    """Samples from every kind of weights at every temperature, and asks the trainer about the same tokens.

    Adapters and full weights are first trained for a few steps, so that they cannot be taken for the base model. Blocks
    the event loop while the trainer computes.
    """
    rows: list[Agreement | Refused] = []
    for name, config in WEIGHTS.items():
        session = f"agreement of {name}"
        try:
            trainer.create_session(session, config or _WITH_HEAD)
        except PostTrainingError as error:
            rows.append(Refused(weights=name, why=error.message))
            continue
        try:
            rows += await _measure_session(trainer, generator, session, name, config)
        finally:
            trainer.delete_session(session)
    return rows


async def _measure_session(
    trainer: Trainer, generator: Generator, session: str, name: str, config: WeightsConfig | None
) -> list[Agreement | Refused]:
    """The base model is a session that was not trained."""
    if config is None:
        return await _compare_all(trainer, generator, session, name, None)
    _train(trainer, session, learning_rate=1e-3 if isinstance(config, FullConfig) else 1e-2)
    try:
        await generator.add_snapshot(session, trainer.weights(session))
    except PostTrainingError as error:
        return [Refused(weights=name, why=error.message)]
    try:
        return await _compare_all(trainer, generator, session, name, session)
    finally:
        generator.drop_snapshot(session)


async def _compare_all(
    trainer: Trainer, generator: Generator, session: str, name: str, snapshot: str | None
) -> list[Agreement | Refused]:
    prompts = _prompts(generator.model)
    rows: list[Agreement | Refused] = []
    for temperature in TEMPERATURES:
        calls = [_call(p, snapshot, i, temperature=temperature) for i, p in enumerate(prompts)]
        sampled = await _sampled(generator, calls)
        ours = _forward(trainer, session, [tokens for tokens, _ in sampled])
        theirs = [logprobs for _, logprobs in sampled]
        tails = [of[-len(own) :] for of, own in zip(ours, theirs, strict=True)]
        rows.append(_agreement(name, f"T = {temperature:g}", theirs, tails))
    scored = await asyncio.gather(*(_score(generator, p, snapshot) for p in prompts))
    rows.append(_agreement(name, "scored", scored, _forward(trainer, session, prompts)))
    return rows


async def _sampled(generator: Generator, calls: Sequence[SampleCall]) -> list[tuple[Array, Array]]:
    """For each sequence: the prompt's tokens and its own, and the logprobs of its own."""
    results = await asyncio.gather(*(generator.sample(call) for call in calls))
    return [
        (np.concatenate([call.prompt, sequence.tokens]), sequence.logprobs)
        for call, result in zip(calls, results, strict=True)
        for sequence in result.sequences
    ]


async def _score(generator: Generator, prompt: Array, snapshot: str | None) -> Array:
    call = replace(_call(prompt, snapshot, 0, temperature=1.0), max_tokens=0, prompt_logprobs=True)
    logprobs = (await generator.sample(call)).prompt_logprobs
    assert logprobs is not None
    return logprobs[1:]


def _forward(trainer: Trainer, session: str, sequences: Sequence[Array]) -> Sequence[Array]:
    samples = check([build(s) for s in sequences], "cross_entropy", trainer.model.limits)
    return trainer.run(Pass(session=session, samples=samples)).logprobs


def _train(trainer: Trainer, session: str, *, learning_rate: float) -> None:
    samples = [build(prompt) for prompt in _prompts(trainer.model)]
    samples = check(samples, "cross_entropy", trainer.model.limits)
    for _ in range(_TRAINING_STEPS):
        trainer.run(Pass(session=session, samples=samples, backward=True))
        trainer.optim_step(session, AdamParams(learning_rate=learning_rate))


def _agreement(weights: str, how: str, theirs: Sequence[Array], ours: Sequence[Array]) -> Agreement:
    diff = np.concatenate(ours).astype(np.float64) - np.concatenate(theirs)
    return Agreement(
        weights=weights,
        how=how,
        num_tokens=len(diff),
        max_diff=float(np.abs(diff).max()),
        mean_diff=float(np.abs(diff).mean()),
        kl=float(np.mean(np.expm1(diff) - diff)),
    )


def _prompts(model: ModelInfo) -> list[Array]:
    """Random tokens, of several lengths."""
    rng = np.random.default_rng(0)
    longest = model.limits.max_seq_length - _NUM_TOKENS
    lengths = [min(longest, 3 + 9 * i) for i in range(_NUM_PROMPTS)]
    return [rng.integers(0, model.limits.vocab_size, n).astype(np.int64) for n in lengths]


def _call(prompt: Array, snapshot: str | None, seed: int, *, temperature: float) -> SampleCall:
    return SampleCall(
        snapshot=snapshot,
        prompt=prompt,
        num_samples=_NUM_SAMPLES,
        max_tokens=_NUM_TOKENS,
        seed=1000 * seed,
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        stop=Stop(),
        is_seeded=False,
    )
