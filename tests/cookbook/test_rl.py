"""Reinforcement learning: rewards rise, and sampler and trainer give the same tokens the same log-probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cookbook.agreement import (
    SQUARED_TOLERANCE,
    check_on_policy,
    check_rollouts,
    mean,
)
from tests.cookbook.recipe import Cookbook, Run, Version

SCRIPTS = Path(__file__).parent / "scripts"
LOSSES = ("importance_sampling", "stable_reinforce")


@pytest.mark.parametrize("loss", LOSSES)
def test_rl_loop_learns(cookbook: Cookbook, tmp_path: Path, loss: str) -> None:
    run = cookbook.run(
        "rl_loop",
        f"loss_fn={loss}",
        "batch_size=8",
        "group_size=8",
        "max_tokens=24",
        "max_steps=12",
        "learning_rate=4e-3",
        "save_every=5",
        log=tmp_path / "log",
    )
    rewards = run.series("reward/total")
    assert len(rewards) == 12
    # From about 0.15 to 0.7. 64 samples a step leave it a noise of 0.05.
    assert mean(rewards[-3:]) > 2 * mean(rewards[:3]) > 0
    assert [checkpoint["name"] for checkpoint in run.checkpoints] == ["000005", "000010", "final"]


def test_rl_basic_runs_in_small(cookbook: Cookbook, tmp_path: Path) -> None:
    run = cookbook.run(
        "rl_basic",
        # What it says of the data cannot be changed in part.
        "dataset_builder=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
        "dataset_builder.renderer_name=role_colon",
        "dataset_builder.model_name_for_tokenizer=Qwen/Qwen3.5-9B-Base",
        "dataset_builder.batch_size=4",
        "dataset_builder.group_size=4",
        "max_tokens=24",
        "max_steps=2",
        log=tmp_path / "log",
    )
    check_on_policy(run, 2)
    assert run.series("env/all/total_episodes") == [16, 16]


@pytest.mark.parametrize(
    ("version", "loss"),
    [
        ("newest", "stable_reinforce"),
        ("newest", "importance_sampling"),
        ("older", "importance_sampling"),
    ],
)
def test_math_rl_learns_and_goes_on_where_it_stopped(
    cookbook: Cookbook, tmp_path: Path, version: Version, loss: str
) -> None:
    run = _arithmetic(
        cookbook,
        tmp_path / "log",
        "max_steps=5",
        "save_every=2",
        f"loss_fn={loss}",
        "num_substeps=2",
        "compute_post_kl=True",
        version=version,
    )
    # The second half of a step trains on samples of the policy before the first.
    check_rollouts(run, 5)
    assert min(run.series("kl_pre_post_v2")) > 1e-6
    _check_form_is_learnt(run)
    assert [checkpoint["name"] for checkpoint in run.checkpoints] == ["000002", "000004", "final"]

    settings = ("max_steps=7", "behavior_if_log_dir_exists=resume", f"loss_fn={loss}")
    run = _arithmetic(cookbook, tmp_path / "log", *settings, version=version)
    assert "Resumed training from" in run.output
    assert run.series("progress/batch") == list(range(7))
    assert run.series("step:max") == [2, 4, 6, 8, 10, 11, 12]
    assert all((run.log / f"iteration_{step:06d}/train.html").exists() for step in range(7))
    # It samples from what it has loaded.
    assert max(run.series("optim/kl_sample_train_v2")[-2:]) < SQUARED_TOLERANCE
    _check_form_is_learnt(run)


def test_math_rl_evaluates_on_word_problems(cookbook: Cookbook, tmp_path: Path) -> None:
    run = cookbook.run(
        "math_rl.train",
        "env=gsm8k",
        "groups_per_batch=4",
        "group_size=4",
        "max_tokens=24",
        "max_steps=2",
        "eval_every=1",
        log=tmp_path / "log",
    )
    check_on_policy(run, 2)
    assert len(run.series("test/env/all/reward/total")) == 3


@pytest.mark.parametrize("loss", LOSSES)
def test_math_rl_learns_from_samples_of_older_policies(
    cookbook: Cookbook, tmp_path: Path, loss: str
) -> None:
    run = _arithmetic(
        cookbook, tmp_path / "log", "max_steps=8", "max_steps_off_policy=2", f"loss_fn={loss}"
    )
    check_rollouts(run, 8)
    staleness = run.series("async/staleness_max")
    assert staleness[0] == 0
    assert 1 <= max(staleness) <= 2
    mismatch = run.series("optim/kl_sample_train_v2")
    assert mismatch[0] < SQUARED_TOLERANCE
    # The sampling client of a step goes on sampling from that step's weights, which training has left.
    assert all(
        (kl > 100 * SQUARED_TOLERANCE) == (steps > 0)
        for steps, kl in zip(staleness, mismatch, strict=True)
    )
    _check_form_is_learnt(run)


@pytest.mark.parametrize("loss", LOSSES)
def test_math_rl_trains_on_minibatches_as_they_come(
    cookbook: Cookbook, tmp_path: Path, loss: str
) -> None:
    run = _arithmetic(
        cookbook,
        tmp_path / "log",
        "max_steps=5",
        "stream_minibatch_config.num_minibatches=4",
        "stream_minibatch_config.groups_per_batch=8",
        f"loss_fn={loss}",
    )
    # Minibatches add up to one step.
    check_on_policy(run, 5)
    assert run.series("step:max") == [1, 2, 3, 4, 5]
    _check_form_is_learnt(run)


def test_guess_number_plays_ten_turns(cookbook: Cookbook, tmp_path: Path) -> None:
    run = cookbook.run(
        "multiplayer_rl.guess_number.train",
        "batch_size=2",
        "group_size=3",
        "max_tokens=10",
        "max_steps=2",
        "eval_every=0",
        log=tmp_path / "log",
    )
    check_on_policy(run, 2)
    assert max(run.series("env/all/turns_per_episode")) <= 10
    # Some guesses have the form of a guess.
    assert max(run.series("env/all/reward/total")) > -10


def test_stable_reinforce_trains_on_conversations(cookbook: Cookbook, tmp_path: Path) -> None:
    """Several sampled spans in one datum, each of a sequence of its own."""
    cookbook.python("-m", "tinker_compat", str(SCRIPTS / "guess_number.py"), str(tmp_path))
    run = Run(log=tmp_path, output="")
    check_on_policy(run, 2)
    assert max(run.series("env/all/turns_per_episode")) > 1


def test_shorter_shortens_its_answers(cookbook: Cookbook, tmp_path: Path) -> None:
    """With a renderer that leaves all of an answer in its content, which is what the recipe measures."""
    run = cookbook.run(
        "preference.shorter.train",
        "model_name=Qwen/Qwen3.5-9B-Base",
        "renderer_name=role_colon",
        "batch_size=6",
        "group_size=8",
        "max_tokens=24",
        "max_steps=10",
        "learning_rate=3e-3",
        "eval_every=0",
        log=tmp_path / "log",
    )
    check_on_policy(run, 10)
    lengths = run.series("env/all/ac_tokens_per_turn")
    assert mean(lengths[-3:]) < 0.85 * mean(lengths[:3])
    # What one answer wins, another loses.
    assert max(map(abs, run.series("env/all/win_minus_loss"))) < 1e-6


def _arithmetic(cookbook: Cookbook, log: Path, *settings: str, version: Version = "newest") -> Run:
    """Sums that the model cannot do, answered in a form that it can learn in a few steps: a number, then the end."""
    return cookbook.run(
        "math_rl.train",
        "env=arithmetic",
        "groups_per_batch=8",
        "group_size=8",
        "max_tokens=6",
        "learning_rate=1.5e-3",
        "eval_every=0",
        *settings,
        log=log,
        version=version,
    )


def _check_form_is_learnt(run: Run) -> None:
    """From about a half to nearly all."""
    form = run.series("env/all/format")
    assert mean(form[-2:]) > form[0] + 0.15
