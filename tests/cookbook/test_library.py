"""The cookbook as a library, in scripts of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cookbook import exports
from tests.cookbook.recipe import Cookbook, Version

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize("version", ["newest", "older"])
def test_evaluators_of_trainer_and_sampler_agree(
    cookbook: Cookbook, tmp_path: Path, version: Version
) -> None:
    script = str(SCRIPTS / "evaluators.py")
    output = cookbook.python("-m", "tinker_compat", script, str(tmp_path), version=version)
    *steps, end = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(steps) == 4
    sampled = [row["sampler"] for row in (*steps, end)]
    # What the trainer computes after a step is what the next snapshot computes. float32, in another order.
    for forward, sampler in zip(steps, sampled[1:], strict=True):
        assert forward["forward_after"] == pytest.approx(sampler, abs=1e-4)
    assert sampled[-1]["test/nll"] < sampled[0]["test/nll"] / 2
    assert end["renderer"] == "qwen3"


@pytest.mark.parametrize(
    ("version", "kind"),
    [("newest", "state_path"), ("older", "state_path"), ("older", "sampler_path")],
)
def test_exports_compute_what_the_sampler_computes(
    cookbook: Cookbook, tmp_path: Path, checkpoint: dict[str, str], version: Version, kind: str
) -> None:
    adapter, peft, merged = (tmp_path / name for name in ("adapter", "peft", "merged"))
    arguments = (checkpoint[kind], str(adapter), str(peft), str(merged))
    script = str(SCRIPTS / "export.py")
    cookbook.python("-m", "tinker_compat", script, *arguments, version=version)

    tokens = exports.known_tokens(cookbook.hub)
    # float32 in another order; merging rounds once more.
    expected = pytest.approx(cookbook.logprobs(checkpoint["sampler_path"], tokens), abs=1e-3)
    assert exports.adapter_logprobs(cookbook.hub, adapter, tokens) == expected
    assert exports.adapter_logprobs(cookbook.hub, peft, tokens) == expected
    assert exports.model_logprobs(merged, tokens) == expected


@pytest.fixture(scope="module")
def checkpoint(cookbook: Cookbook, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a short run: its two paths."""
    settings = ("batch_size=16", "max_steps=3", "learning_rate=3e-3")
    run = cookbook.run("sl_loop", *settings, log=tmp_path_factory.mktemp("run"))
    return run.checkpoints[-1]
