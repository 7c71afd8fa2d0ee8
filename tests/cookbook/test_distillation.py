"""Distillation: students come nearer to their teachers, on what they write themselves and on what is written."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.cookbook.agreement import LOGPROB_TOLERANCE, check_on_policy, mean
from tests.cookbook.recipe import Cookbook, Run, Version

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="module")
def learned(cookbook: Cookbook, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The two paths of a model that has learnt what no other has read."""
    settings = ("batch_size=16", "max_steps=10", "learning_rate=3e-3")
    run = cookbook.run("sl_loop", *settings, log=tmp_path_factory.mktemp("teacher"))
    return run.checkpoints[-1]


@pytest.mark.parametrize(
    ("version", "loss"),
    [("newest", "importance_sampling"), ("newest", "ppo"), ("older", "importance_sampling")],
)
def test_on_policy_distillation_approaches_the_teacher(
    cookbook: Cookbook, tmp_path: Path, learned: dict[str, str], version: Version, loss: str
) -> None:
    """The student has learnt much that its teacher, the base model, does not know, and gives it up."""
    run = cookbook.run(
        "distillation.on_policy_distillation",
        "dataset=tulu3",
        "teacher_model=Qwen/Qwen3.5-9B-Base",
        f"load_checkpoint_path={learned['state_path']}",
        f"loss_fn={loss}",
        "groups_per_batch=12",
        "group_size=8",
        "max_tokens=24",
        "learning_rate=2e-3",
        "max_steps=8",
        "eval_every=0",
        "save_every=4",
        log=tmp_path / "log",
        version=version,
    )
    check_on_policy(run, 8)
    divergence = run.series("teacher_kl")
    assert mean(divergence[-2:]) < 0.3 * divergence[0]
    names = [checkpoint["name"] for checkpoint in run.checkpoints]
    assert names == ["000004", "000008", "final"]


def test_on_policy_distillation_asks_each_teacher_about_its_own_data(
    cookbook: Cookbook, tmp_path: Path, learned: dict[str, str]
) -> None:
    """One teacher is what the student is: an untrained adapter is its base. The other has learnt more."""
    run = cookbook.run(
        "distillation.on_policy_multi_teacher",
        "model_name=Qwen/Qwen3.5-9B-Base",
        "deepmath_teacher_model=Qwen/Qwen3.5-9B-Base",
        "tulu3_teacher_model=Qwen/Qwen3.5-9B-Base",
        f"tulu3_teacher_checkpoint={learned['sampler_path']}",
        "deepmath_groups_per_batch=3",
        "tulu3_groups_per_batch=3",
        "group_size=4",
        "max_tokens=16",
        "max_steps=1",
        "eval_every=0",
        log=tmp_path / "log",
    )
    check_on_policy(run, 1)
    assert abs(run.series("teacher_kl/dataset_0")[0]) < LOGPROB_TOLERANCE
    assert run.series("teacher_kl/dataset_1")[0] > 0.2


def test_off_policy_reasoning_learns(cookbook: Cookbook, tmp_path: Path) -> None:
    """Its data set is streamed and shuffled."""
    run = cookbook.run(
        "distillation.off_policy_reasoning",
        "batch_size=16",
        "max_prompts=128",
        "buffer_size=64",
        "max_length=256",
        "max_steps=8",
        "lora_rank=32",
        "learning_rate=3e-3",
        "eval_every=0",
        log=tmp_path / "log",
    )
    nll = run.series("train_mean_nll")
    assert len(nll) == 8
    assert nll[-1] < nll[0] / 2


def test_soft_targets_of_two_teachers_are_learnt(
    cookbook: Cookbook, tmp_path: Path, learned: dict[str, str]
) -> None:
    """Targets of five tokens a position."""
    arguments = (str(SCRIPTS / "soft_targets.py"), str(tmp_path), learned["sampler_path"])
    run = Run(log=tmp_path, output=cookbook.python("-m", "tinker_compat", *arguments))
    loss = run.series("train/loss:sum")
    assert len(loss) == 8
    assert 0 < mean(loss[-2:]) < 0.7 * loss[0]
    assert run.checkpoints[-1]["name"] == "final"


@pytest.mark.parametrize("dataset", ["toolalpaca", "sciknoweval"])
def test_sdft_learns_from_its_most_probable_tokens(
    cookbook: Cookbook, tmp_path: Path, dataset: str
) -> None:
    run = _sdft(cookbook, tmp_path / "log", f"dataset={dataset}", "max_steps=3")
    assert run.series("sdft/num_datums") == [8, 8, 8]
    assert run.series("sdft/topk") == [5, 5, 5]
    assert min(run.series("unclipped_grad_l2:mean")) > 0


def test_sdft_minimises_the_reverse_divergence(
    cookbook: Cookbook, tmp_path: Path, learned: dict[str, str]
) -> None:
    """Its loss is a function of the client's over targets of five tokens a position. The one to be taught has learnt
    much that its teacher, the base model, does not know."""
    run = _sdft(
        cookbook,
        tmp_path / "log",
        "dataset=toolalpaca",
        "model_name=Qwen/Qwen3.5-9B-Base",
        f"load_checkpoint_path={learned['state_path']}",
        "reverse=True",
        "max_steps=6",
    )
    divergence = run.series("sdft/reverse_kl_mean")
    assert len(divergence) == 6
    assert mean(divergence[-2:]) < 0.5 * divergence[0]
    assert run.series("loss:sum") == run.series("sdft/reverse_kl_loss")


def test_sdft_takes_itself_for_the_teacher_now_and_then(cookbook: Cookbook, tmp_path: Path) -> None:
    settings = ("dataset=toolalpaca", "reverse=True", "teacher_sync_every=1", "max_steps=2")
    run = _sdft(cookbook, tmp_path / "log", *settings)
    assert all(map(math.isfinite, run.series("sdft/reverse_kl_mean")))
    assert "Synced teacher" in run.output


def _sdft(cookbook: Cookbook, log: Path, *settings: str) -> Run:
    return cookbook.run(
        "sdft.train",
        "groups_per_batch=8",
        "max_tokens=16",
        "topk=5",
        "lora_rank=32",
        "learning_rate=3e-3",
        # It cannot evaluate its own test set.
        "eval_every=0",
        *settings,
        log=log,
    )
