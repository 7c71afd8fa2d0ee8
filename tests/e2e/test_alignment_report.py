"""`doctor --alignment`: agrees where engines agree, and says so where they do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from backend.agreement import FLOAT32_TOLERANCE, Agreement, Refused, measure
from backend.cli import main
from backend.generator.base import SampleCall, SampleResult
from backend.generator.bigram import BigramGenerator
from backend.trainer import bigram
from backend.trainer.base import FullWeights, Weights
from backend.trainer.bigram_trainer import BigramTrainer
from together_post_training.errors import Reason, fail

MODEL = "builtin:bigram16"


class ForgetsAdapters(BigramGenerator):
    """Answers from the base model whatever it was given."""

    async def sample(self, call: SampleCall) -> SampleResult:
        return await super().sample(replace(call, snapshot=None))


class ReportsTempered(BigramGenerator):
    """Gives the log-probabilities of the distribution that it drew from, as some engines do."""

    async def sample(self, call: SampleCall) -> SampleResult:
        result = await super().sample(call)
        factor = np.float32(1 / call.temperature if call.temperature else 1)
        sequences = [replace(s, logprobs=s.logprobs * factor) for s in result.sequences]
        return replace(result, sequences=sequences)


class ScoresOneToTheLeft(BigramGenerator):
    async def sample(self, call: SampleCall) -> SampleResult:
        result = await super().sample(call)
        if result.prompt_logprobs is None:
            return result
        return replace(result, prompt_logprobs=np.append(result.prompt_logprobs[1:], np.nan))


class RefusesFullWeights(BigramGenerator):
    async def add_snapshot(self, snapshot: str, weights: Weights) -> None:
        if isinstance(weights, FullWeights):
            raise fail(Reason.UNIMPLEMENTED, "Adapters only.")
        await super().add_snapshot(snapshot, weights)


def rows_of(make: Callable[[bigram.BigramModel], BigramGenerator]) -> list[Agreement | Refused]:
    model = bigram.load(MODEL)
    return asyncio.run(measure(BigramTrainer(model), make(model)))


def agreements(rows: list[Agreement | Refused]) -> dict[tuple[str, str], Agreement]:
    return {(row.weights, row.how): row for row in rows if isinstance(row, Agreement)}


def test_report_measures_every_kind_of_weights_at_every_temperature():
    rows = rows_of(BigramGenerator)
    # It has no layer but its head.
    (refused,) = [row for row in rows if isinstance(row, Refused)]
    assert refused.weights == "LoRA without lm_head"
    measured = agreements(rows)
    for weights in ("base", "LoRA with lm_head", "full weights"):
        for how in ("T = 0", "T = 0.7", "T = 1", "T = 1.5", "scored"):
            row = measured[weights, how]
            assert row.max_diff <= 1e-6
            assert row.num_tokens > 30


@pytest.mark.parametrize(
    ("make", "wrong", "right"),
    [
        (ForgetsAdapters, ("LoRA with lm_head", "T = 1"), ("base", "T = 1")),
        (ForgetsAdapters, ("full weights", "scored"), ("base", "scored")),
        (ReportsTempered, ("base", "T = 0.7"), ("base", "T = 1")),
        (ScoresOneToTheLeft, ("base", "scored"), ("base", "T = 1")),
    ],
)
def test_report_finds_an_engine_that_is_wrong(
    make: Callable[[bigram.BigramModel], BigramGenerator],
    wrong: tuple[str, str],
    right: tuple[str, str],
):
    measured = agreements(rows_of(make))
    assert not measured[wrong].max_diff <= FLOAT32_TOLERANCE
    assert measured[right].max_diff <= FLOAT32_TOLERANCE


def test_report_names_weights_that_an_engine_refuses():
    refused = [row for row in rows_of(RefusesFullWeights) if isinstance(row, Refused)]
    assert ("full weights", "Adapters only.") in [(row.weights, row.why) for row in refused]


def test_doctor_prints_the_report_and_its_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert main(["doctor", "--alignment", "--model", MODEL]) == 0
    assert "they agree" in capsys.readouterr().out
    for wrong in (ReportsTempered, ScoresOneToTheLeft):
        monkeypatch.setattr("backend.generator.bigram.BigramGenerator", wrong)
        assert main(["doctor", "--alignment", "--model", MODEL]) == 1
        assert "THEY DO NOT AGREE" in capsys.readouterr().out


def test_doctor_says_what_is_wrong_with_a_model(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--alignment", "--model", "builtin:none"]) == 1
    assert "builtin:none" in capsys.readouterr().err
