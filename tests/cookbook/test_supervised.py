"""Supervised recipes: losses fall, metrics and checkpoints are written, and runs go on where they stopped."""

from __future__ import annotations

from pathlib import Path

from tests.cookbook.recipe import Cookbook


def test_sl_loop_learns_and_saves(cookbook: Cookbook, tmp_path: Path) -> None:
    run = cookbook.run(
        "sl_loop",
        "batch_size=16",
        "max_steps=8",
        "learning_rate=3e-3",
        "save_every=4",
        log=tmp_path,
    )
    nll = run.series("train_mean_nll")
    assert len(nll) == 8
    assert nll[-1] < nll[0] / 2
    assert [checkpoint["name"] for checkpoint in run.checkpoints] == ["000004", "final"]
