"""Preference recipes: what is preferred becomes likelier than what is not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.cookbook.recipe import Cookbook, Version


@pytest.mark.parametrize("version", ["newest", "older"])
def test_dpo_learns_what_is_preferred(cookbook: Cookbook, tmp_path: Path, version: Version) -> None:
    settings = ("batch_size=16", "max_steps=5", "learning_rate=1e-3")
    run = cookbook.run("preference.dpo.train", *settings, log=tmp_path / "log", version=version)
    loss, margin = run.series("dpo_loss"), run.series("margin")
    # The reference is the first policy: trainer and generator agree on every logprob.
    assert loss[0] == pytest.approx(math.log(2), abs=1e-4)
    assert margin[0] == pytest.approx(0, abs=1e-3)
    assert loss[-1] < loss[0] / 2
    assert margin[-1] > 1
    assert run.series("accuracy")[-1] == 1
    assert len(run.series("test/nll")) >= 1
    assert run.checkpoints[-1]["name"] == "final"
