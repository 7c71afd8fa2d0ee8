"""Prompt distillation: a long prompt labels texts, and a model learns the labels without the prompt."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cookbook.recipe import Cookbook


def test_prompt_distillation_learns_what_the_prompted_model_said(
    cookbook: Cookbook, tmp_path: Path
) -> None:
    data = tmp_path / "labels.jsonl"
    create = "tinker_cookbook.recipes.prompt_distillation.create_data"
    cookbook.python("-m", "tinker_compat", "-m", create, f"output_file={data}")
    labelled = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    assert len(labelled) >= 4
    assert {label["content"] for _, label in labelled} <= {"en", "de", "fr"}

    settings = (f"file_path={data}", "batch_size=4", "learning_rate=3e-3", "max_steps=6")
    settings += ("num_epochs=6", "save_every=4")
    run = cookbook.run("prompt_distillation.train", *settings, log=tmp_path / "log")
    nll = run.series("train_mean_nll")
    assert nll[-1] < nll[0] / 2
    assert [checkpoint["name"] for checkpoint in run.checkpoints] == ["000004", "final"]
