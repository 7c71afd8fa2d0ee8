"""What the cookbook's tutorials call, in their order: 101, 103, 202, 203, 204 and 205."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.cookbook.recipe import Cookbook, Version

TUTORIALS = Path(__file__).parent / "tutorials"
VERSIONS = ("newest", "older")


def test_first_samples(cookbook: Cookbook) -> None:
    report = _run(cookbook, "first_samples")
    assert report["models"]
    assert 1 <= report["tokens"] <= 30
    assert len(report["logprobs"]) == min(10, report["tokens"])
    assert max(report["logprobs"]) <= 0
    assert report["stop_reason"] == ("length" if report["tokens"] == 30 else "stop")
    assert report["text"]
    assert len(report["others"]) == 3


@pytest.mark.parametrize("version", VERSIONS)
def test_many_samples(cookbook: Cookbook, version: Version) -> None:
    report = _run(cookbook, "many_samples", version=version)
    assert {name: part["count"] for name, part in report.items()} == {
        "in_turn": 16,
        "at_once": 16,
        "group": 4,
        "group_in_turn": 4,
        "groups_at_once": 64,
    }
    # Calls that are under way together are computed together.
    assert report["at_once"]["seconds"] < report["in_turn"]["seconds"]


def test_losses(cookbook: Cookbook) -> None:
    """Against the formulas of Tinker's documentation, from the log-probabilities that come back."""
    report = _run(cookbook, "losses")
    assert report["logprobs"] == pytest.approx(report["rl_logprobs"], abs=1e-5)
    logprobs = report["logprobs"][-report["answer_length"] :]
    ratios = [math.exp(logprob + 0.7) for logprob in logprobs]

    def ppo(low: float, high: float) -> float:
        return -math.fsum(min(ratio, max(low, min(high, ratio))) for ratio in ratios)

    cispo = math.fsum(
        min(4, ratio) * logprob for ratio, logprob in zip(ratios, logprobs, strict=True)
    )
    expected = {
        "cross_entropy": -math.fsum(logprobs),
        "importance_sampling": -math.fsum(ratios),
        "ppo": ppo(0.8, 1.2),
        "tight": ppo(0.9, 1.1),
        "wide": ppo(0.5, 1.5),
        "cispo": -cispo,
        # Weights do not gate what a loss of one's own sees.
        "squares": math.fsum(logprob**2 for logprob in report["logprobs"]),
        "loss:sum": report["squares"],
    }
    # Sums in float32.
    assert {name: report[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_completers(cookbook: Cookbook, version: Version) -> None:
    report = _run(cookbook, "completers", version=version)
    assert 1 <= report["tokens"] == len(report["logprobs"]) <= 32
    assert report["stop_reason"] in ("stop", "length")
    assert report["role"] == "assistant"
    assert report["grade"] in (None, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("version", "kind"), [("newest", "state"), ("newest", "external"), ("older", "sampler")]
)
def test_checkpoints(cookbook: Cookbook, tmp_path: Path, version: Version, kind: str) -> None:
    directory = tmp_path / "adapter"
    report = _run(cookbook, "checkpoints", str(directory), kind, version=version)
    run = report["run"]
    names = ["sampler_weights/sampler", "weights/state", "sampler_weights/short-lived"]
    assert report["paths"] == [f"tinker://{run}/{name}" for name in names]
    assert report["resumed"] != run
    assert report["rank"] == 16
    assert report["answers"] == 3

    listed = [["sampler", names[2]], ["training", names[1]], ["sampler", names[0]]]
    if kind == "external":
        listed.insert(0, ["external", "external_weights/external"])
    assert report["listed"] == listed
    assert report["everyones"][:3] == report["paths"][::-1]
    assert report["expires"] == [True, False]
    assert report["short_lived_expires"]
    assert report["published"] == [True, False]

    assert report["saved"] == str(directory)
    assert json.loads((directory / "adapter_config.json").read_text())["r"] == 16
    assert (directory / "adapter_model.safetensors").stat().st_size > 10_000


@pytest.mark.parametrize("version", VERSIONS)
def test_evaluators(cookbook: Cookbook, version: Version) -> None:
    report = _run(cookbook, "evaluators", version=version)
    surprise = report["surprise"]
    assert 0 < surprise["nll"] < math.inf
    assert surprise["sum"] == pytest.approx(surprise["loss"], rel=1e-5)
    # The most probable answers are the same when asked for again.
    first, second = report["accuracies"]
    assert first == second
    assert first["accuracy"] == first["right"] / 3
    assert first["right"] >= 1


def _run(
    cookbook: Cookbook, tutorial: str, *arguments: str, version: Version = "newest"
) -> dict[str, Any]:
    script = str(TUTORIALS / f"{tutorial}.py")
    output = cookbook.python("-m", "tinker_compat", script, *arguments, version=version)
    (line,) = [line for line in output.splitlines() if line.startswith("{")]
    return json.loads(line)
