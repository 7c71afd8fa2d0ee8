"""Checkpoints over the wire after they were saved: ttl, publish, copy, single files; and external ones."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from pyrage import decrypt, x25519  # pyright: ignore[reportAttributeAccessIssue]

from tests.services.harness import Caller, Clock, Run, refusal, serving, wait_until
from together_post_training.v1 import checkpoints_pb2 as pb
from together_post_training.v1 import generator_pb2, sessions_pb2
from together_post_training.v1 import operations_pb2 as o
from together_post_training.v1 import trainer_pb2 as t

TOKENS = [3, 4, 9, 1]
HOUR = Duration(seconds=3600)
WEIGHTS = "adapter_model.safetensors"


def saved(caller: Caller, name: str = "a", kind: str = "TRAINING", **fields: Any) -> Run:
    run = caller.session()
    run.train(TOKENS)
    done = run.save(name, kind, **fields)
    assert done.state == o.OPERATION_STATE_SUCCEEDED, done.error
    return run


def get(caller: Caller, path: str) -> pb.Checkpoint:
    return caller.checkpoints.GetCheckpoint(pb.GetCheckpointRequest(path=path))


def set_ttl(caller: Caller, path: str, ttl: Duration | None) -> pb.Checkpoint:
    return caller.checkpoints.SetCheckpointTtl(pb.SetCheckpointTtlRequest(path=path, ttl=ttl))


def copy(caller: Caller, path: str, session: str, **fields: Any) -> pb.Checkpoint:
    request = pb.CopyCheckpointRequest(path=path, session=session, **fields)
    return caller.checkpoints.CopyCheckpoint(request)


def download(caller: Caller, path: str, **fields: Any) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    request = pb.DownloadCheckpointRequest(path=path, **fields)
    for piece in caller.checkpoints.DownloadCheckpoint(request):
        files[piece.filename] = files.get(piece.filename, b"") + piece.data
    return files


def resumed(caller: Caller, path: str) -> np.ndarray:
    return caller.session(resume_from=path).logprobs(TOKENS)


def test_ttl_is_counted_from_now_and_the_sweep_follows_it(tmp_path: Path):
    clock = Clock(1_900_000_000.0)
    with serving(tmp_path, clocks={"clock": clock}, checkpoint_sweep_interval_s=0.01) as running:
        caller = running.caller
        run = saved(caller, ttl=Duration(seconds=10))
        path = run.path("a")
        run.save("probe", ttl=Duration(seconds=30))

        def files() -> int:
            return len(list((tmp_path / "checkpoints" / ".data").iterdir()))

        clock.now += 9
        changed = set_ttl(caller, path, HOUR)
        assert changed == set_ttl(caller, path, HOUR)
        assert changed.expire_time.seconds == clock.now + 3600
        assert changed.create_time.seconds == clock.now - 9
        clock.now += 30
        wait_until(lambda: files() == 1)
        assert not set_ttl(caller, path, None).HasField("expire_time")
        clock.now += 10 * 366 * 24 * 3600
        np.testing.assert_array_equal(resumed(caller, path), run.logprobs(TOKENS))
        assert set_ttl(caller, path, Duration(nanos=500_000_000)).HasField("expire_time")
        clock.now += 0.5
        wait_until(lambda: files() == 0)
        refused = refusal(
            caller.checkpoints.SetCheckpointTtl, pb.SetCheckpointTtlRequest(path=path, ttl=HOUR)
        )
        assert refused.reason == "CHECKPOINT_NOT_FOUND"


@pytest.mark.parametrize(
    "ttl",
    [Duration(), Duration(seconds=-1), Duration(nanos=-1), Duration(seconds=10 * 366 * 86400 + 1)],
)
def test_ttl_of_0_negative_or_over_ten_years_is_refused_everywhere(caller: Caller, ttl: Duration):
    path = saved(caller).path("a")
    for refused in (
        refusal(
            caller.checkpoints.SetCheckpointTtl, pb.SetCheckpointTtlRequest(path=path, ttl=ttl)
        ),
        refusal(
            caller.checkpoints.CopyCheckpoint,
            pb.CopyCheckpointRequest(path=path, session="other", ttl=ttl),
        ),
    ):
        assert refused.reason == "INVALID_ARGUMENT"
        assert "more than 0 and at most ten years" in refused.message
    assert not get(caller, path).HasField("expire_time")


def test_checkpoint_is_published_once_and_taken_back_once(caller: Caller):
    path = saved(caller).path("a")
    publish = pb.PublishCheckpointRequest(path=path)
    unpublish = pb.UnpublishCheckpointRequest(path=path)
    assert not get(caller, path).is_public
    refused = refusal(caller.checkpoints.UnpublishCheckpoint, unpublish)
    assert (refused.reason, refused.code) == ("NOT_PUBLIC", grpc.StatusCode.FAILED_PRECONDITION)
    assert path in refused.message
    assert caller.checkpoints.PublishCheckpoint(publish).is_public
    refused = refusal(caller.checkpoints.PublishCheckpoint, publish)
    assert (refused.reason, refused.code) == ("ALREADY_PUBLIC", grpc.StatusCode.ALREADY_EXISTS)
    listed = caller.checkpoints.ListCheckpoints(pb.ListCheckpointsRequest()).checkpoints
    assert [c.is_public for c in listed if c.path == path] == [True]
    assert not caller.checkpoints.UnpublishCheckpoint(unpublish).is_public


def test_changed_checkpoint_is_the_same_to_those_who_sample_from_it(caller: Caller):
    """Its snapshot has one name, and is not opened again."""
    run = saved(caller, kind="INFERENCE")
    path = run.path("a", "sampler_weights")
    snapshot = caller.open(path=path)
    set_ttl(caller, path, HOUR)
    caller.checkpoints.PublishCheckpoint(pb.PublishCheckpointRequest(path=path))
    assert caller.open(path=path) == snapshot


def test_copy_is_resumed_from_and_sampled_from_when_its_source_is_gone(caller: Caller):
    run = saved(caller, user_metadata={"k": "v"})
    path, expected = run.path("a"), run.logprobs(TOKENS)
    made = copy(caller, path, "elsewhere:1", ttl=HOUR)
    assert made.path == "tinker://elsewhere:1/weights/a"
    assert made.session == "elsewhere:1"
    assert made.copied_from == path
    assert made.expire_time.seconds - made.create_time.seconds == 3600
    assert made.user_metadata == {"k": "v"}
    assert copy(caller, path, "elsewhere:1") == made
    caller.checkpoints.DeleteCheckpoint(pb.DeleteCheckpointRequest(path=path))
    np.testing.assert_array_equal(resumed(caller, made.path), expected)
    np.testing.assert_allclose(
        caller.score(caller.open(path=made.path), TOKENS)[1:], expected, atol=1e-6
    )


def test_copy_of_a_name_that_is_taken_is_refused(caller: Caller):
    run, other = saved(caller), saved(caller)
    request = pb.CopyCheckpointRequest(path=run.path("a"), session=other.id)
    refused = refusal(caller.checkpoints.CopyCheckpoint, request)
    assert refused.reason == "CHECKPOINT_EXISTS"
    assert other.path("a") in refused.message
    assert run.path("a") in refused.message


@pytest.mark.parametrize("session", ["", "../x", "a/b", ".", "x" * 129, ".data", "a b"])
def test_copy_goes_to_a_sessions_id_only(caller: Caller, session: str):
    request = pb.CopyCheckpointRequest(path=saved(caller).path("a"), session=session)
    assert refusal(caller.checkpoints.CopyCheckpoint, request).reason == "INVALID_NAME"


@pytest.mark.parametrize("path", ["tinker://none/weights/a", "tinker://../weights/a", "a", ""])
def test_what_is_not_there_cannot_be_changed(caller: Caller, path: str):
    for call, request in (
        (caller.checkpoints.SetCheckpointTtl, pb.SetCheckpointTtlRequest(path=path)),
        (caller.checkpoints.PublishCheckpoint, pb.PublishCheckpointRequest(path=path)),
        (caller.checkpoints.UnpublishCheckpoint, pb.UnpublishCheckpointRequest(path=path)),
        (
            caller.checkpoints.CopyCheckpoint,
            pb.CopyCheckpointRequest(path=path, session="other"),
        ),
    ):
        expected = "CHECKPOINT_NOT_FOUND" if "none" in path else "INVALID_PATH"
        assert refusal(call, request).reason == expected


def test_files_are_told_with_their_hashes_and_downloaded_one_by_one(caller: Caller):
    path = saved(caller).path("a")
    files = {file.name: file for file in get(caller, path).files}
    assert set(files) == {WEIGHTS, "adapter_config.json", "optimizer.safetensors"}
    assert sum(file.size_bytes for file in files.values()) == get(caller, path).size_bytes
    for name, file in files.items():
        got = download(caller, path, filename=name)
        assert set(got) == {name}
        assert len(got[name]) == file.size_bytes
        assert hashlib.sha256(got[name]).hexdigest() == file.sha256
        assert download(caller, path, filename=name, offset=100)[name] == got[name][100:]
        end = download(caller, path, filename=name, offset=file.size_bytes)
        assert end == {name: b""}
    assert set(download(caller, path, filename="manifest.json")) == {"manifest.json"}
    listed = caller.checkpoints.ListCheckpoints(pb.ListCheckpointsRequest()).checkpoints
    assert not any(checkpoint.files for checkpoint in listed)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"offset": 1}, "no filename"),
        ({"offset": -1}, "no filename"),
        ({"filename": WEIGHTS, "offset": -1}, "offset is -1"),
        ({"filename": WEIGHTS, "offset": 10**9}, "offset is 1000000000"),
        ({"filename": "../../../server/lock"}, "has no file '../../../server/lock'"),
        ({"filename": "/etc/passwd"}, "has no file '/etc/passwd'"),
        ({"filename": "model.safetensors"}, WEIGHTS),
    ],
)
def test_download_of_what_is_no_part_of_a_file_is_refused(
    caller: Caller, fields: dict[str, Any], says: str
):
    request = pb.DownloadCheckpointRequest(path=saved(caller).path("a"), **fields)
    refused = refusal(lambda r: list(caller.checkpoints.DownloadCheckpoint(r)), request)
    assert refused.reason == "INVALID_ARGUMENT"
    assert says in refused.message


def test_external_checkpoint_is_loaded_and_sampled_from_like_an_inference_one(caller: Caller):
    run = saved(caller, kind="EXTERNAL")
    path = run.path("a", "external_weights")
    shown = get(caller, path)
    assert shown.kind == t.CHECKPOINT_KIND_EXTERNAL
    assert not shown.has_optimizer
    assert set(download(caller, path)) == {WEIGHTS, "adapter_config.json", "manifest.json"}
    expected = run.logprobs(TOKENS)
    np.testing.assert_array_equal(resumed(caller, path), expected)
    np.testing.assert_allclose(
        caller.score(caller.open(path=path), TOKENS)[1:], expected, atol=1e-6
    )
    with_optimizer = run.do("LoadCheckpoint", path=path, optimizer=True)
    assert with_optimizer.error.reason == "WRONG_CHECKPOINT_KIND"
    assert run.do("LoadCheckpoint", path=path).state == o.OPERATION_STATE_SUCCEEDED


def test_encrypted_checkpoint_is_for_its_owner_alone(caller: Caller):
    identity = x25519.Identity.generate()
    run = saved(caller, kind="EXTERNAL", age_recipients=[str(identity.to_public())])
    run.save("plain", "EXTERNAL")
    path, before = run.path("a", "external_weights"), run.logprobs(TOKENS)
    files = download(caller, path)
    assert set(files) == {f"{WEIGHTS}.age", "adapter_config.json.age", "manifest.json"}
    plain = download(caller, run.path("plain", "external_weights"))
    for name in (WEIGHTS, "adapter_config.json"):
        assert decrypt(files[f"{name}.age"], [identity]) == plain[name]
    load = run.do("LoadCheckpoint", path=path).error
    opened = refusal(caller.generator.OpenSnapshot, generator_pb2.OpenSnapshotRequest(path=path))
    started = refusal(
        caller.sessions.CreateSession, sessions_pb2.CreateSessionRequest(resume_from=path)
    )
    for refused in (load, opened, started):
        assert refused.reason == "WRONG_CHECKPOINT_KIND"
        assert "encrypted for the owners of age keys" in refused.message
    np.testing.assert_array_equal(run.logprobs(TOKENS), before)


def test_recipients_are_checked_before_anything_is_saved(caller: Caller):
    """The submission itself answers, and uses its number up."""
    run = caller.session()
    good = str(x25519.Identity.generate().to_public())
    for kind, recipients, says in (
        ("EXTERNAL", [good, "age1nonsense"], "age_recipients[1] is 'age1nonsense'"),
        ("EXTERNAL", [""], "age_recipients[0] is ''"),
        ("INFERENCE", [good], "CHECKPOINT_KIND_INFERENCE"),
        ("TRAINING", [good], "CHECKPOINT_KIND_TRAINING"),
    ):
        submitted = run.submit(
            "SaveCheckpoint",
            kind=t.CheckpointKind.Value(f"CHECKPOINT_KIND_{kind}"),
            name="a",
            age_recipients=recipients,
        )
        assert submitted.state == o.OPERATION_STATE_FAILED
        assert submitted.error.reason == "INVALID_ARGUMENT"
        assert says in submitted.error.message
    listed = caller.checkpoints.ListCheckpoints(pb.ListCheckpointsRequest(session=run.id))
    assert not listed.checkpoints
    assert run.save("a", "EXTERNAL").state == o.OPERATION_STATE_SUCCEEDED


def test_changes_are_there_after_a_restart(tmp_path: Path):
    with serving(tmp_path) as running:
        caller = running.caller
        path = saved(caller).path("a")
        caller.checkpoints.PublishCheckpoint(pb.PublishCheckpointRequest(path=path))
        changed = set_ttl(caller, path, HOUR)
        made = copy(caller, path, "other")
    with serving(tmp_path) as running:
        listed = running.caller.checkpoints.ListCheckpoints(pb.ListCheckpointsRequest())
        assert list(listed.checkpoints) == [made, changed]
        assert changed.is_public
