"""Runs, checkpoints, sessions and models, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backend.checkpoints.manifest import Manifest
from tests.cli.conftest import Typed
from tests.services.harness import MODEL, Run, Running, serving
from together_post_training.v1 import checkpoints_pb2

ANYTHING = "v\x1b[31m[bold]\nx"
SHOWN = r"v\x1b[31m[bold]\nx"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A client with two runs, one run typed by hand, and a checkpoint whose run the server does not know."""
    with serving(tmp_path_factory.mktemp("cli") / "store") as running:
        named = {"user_metadata": {"note": ANYTHING}, "display_name": "my\u202erun"}
        first = running.caller.session(id="client:train:0", **named)
        first.train([1, 2, 3, 4])
        first.save("a")
        first.save("b", user_metadata={"note": ANYTHING})
        first.save("s", "INFERENCE")
        running.caller.session(id="client:train:1")
        running.caller.session(id="by-hand")
        copy = checkpoints_pb2.CopyCheckpointRequest(path=first.path("a"), session="elsewhere")
        running.caller.checkpoints.CopyCheckpoint(copy)
        yield running


def rows(out: str) -> list[list[str]]:
    lines = [line for line in out.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_runs_are_listed_newest_first_with_those_only_their_checkpoints_tell_of(ask: Typed):
    shown = rows(ask("run", "list").out)
    assert {row[0] for row in shown} == {"elsewhere", "by-hand", "client:train:1", "client:train:0"}
    ids = [row[0] for row in shown]
    assert ids.index("by-hand") < ids.index("client:train:1") < ids.index("client:train:0")
    states = {row[0]: row[1:4] + row[5:] for row in shown}
    assert states["client:train:0"] == [MODEL, "Rank 4", "1", "Running"]
    assert states["elsewhere"] == [MODEL, "Rank 4", "1", "-"]


def test_runs_as_json_have_tinkers_keys_and_values(ask: Typed):
    runs = {
        run["training_run_id"]: run for run in ask("run", "list", "-f", "json").document["runs"]
    }
    run = runs["client:train:0"]
    # What tinker's own TrainingRun has.
    assert {
        "training_run_id", "base_model", "model_owner", "is_lora", "corrupted", "lora_rank", "last_request_time",
        "last_checkpoint", "last_sampler_checkpoint", "user_metadata",
    } <= run.keys()  # fmt: skip
    assert run["last_checkpoint"]["tinker_path"] == "tinker://client:train:0/weights/b"
    assert run["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/s"
    assert run["user_metadata"] == {"note": ANYTHING}
    assert runs["by-hand"]["last_checkpoint"] is None
    assert runs["elsewhere"]["state"] is None


def test_format_may_stand_before_the_command_as_in_tinkers(typed: Typed, server: Running):
    before = typed("--format", "json", "--address", server.address, "run", "info", "by-hand")
    after = typed("run", "info", "by-hand", "--format", "json", "--address", server.address)
    assert before.document["training_run_id"] == after.document["training_run_id"] == "by-hand"
    inside = typed("checkpoint", "-f", "json", "list", "--address", server.address)
    assert len(inside.document["checkpoints"]) == 4


def test_limit_says_how_many_are_not_shown(ask: Typed):
    out = ask("run", "list", "--limit", "1").out
    assert len(rows(out)) == 1
    assert "1 training run (3 more not shown, see --limit)" in out
    assert len(ask("run", "list", "--limit", "0", "-f", "json").document["runs"]) == 4


def test_columns_of_runs_can_be_chosen(ask: Typed):
    out = ask("run", "list", "-c", "name,id,checkpoint").out
    shown = [row for row in rows(out) if row[1] == "client:train:0"]
    assert shown == [[r"my\u202erun", "client:train:0", "weights/b"]]
    wrong = ask("run", "list", "-c", "id,what")
    assert wrong.status == 2
    assert "no such columns: what. There are id, model" in wrong.err


def test_run_shows_what_its_user_wrote_without_obeying_it(ask: Typed):
    out = ask("run", "info", "client:train:0").out
    assert "\x1b" not in out
    assert ["Metadata note", SHOWN] in rows(out)
    assert ["Training Path", "tinker://client:train:0/weights/b"] in rows(out)


def test_run_that_only_its_checkpoints_tell_of_is_shown(ask: Typed):
    run = ask("run", "info", "elsewhere", "-f", "json").document
    assert run["last_checkpoint"]["copied_from"] == "tinker://client:train:0/weights/a"


def test_unknown_run_is_told_in_one_line(ask: Typed):
    outcome = ask("run", "info", "nobody\x1b[2J")
    assert (outcome.status, outcome.out) == (1, "")
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert "\x1b" not in outcome.err


def test_checkpoints_of_one_run_are_listed(ask: Typed):
    found = ask("checkpoint", "list", "--run-id", "client:train:0", "-f", "json").document
    assert found["run_id"] == "client:train:0"
    ids = [(each["checkpoint_id"], each["checkpoint_type"]) for each in found["checkpoints"]]
    assert ids == [
        ("sampler_weights/s", "sampler"),
        ("weights/b", "training"),
        ("weights/a", "training"),
    ]
    # What tinker's own Checkpoint has.
    assert {
        "checkpoint_id", "checkpoint_type", "time", "tinker_path", "size_bytes", "public", "user_metadata",
        "expires_at",
    } <= found["checkpoints"][0].keys()  # fmt: skip


def test_checkpoint_shows_its_files_and_metadata(ask: Typed, server: Running):
    path = "tinker://client:train:0/weights/b"
    details = ask("checkpoint", "info", path, "-f", "json").document
    assert {file["name"] for file in details["files"]} >= {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
    assert all(len(file["sha256"]) == 64 for file in details["files"])
    out = ask("checkpoint", "info", path).out
    assert ["Tinker Path", path] in rows(out)
    assert ["Metadata note", SHOWN] in rows(out)


@pytest.mark.parametrize(
    "path", ["b", "tinker://a/b", "tinker://a/weights/../b", "http://x/weights/a"]
)
def test_what_is_no_path_of_a_checkpoint_is_refused_before_anything_is_asked(typed: Typed, path):
    outcome = typed("checkpoint", "info", path, "--address", "127.0.0.1:1")
    assert outcome.status == 1
    assert "expected tinker://" in outcome.err


def test_sessions_are_the_clients_with_their_runs(ask: Typed):
    sessions = ask("session", "list", "-f", "json").document["sessions"]
    runs = {each["session_id"]: each["training_run_ids"] for each in sessions}
    assert runs == {
        "client": ["client:train:0", "client:train:1"],
        "by-hand": ["by-hand"],
        "elsewhere": ["elsewhere"],
    }
    out = ask("session", "info", "client").out
    assert rows(out)[-2:] == [["Run", "client:train:0"], ["Run", "client:train:1"]]
    assert "Unknown session 'client:train:0'" in ask("session", "info", "client:train:0").err


def test_models_are_listed_and_searched(ask: Typed):
    (model,) = ask("model", "list", "BIGRAM", "-f", "json").document["models"]
    assert (model["model_name"], model["max_context_length"], model["loaded"]) == (
        MODEL,
        1024,
        True,
    )
    assert rows(ask("model", "list").out) == [[MODEL, "1024", "Yes", "Yes", "Yes"]]
    nothing = ask("model", "list", "qwen")
    assert (nothing.status, nothing.out) == (1, "")


def test_listing_pages_through_ten_thousand_checkpoints(tmp_path: Path, typed: Typed, monkeypatch):
    """Of the server's pages of 1000: all of them, each once, and no more pages than are asked for."""
    with serving(tmp_path / "store") as running:
        run: Run = running.caller.session()
        run.save("a")
        manifest = running.server._checkpoints.list()[0]
        many = [_numbered(manifest, number) for number in range(10_000)]
        monkeypatch.setattr(running.server._checkpoints, "list", lambda session=None: many)
        address = ("--address", running.address, "-f", "json")
        found = typed("checkpoint", "list", "--limit", "0", *address).document["checkpoints"]
        assert len({each["tinker_path"] for each in found}) == 10_000
        few = typed("checkpoint", "list", *address).document["checkpoints"]
        assert [each["tinker_path"] for each in few] == [each["tinker_path"] for each in found[:20]]
        out = typed("checkpoint", "list", "--limit", "1500", "--address", running.address).out
        assert len(rows(out)) == 1500
        assert "1500 checkpoints (there are more: see --limit)" in out


def _numbered(manifest: Manifest, number: int) -> Manifest:
    return replace(manifest, name=f"n{number}", create_time_s=manifest.create_time_s + number)
