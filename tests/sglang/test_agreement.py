"""Law 15 in figures: how far each generator is from the trainer, on the same tokens and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from backend.generator.base import Generator, SampleCall
from backend.generator.embedded import EmbeddedGenerator
from backend.trainer import base_model
from backend.trainer.base import AdamParams, FullConfig
from tests.conformance.bench import Bench, head_lora
from tests.conformance.data import call, forward, random_sample, sample, train
from tests.conformance.test_generator_conformance import prompt_of
from tests.sglang.engines import KINDS, Kind

pytestmark = pytest.mark.sglang

TOLERANCE = 5e-5
TEMPERATURES = (0.0, 0.5, 1.0, 2.0)
WEIGHTS = ("base", "lora", "lora of the head", "full")


@dataclass(frozen=True, slots=True)
class Pair:
    """The same base model in both generators, and its trainer."""

    bench: Bench
    generators: dict[str, Generator]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def pair(request: pytest.FixtureRequest, started: Callable[[Kind], Bench]) -> Iterator[Pair]:
    bench = started(request.param)
    location = bench.generator.model.location
    base = base_model.load("torch", location, dtype="float32", device="cpu")
    embedded = EmbeddedGenerator(base)
    yield Pair(bench, {"embedded": embedded, "sglang": bench.generator})
    bench.wait(embedded.close())


@pytest.mark.parametrize("weights", WEIGHTS)
def test_logprobs_of_both_generators_are_the_trainers(pair: Pair, weights, agreement: list[str]):
    """Prompts of 1 to 40 tokens, read at once, and 16 tokens sampled after each, at several temperatures."""
    bench = pair.bench
    session = _session(bench, weights)
    snapshot = None if weights == "base" else bench.name("snapshot")
    for name, generator in pair.generators.items():
        if snapshot is not None:
            bench.wait(generator.add_snapshot(snapshot, bench.trainer.weights(session)))
        gap = _largest_gap(bench, generator, session, snapshot)
        agreement.append(f"{bench.engine.name:20} {weights:18} {name:10} {gap:.1e}")
        assert gap <= TOLERANCE
    bench.trainer.delete_session(session)


def _session(bench: Bench, weights: str) -> str:
    """Of the base itself it is untrained; the others have moved."""
    if weights == "lora":
        session = bench.session()
    else:
        session = bench.name("session")
        config = FullConfig() if weights == "full" else head_lora()
        bench.trainer.create_session(session, config)
    if weights != "base":
        vocab_size = bench.trainer.model.limits.vocab_size
        for seed in range(3):
            some = [random_sample(seed, vocab_size, 20)]
            train(bench.trainer, session, some, adam=AdamParams(learning_rate=0.02))
    return session


def _largest_gap(bench: Bench, generator: Generator, session: str, snapshot: str | None) -> float:
    calls = [
        call(
            prompt_of(bench, num_tokens, seed=num_tokens),
            snapshot=snapshot,
            max_tokens=16,
            temperature=temperature,
            prompt_logprobs=True,
        )
        for temperature in TEMPERATURES
        for num_tokens in (1, 7, 40)
    ]
    return max(_gap(bench, generator, session, one) for one in calls)


def _gap(bench: Bench, generator: Generator, session: str, asked: SampleCall) -> float:
    result = bench.wait(generator.sample(asked))
    (sequence,) = result.sequences
    whole = [*asked.prompt.tolist(), *sequence.tokens.tolist()]
    theirs = np.concatenate([result.prompt_logprobs[1:], sequence.logprobs])
    (ours,) = forward(bench.trainer, session, [sample(whole[:-1], whole[1:])])
    return float(np.abs(ours - theirs).max())
