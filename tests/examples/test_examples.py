"""The example scripts, as a user runs them: each with an embedded server, on the tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def run_example(name: str, output: Path, *arguments: str) -> str:
    """Its summary."""
    environment = {**os.environ, "TOGETHER_POST_TRAINING_STORE": str(output / "store")}
    for variable in ("TOGETHER_POST_TRAINING_ADDRESS", "TINKER_BASE_URL", "TOGETHER_BASE_URL"):
        environment.pop(variable, None)
    script = str(REPOSITORY / "examples" / f"{name}.py")
    done = subprocess.run(
        [sys.executable, script, "--output", str(output), *arguments],
        env=environment,
        cwd=output,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    summary = (output / f"{name}.txt").read_text()
    assert done.stdout.endswith(summary)
    assert (output / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return summary


def before_and_after(summary: str, what: str) -> tuple[float, float]:
    found = re.search(rf"^  {what} +([0-9.]+) -> ([0-9.]+)", summary, re.MULTILINE)
    assert found, summary
    return float(found[1]), float(found[2])


def test_sft_more_than_halves_the_loss_on_unseen_questions(tmp_path: Path):
    summary = run_example("sft", tmp_path, "--model", "builtin:tiny", "--learning-rate", "1e-2")
    before, after = before_and_after(summary, "loss per token")
    assert after < before / 2


def test_grpo_raises_the_reward(tmp_path: Path):
    before, after = before_and_after(run_example("grpo", tmp_path), "mean reward")
    assert before < 0.3
    assert after > 0.7


def test_dpo_learns_to_rank_unseen_pairs(tmp_path: Path):
    summary = run_example("dpo", tmp_path)
    before, after = before_and_after(summary, "accuracy")
    # At the start policy and reference are the same: all pairs are ties.
    assert before == 0.5
    assert after > 0.9
    assert (
        before_and_after(summary, "loss per pair")[1]
        < before_and_after(summary, "loss per pair")[0]
    )


@pytest.mark.parametrize("name", ["sft", "grpo", "dpo"])
def test_example_is_a_tinker_script_but_for_its_import_line(name: str):
    text = (REPOSITORY / "examples" / f"{name}.py").read_text()
    imports = re.findall(
        r"^(?:import|from) .*(?:together|tinker_compat|backend).*$", text, re.MULTILINE
    )
    assert imports == ["import together.post_training.tinker as tinker"]
