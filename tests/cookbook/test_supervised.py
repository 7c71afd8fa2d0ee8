"""Supervised recipes: losses fall, metrics and checkpoints are written, and runs go on where they stopped."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import tinker_compat as tinker
from tests.cookbook import exports
from tests.cookbook.recipe import Cookbook, Run

# No rank: 32 is the recipes' own default. The models are small, and take larger steps.
SETTINGS = ("batch_size=16", "max_steps=8", "learning_rate=3e-3")


def test_sl_loop_learns_and_resumes_exactly(cookbook: Cookbook, tmp_path: Path) -> None:
    run = cookbook.run("sl_loop", *SETTINGS, "save_every=4", log=tmp_path)
    nll = run.series("train_mean_nll")
    assert len(nll) == 8
    assert nll[-1] < nll[0] / 2
    assert [checkpoint["name"] for checkpoint in run.checkpoints] == ["000004", "final"]
    assert set(run.checkpoints[-1]) == {"name", "batch", "state_path", "sampler_path"}

    _forget(run, after="000004")
    again = cookbook.run("sl_loop", *SETTINGS, "save_every=4", log=tmp_path)
    # Weights, moments and data are those of the run that was not interrupted; only what runs beside it may differ.
    assert again.series("train_mean_nll") == pytest.approx([*nll, *nll[4:]], abs=1e-4)


def test_sl_loop_of_the_older_cookbook_learns(cookbook: Cookbook, tmp_path: Path) -> None:
    run = cookbook.run("sl_loop", *SETTINGS, log=tmp_path, version="older")
    nll = run.series("train_mean_nll")
    assert nll[-1] < nll[0] / 2
    assert run.checkpoints[-1]["name"] == "final"


def test_sl_loop_starts_a_server_of_its_own(cookbook: Cookbook, tmp_path: Path) -> None:
    alone = dataclasses.replace(cookbook, address=None, store=tmp_path / "store")
    run = alone.run("sl_loop", "batch_size=16", "max_steps=2", log=tmp_path / "log")
    assert "embedded server" in run.output
    path = run.checkpoints[-1]["state_path"]
    assert (alone.store / "checkpoints" / path.removeprefix("tinker://")).is_dir()


def test_sl_basic_learns(cookbook: Cookbook, tmp_path: Path) -> None:
    settings = ("num_epochs=5", "learning_rate=3e-3", "eval_every=4")
    run = cookbook.run("sl_basic", *settings, log=tmp_path / "log")
    assert run.series("num_sequences") == [128] * 5
    nll = run.series("train_mean_nll")
    assert nll[-1] < 0.7 * nll[0]
    before, after = run.series("test/nll")
    assert after < 0.7 * before
    # Both are of the weights before any step and of the same facts, which batches hold in slightly other numbers: one
    # comes from the trainer, one from the generator.
    assert before == pytest.approx(nll[0], rel=0.02)
    assert [checkpoint["name"] for checkpoint in run.checkpoints] == ["final"]
    assert "WARNING" not in _without_pricing(run.output)


@pytest.fixture(scope="module")
def chat(cookbook: Cookbook, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of chat_sl with all kinds of checkpoints."""
    log = tmp_path_factory.mktemp("chat") / "log"
    saving = ("save_every=3", "rolling_save_every=2", "eval_every=4")
    return cookbook.run("chat_sl.train", *SETTINGS, *saving, log=log)


def test_chat_sl_learns_and_evaluates(chat: Run) -> None:
    nll = chat.series("train_mean_nll")
    assert nll[-1] < nll[0] / 2
    before, after = chat.series("test/nll")
    assert after < 0.7 * before
    assert (chat.log / "config.json").exists()


def test_chat_sl_saves_and_deletes_its_checkpoints(chat: Run, cookbook: Cookbook) -> None:
    saved = {checkpoint["name"]: checkpoint for checkpoint in chat.checkpoints}
    assert list(saved) == ["000002", "000003", "000004", "000006", "final"]
    rolling = [name for name in saved if saved[name].get("rolling")]
    assert rolling == ["000002", "000004"]
    with tinker.ServiceClient(base_url=cookbook.address) as service:
        rest = service.create_rest_client()
        run_id = saved["final"]["state_path"].split("/")[2]
        listed = {c.tinker_path: c for c in rest.list_checkpoints(run_id).result().checkpoints}
    kept = [name for name in saved if name not in rolling]
    assert set(listed) == {saved[n][k] for n in kept for k in ("state_path", "sampler_path")}
    # Those of every few steps expire, the last one does not.
    assert listed[saved["000003"]["state_path"]].expires_at is not None
    assert listed[saved["final"]["state_path"]].expires_at is None


def test_chat_sl_saves_what_plain_peft_computes(chat: Run, cookbook: Cookbook) -> None:
    path = chat.checkpoints[-1]["sampler_path"]
    tokens = exports.known_tokens(cookbook.hub)
    ours = cookbook.logprobs(path, tokens)
    directory = cookbook.store / "checkpoints" / path.removeprefix("tinker://")
    # float32 twice, summed in another order.
    assert exports.adapter_logprobs(cookbook.hub, directory, tokens) == pytest.approx(
        ours, abs=1e-4
    )
    base = exports.model_logprobs(cookbook.hub / exports.BASE, tokens)
    assert sum(base) < 1.5 * sum(ours)  # It knows the answer better than its base does.


def test_chat_sl_resumes(chat: Run, cookbook: Cookbook, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    for name in ("checkpoints.jsonl", "metrics.jsonl"):
        (log / name).write_text((chat.log / name).read_text())
    interrupted = Run(log=log, output="")
    _forget(interrupted, after="000006")
    settings = ("behavior_if_log_dir_exists=resume", "save_every=0", "eval_every=0")
    run = cookbook.run("chat_sl.train", *SETTINGS, *settings, log=log)
    assert "Renderer metadata matches" in run.output
    assert run.series("step") == list(range(8))
    # This recipe saves after it has submitted the step ahead, which is done again: close, not the same.
    assert run.series("train_mean_nll") == pytest.approx(chat.series("train_mean_nll"), rel=0.15)
    assert run.checkpoints[-1]["name"] == "final"


def test_chat_sl_starts_from_another_runs_weights(
    chat: Run, cookbook: Cookbook, tmp_path: Path
) -> None:
    start = f"load_checkpoint_path={chat.checkpoints[-1]['state_path']}"
    settings = ("dataset=tulu3", "batch_size=16", "max_steps=1", "eval_every=0", start)
    run = cookbook.run("chat_sl.train", *settings, log=tmp_path / "log")
    assert "Renderer metadata matches" in run.output
    (nll,) = run.series("train_mean_nll")
    assert nll == pytest.approx(chat.series("train_mean_nll")[-1], rel=0.15)


def _forget(run: Run, *, after: str) -> None:
    """Drops what was saved after that checkpoint, as if the run had been killed before."""
    names = [checkpoint["name"] for checkpoint in run.checkpoints]
    kept = run.checkpoints[: names.index(after) + 1]
    lines = "".join(json.dumps(checkpoint) + "\n" for checkpoint in kept)
    (run.log / "checkpoints.jsonl").write_text(lines)


def _without_pricing(output: str) -> str:
    """Prices are looked up on the Internet, where there is none."""
    return "\n".join(line for line in output.splitlines() if "model pricing" not in line)
