"""Deleting, publishing, copying and time to live."""

from __future__ import annotations

import io
import itertools
from datetime import UTC, datetime, timedelta

import pytest

from tests.cli.conftest import Typed
from tests.services.harness import Run, Running
from together_post_training.cli import records
from together_post_training.cli.checkpoints import matches
from together_post_training.v1 import checkpoints_pb2

_numbers = itertools.count()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(server: Running) -> Run:
    """With weights/a, weights/b and sampler_weights/s."""
    made = server.caller.session(id=f"run-{next(_numbers)}")
    for name, kind in (("a", "TRAINING"), ("b", "TRAINING"), ("s", "INFERENCE")):
        made.save(name, kind)
    return made


def saved(run: Run) -> set[str]:
    request = checkpoints_pb2.ListCheckpointsRequest(session=run.id)
    found = run.caller.checkpoints.ListCheckpoints(request).checkpoints
    return {each.path.rpartition("/")[2] for each in found}


def test_deletion_is_refused_in_a_pipe_unless_it_is_confirmed_by_an_option(ask: Typed, run: Run):
    refused = ask("checkpoint", "delete", run.path("a"))
    assert refused.status == 2
    assert "give -y" in refused.err
    assert saved(run) == {"a", "b", "s"}
    done = ask("checkpoint", "delete", "-y", run.path("a"), run.path("b"), "-f", "json")
    assert done.document == {"deleted_count": 2, "failed": []}
    assert saved(run) == {"s"}


@pytest.mark.parametrize(
    ("answer", "left"), [("y\n", {"b", "s"}), ("n\n", {"a", "b", "s"}), ("", {"a", "b", "s"})]
)
def test_deletion_is_asked_about_on_a_terminal(ask: Typed, run: Run, monkeypatch, answer, left):
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    outcome = ask("checkpoint", "delete", run.path("a"), "-f", "json")
    assert run.path("a") in outcome.err
    assert "[y/N]" in outcome.err
    assert outcome.status == (0 if answer == "y\n" else 1)
    assert saved(run) == left


def test_deletion_tells_of_each_that_failed(ask: Typed, run: Run):
    missing = run.path("missing")
    outcome = ask("checkpoint", "delete", "-y", missing, run.path("a"), "-f", "json")
    assert outcome.status == 1
    assert f'"tinker_path": "{missing}"' in outcome.out
    assert "Unknown checkpoint" in outcome.err
    assert saved(run) == {"b", "s"}


def test_deletion_of_a_path_that_is_none_deletes_nothing(ask: Typed, run: Run):
    assert ask("checkpoint", "delete", "-y", run.path("a"), "nonsense").status == 1
    assert saved(run) == {"a", "b", "s"}


def test_deletion_chooses_among_a_runs_by_type_and_date(ask: Typed, run: Run):
    of_run = ("checkpoint", "delete", "-y", "--run-id", run.id)
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).date().isoformat()
    assert "match" in ask(*of_run, "--after", tomorrow).out
    assert saved(run) == {"a", "b", "s"}
    assert (
        "Deleted 1 checkpoint."
        in ask(*of_run, "--type", "sampler_weights", "--before", tomorrow).out
    )
    assert saved(run) == {"a", "b"}
    assert "Deleted 2 checkpoints." in ask(*of_run, "--type", "training").out
    assert saved(run) == set()


def test_date_is_of_neither_before_nor_after(run: Run):
    request = checkpoints_pb2.GetCheckpointRequest(path=run.path("a"))
    record = records.checkpoint(run.caller.checkpoints.GetCheckpoint(request))
    assert not matches(record, None, before=record.time, after=None)
    assert not matches(record, None, before=None, after=record.time)
    moment = timedelta(microseconds=1)
    assert matches(record, None, before=record.time + moment, after=record.time - moment)


def test_ttl_is_set_and_taken_away(ask: Typed, run: Run):
    path = run.path("a")
    record = ask("checkpoint", "set-ttl", path, "--ttl", "7200", "-f", "json").document
    left = datetime.fromisoformat(record["expires_at"]) - datetime.now(UTC)
    assert timedelta(seconds=7100) < left <= timedelta(seconds=7200)
    assert "in 1 hour" in ask("checkpoint", "info", path).out
    assert "never expires" in ask("checkpoint", "set-ttl", path, "--remove").out
    assert ask("checkpoint", "info", path, "-f", "json").document["expires_at"] is None


def test_checkpoint_is_published_and_unpublished(ask: Typed, run: Run):
    path = run.path("a")
    assert ask("checkpoint", "publish", path, "-f", "json").document["public"] is True
    assert ask("checkpoint", "info", path, "-f", "json").document["public"] is True
    again = ask("checkpoint", "publish", path)
    assert again.status == 1
    assert "is private" in ask("checkpoint", "unpublish", path).out
    assert ask("checkpoint", "unpublish", path).status == 1


def test_copy_tells_its_path(ask: Typed, run: Run):
    outcome = ask("checkpoint", "copy", run.path("a"), f"{run.id}-copy", "--ttl", "3600")
    path = f"tinker://{run.id}-copy/weights/a"
    assert outcome.out == f"{path}\n"
    record = ask("checkpoint", "info", path, "-f", "json").document
    assert record["copied_from"] == run.path("a")
    assert record["expires_at"] is not None


def test_what_the_server_refuses_is_told_in_one_line(ask: Typed, run: Run):
    outcome = ask("checkpoint", "copy", run.path("a"), "no good")
    assert outcome.status == 1
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
