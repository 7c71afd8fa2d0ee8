"""CO-12: what a server leaves to the next one on the same store."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.services.harness import MODEL, cross_entropy, refusal, sample, serving, serving_watched
from together_post_training.errors import PostTrainingError
from together_post_training.v1 import checkpoints_pb2, generator_pb2
from together_post_training.v1 import operations_pb2 as o
from together_post_training.v1 import sessions_pb2 as s
from together_post_training.v1 import trainer_pb2 as t

TOKENS = [3, 4, 9, 1]


def test_restart_loses_sessions_and_keeps_results_checkpoints_and_names(tmp_path: Path):
    store = tmp_path / "store"
    with serving(store) as running:
        caller, run = running.caller, running.caller.session(id="run:train:0")
        run.train(TOKENS)
        run.save("a")
        done = run.do("Forward", loss=cross_entropy(), samples=[sample(TOKENS)])
        published = run.publish()
        opened, base = caller.open(path=run.path("a")), caller.open(base_model=MODEL)
        scored = caller.score(opened, TOKENS)
        listed = caller.checkpoints.ListCheckpoints(checkpoints_pb2.ListCheckpointsRequest())
    with serving(store) as running:
        caller = running.caller
        shown = caller.sessions.GetSession(s.GetSessionRequest(id=run.id))
        assert shown.state == s.SESSION_STATE_LOST
        assert (shown.policy_version, shown.last_sequence) == (1, run.sequence)
        assert caller.operations.GetOperation(o.GetOperationRequest(name=done.name)) == done
        assert caller.wait(done) == done
        again = caller.trainer.Forward(
            t.ForwardRequest(
                session=run.id, sequence=4, loss=cross_entropy(), samples=[sample(TOKENS)]
            )
        )
        assert again == done, "a retry of what was accepted is answered as before"
        refused = refusal(
            caller.trainer.OptimStep,
            t.OptimStepRequest(session=run.id, sequence=9, adam=t.AdamParams()),
        )
        assert refused.reason == "SESSION_LOST"
        assert refused.code == grpc.StatusCode.FAILED_PRECONDITION
        assert "resume_from" in refused.message
        beat = refusal(caller.sessions.HeartbeatSession, s.HeartbeatSessionRequest(id=run.id))
        assert beat.reason == "SESSION_LOST"
        assert (
            caller.checkpoints.ListCheckpoints(checkpoints_pb2.ListCheckpointsRequest()) == listed
        )
        resumed = caller.session(resume_from=run.path("a"), load_optimizer=True)
        np.testing.assert_array_equal(
            resumed.logprobs(TOKENS),
            np.frombuffer(
                done.forward_backward.loss_fn_outputs[0].tensors["logprobs"].raw, np.float32
            ),
        )
        np.testing.assert_array_equal(caller.score(opened, TOKENS), scored)
        assert not np.array_equal(caller.score(base, TOKENS), scored)
        gone = refusal(
            caller.generator.Sample,
            generator_pb2.SampleRequest(snapshot=published, prompt=sample(TOKENS).model_input),
        )
        assert gone.reason == "SNAPSHOT_NOT_FOUND"
        assert "Open a checkpoint instead" in gone.message


def test_restart_fails_unfinished_operations_for_good(tmp_path: Path):
    """The first server is stopped while one runs and one is held."""
    store = tmp_path / "store"
    with serving_watched(store) as running:
        assert running.watched is not None
        run = running.caller.session()
        running.watched.gate.clear()
        unfinished = [run.submit("Forward", loss=cross_entropy(), samples=[sample(TOKENS)])]
        run.sequence += 1
        unfinished.append(run.submit("OptimStep", adam=t.AdamParams()))
        running.watched.started.wait(5)
        assert not running.stop(grace_s=0.1)
    with serving(store) as running:
        for operation in unfinished:
            now = running.caller.wait(operation)
            assert now.state == o.OPERATION_STATE_FAILED
            assert now.error.reason == "SESSION_LOST"
            assert "resume_from" in now.error.message


def test_snapshot_of_a_checkpoint_that_changed_over_a_restart_is_gone(tmp_path: Path):
    store = tmp_path / "store"
    with serving(store) as running:
        run = running.caller.session()
        names = {}
        for name in ("deleted", "replaced"):
            run.save(name)
            names[name] = running.caller.open(path=run.path(name))
        run.train(TOKENS)
        run.save("replaced", overwrite=True)
        running.caller.checkpoints.DeleteCheckpoint(
            checkpoints_pb2.DeleteCheckpointRequest(path=run.path("deleted"))
        )
        for name in names.values():
            running.caller.score(name, TOKENS)
    with serving(store) as running:
        for name in names.values():
            refused = refusal(
                running.caller.generator.Sample,
                generator_pb2.SampleRequest(snapshot=name, prompt=sample(TOKENS).model_input),
            )
            assert refused.reason == "SNAPSHOT_NOT_FOUND"


def test_second_server_on_the_same_store_is_refused(tmp_path: Path):
    with serving(tmp_path / "store") as running:
        with (
            pytest.raises(PostTrainingError, match="in use by another server"),
            serving(tmp_path / "store"),
        ):
            pass
        running.caller.session().train(TOKENS)


def test_store_of_another_version_is_refused_and_free_again(tmp_path: Path):
    (tmp_path / "server").mkdir()
    database = sqlite3.connect(tmp_path / "server" / "journal.sqlite3")
    database.executescript("CREATE TABLE sessions (x); PRAGMA user_version = 7;")
    database.close()
    with pytest.raises(PostTrainingError, match="version 7"), serving(tmp_path):
        pass
    (tmp_path / "server").rename(tmp_path / "away")
    with serving(tmp_path) as running:
        running.caller.session().train(TOKENS)


def test_port_in_use_is_refused_with_a_sentence(tmp_path: Path):
    with serving(tmp_path / "a") as running:
        port = int(running.address.rpartition(":")[2])
        with (
            pytest.raises(PostTrainingError, match="Give another --port"),
            serving(tmp_path / "b", port=port),
        ):
            pass
        with serving(tmp_path / "b"):
            pass
