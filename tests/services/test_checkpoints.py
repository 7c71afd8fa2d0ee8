from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from backend.checkpoints import version_files
from tests.services.harness import (
    MODEL,
    Caller,
    Clock,
    Run,
    cross_entropy,
    refusal,
    sample,
    serving,
)
from together_post_training.v1 import checkpoints_pb2 as pb
from together_post_training.v1 import generator_pb2, sessions_pb2
from together_post_training.v1 import operations_pb2 as o
from together_post_training.v1 import trainer_pb2 as t

TOKENS = [3, 4, 9, 1]

# AU-02. Each is one name; whether it is refused is all that is asked of it.
HOSTILE_NAMES = [
    "../x", "..", ".", "a/../../x", "/etc/passwd", "a\\..\\b", "%2e%2e/x", "%2e%2e", "a\x00b", "",
    "x" * 300, "trailing.", "trailing ", " leading", ".hidden", "a/b", "a\nb", "naïve", "日本",
    "a:b", "~", "$HOME", "a*", "a?b", "\u202ea", "-" * 129,
]  # fmt: skip


def get(path: str) -> pb.GetCheckpointRequest:
    return pb.GetCheckpointRequest(path=path)


def saved(caller: Caller, name: str = "a", **fields: Any) -> Run:
    run = caller.session()
    run.train(TOKENS)
    done = run.save(name, **fields)
    assert done.state == o.OPERATION_STATE_SUCCEEDED, done.error
    return run


def test_checkpoint_shows_what_it_is(caller: Caller):
    run = saved(caller, user_metadata={"note": "größe\n2"}, ttl=Duration(seconds=3600))
    shown = caller.checkpoints.GetCheckpoint(get(run.path("a")))
    assert shown.path == run.path("a")
    assert shown.kind == t.CHECKPOINT_KIND_TRAINING
    assert shown.session == run.id
    assert shown.base_model == MODEL
    assert shown.lora == run.shown.lora
    assert shown.policy_version == 1
    assert shown.has_optimizer
    assert shown.size_bytes > 16 * 4 * 4 * 2 * 3
    assert shown.user_metadata == {"note": "größe\n2"}
    assert shown.expire_time.seconds - shown.create_time.seconds == 3600


def test_checkpoints_are_listed_newest_first_in_pages_that_survive_deletions(tmp_path: Path):
    with serving(tmp_path / "store") as running:
        caller, run = running.caller, running.caller.session()
        for n in range(5):
            run.save(f"c{n}")
        other = saved(caller, "other")
        listed = caller.checkpoints.ListCheckpoints(pb.ListCheckpointsRequest()).checkpoints
        assert [c.path for c in listed] == [
            other.path("other"),
            *(run.path(f"c{n}") for n in (4, 3, 2, 1, 0)),
        ]
        got, token = [], ""
        while True:
            page = caller.checkpoints.ListCheckpoints(
                pb.ListCheckpointsRequest(session=run.id, page_size=2, page_token=token)
            )
            got += [c.path for c in page.checkpoints]
            token = page.next_page_token
            if not token:
                break
            for checkpoint in page.checkpoints:
                caller.checkpoints.DeleteCheckpoint(
                    pb.DeleteCheckpointRequest(path=checkpoint.path)
                )
        assert got == [run.path(f"c{n}") for n in (4, 3, 2, 1, 0)]


def test_checkpoint_of_the_same_name_is_refused_unless_overwritten(caller: Caller):
    """CK-06: the second save changes nothing, a resend is answered as before, training goes on."""
    run = saved(caller)
    before = run.logprobs(TOKENS)
    run.train([9, 9, 9])
    second = run.save("a")
    assert second.state == o.OPERATION_STATE_FAILED
    assert second.error.reason == "CHECKPOINT_EXISTS"
    assert second.error.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
    check = caller.session(resume_from=run.path("a"))
    np.testing.assert_array_equal(check.logprobs(TOKENS), before)
    request = t.SaveCheckpointRequest(
        session=run.id, sequence=3, kind=t.CHECKPOINT_KIND_TRAINING, name="a"
    )
    assert caller.trainer.SaveCheckpoint(request).save_checkpoint.path == run.path("a")
    replaced = run.save("a", overwrite=True, user_metadata={"v": "2"})
    assert replaced.save_checkpoint.policy_version == 2
    assert caller.checkpoints.GetCheckpoint(get(run.path("a"))).user_metadata == {"v": "2"}
    check = caller.session(resume_from=run.path("a"))
    np.testing.assert_array_equal(check.logprobs(TOKENS), run.logprobs(TOKENS))
    run.train(TOKENS)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_names_are_refused_everywhere_and_touch_no_file(tmp_path: Path, name: str):
    """AU-02 and TR-03."""
    (tmp_path / "x").write_text("outside")
    with serving(tmp_path / "store") as running:
        caller = running.caller
        run = saved(caller)
        files = sorted(tmp_path.rglob("*"))
        done = run.save(name)
        assert done.state == o.OPERATION_STATE_FAILED
        assert done.error.reason == "INVALID_NAME"
        for path in (f"tinker://{run.id}/weights/{name}", f"tinker://{name}/weights/a", name):
            assert _loads(run, path) in ("INVALID_PATH", "CHECKPOINT_NOT_FOUND")
            for call, request in (
                (caller.checkpoints.GetCheckpoint, get(path)),
                (caller.checkpoints.DeleteCheckpoint, pb.DeleteCheckpointRequest(path=path)),
                (caller.generator.OpenSnapshot, generator_pb2.OpenSnapshotRequest(path=path)),
                (
                    caller.sessions.CreateSession,
                    sessions_pb2.CreateSessionRequest(resume_from=path or "x"),
                ),
            ):
                refused = refusal(call, request)
                assert refused.reason in ("INVALID_PATH", "CHECKPOINT_NOT_FOUND"), path
        if name and name != "a:b" and name != "-" * 129:
            refused = refusal(
                caller.checkpoints.ListCheckpoints, pb.ListCheckpointsRequest(session=name)
            )
            assert refused.reason == "INVALID_NAME"
            refused = refusal(
                caller.sessions.CreateSession,
                sessions_pb2.CreateSessionRequest(base_model=MODEL, id=name),
            )
            assert refused.reason == "INVALID_NAME"
        assert sorted(_without_journal(tmp_path)) == sorted(p for p in files if _is_kept(p))
        assert (tmp_path / "x").read_text() == "outside"


def _loads(run: Run, path: str) -> str:
    return run.do("LoadCheckpoint", path=path).error.reason


def _is_kept(path: Path) -> bool:
    return "journal" not in path.name


def _without_journal(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if _is_kept(path)]


@pytest.mark.parametrize("name", ["CON", "nul.txt", "a-b_C.0", "0", "x" * 128, "a..b"])
def test_names_of_one_harmless_segment_are_accepted(caller: Caller, name: str):
    run = saved(caller, name)
    assert caller.checkpoints.GetCheckpoint(get(run.path(name))).path == run.path(name)


@pytest.mark.parametrize(
    "ttl",
    [Duration(), Duration(seconds=-1), Duration(nanos=-1), Duration(seconds=10**12)],
)
def test_ttl_of_0_negative_or_of_centuries_is_refused(caller: Caller, ttl: Duration):
    """CK-13."""
    error = caller.session().save("a", ttl=ttl).error
    assert error.reason == "INVALID_ARGUMENT"
    assert "ten years" in error.message


def test_expired_checkpoint_is_not_found_anywhere_and_its_snapshots_go_on(tmp_path: Path):
    """CK-13."""
    clock = Clock(1_900_000_000.0)
    with serving(tmp_path / "store", clocks={"clock": clock}) as running:
        caller = running.caller
        run = saved(caller, ttl=Duration(seconds=1))
        run.save("kept")
        snapshot = caller.open(path=run.path("a"))
        before = caller.score(snapshot, TOKENS)
        clock.now += 1
        assert _loads(run, run.path("a")) == "CHECKPOINT_NOT_FOUND"
        for call, request in (
            (caller.checkpoints.GetCheckpoint, get(run.path("a"))),
            (caller.generator.OpenSnapshot, generator_pb2.OpenSnapshotRequest(path=run.path("a"))),
        ):
            assert refusal(call, request).reason == "CHECKPOINT_NOT_FOUND"
        listed = caller.checkpoints.ListCheckpoints(pb.ListCheckpointsRequest()).checkpoints
        assert [c.path for c in listed] == [run.path("kept")]
        np.testing.assert_array_equal(caller.score(snapshot, TOKENS), before)


def test_load_replaces_weights_of_a_trained_session_and_drops_pending_gradients(caller: Caller):
    """CK-03, and CK-02: without the optimiser the moments are fresh."""
    run = saved(caller)
    at_save = run.logprobs(TOKENS)
    run.train([5, 5, 5])
    run.do("ForwardBackward", loss=cross_entropy(), samples=[sample([7, 7, 7])])
    loaded = run.do("LoadCheckpoint", path=run.path("a"))
    assert loaded.load_checkpoint.policy_version == 0
    step = run.do("OptimStep", adam=t.AdamParams(learning_rate=0.1))
    assert step.optim_step.metrics["empty_window:max"] == 1
    np.testing.assert_array_equal(run.logprobs(TOKENS), at_save)
    resumed = caller.session(resume_from=run.path("a"))
    for one in (run, resumed):
        one.train([1, 2, 9])
    np.testing.assert_array_equal(run.logprobs(TOKENS), resumed.logprobs(TOKENS))


def test_load_with_the_optimizer_continues_bit_for_bit(caller: Caller):
    run, other = saved(caller), caller.session()
    other.train([8, 8, 8])
    loaded = other.do("LoadCheckpoint", path=run.path("a"), optimizer=True)
    assert loaded.load_checkpoint.policy_version == 1
    for one in (run, other):
        one.train([1, 2, 9])
    np.testing.assert_array_equal(run.logprobs(TOKENS), other.logprobs(TOKENS))


def test_load_that_fails_leaves_the_session_as_it_was(tmp_path: Path):
    """CK-04, LP-09: no optimiser, a truncated file, renamed tensors, another rank."""
    with serving(tmp_path / "store") as running:
        caller = running.caller
        run = saved(caller, "w", kind="INFERENCE")
        run.save("cut")
        _cut(tmp_path, run.path("cut"), "optimizer.safetensors")
        wide = caller.session(lora=sessions_pb2.LoraConfig(rank=8))
        wide.save("wide")
        before = run.logprobs(TOKENS)
        for path, optimizer, reason, says in (
            (run.path("w", "sampler_weights"), True, "WRONG_CHECKPOINT_KIND", "optimizer"),
            (run.path("cut"), True, "INCOMPATIBLE_CHECKPOINT", "optimizer.safetensors"),
            (wide.path("wide"), False, "INCOMPATIBLE_CHECKPOINT", "lora_A.weight is [8, 16]"),
        ):
            error = run.do("LoadCheckpoint", path=path, optimizer=optimizer).error
            assert error.reason == reason
            assert says in error.message
            np.testing.assert_array_equal(run.logprobs(TOKENS), before)
        assert run.do("LoadCheckpoint", path=run.path("cut")).state == 4


def _cut(root: Path, path: str, file: str) -> None:
    _, _, session, folder, name = path.split("/")
    damaged = root / "store" / "checkpoints" / session / folder / name / file
    damaged.write_bytes(damaged.read_bytes()[:-3])


def test_checkpoint_of_renamed_tensors_is_refused_listing_them(tmp_path: Path):
    """LP-09: the files are consistent, but the names are another model's."""
    with serving(tmp_path / "store") as running:
        caller = running.caller
        run = saved(caller)
        _rename_tensor(tmp_path / "store" / "checkpoints" / run.id / "weights" / "a")
        path = run.path("a")
        load = run.do("LoadCheckpoint", path=path).error
        opened = refusal(
            caller.generator.OpenSnapshot, generator_pb2.OpenSnapshotRequest(path=path)
        )
        resumed = refusal(
            caller.sessions.CreateSession, sessions_pb2.CreateSessionRequest(resume_from=path)
        )
        for failed in (load, opened, resumed):
            assert failed.reason == "INCOMPATIBLE_CHECKPOINT"
            assert "missing: base_model.model.lm_head.lora_A.weight" in failed.message
            assert "unexpected: base_model.model.model.lm_head.lora_A.weight" in failed.message


def _rename_tensor(directory: Path) -> None:
    import hashlib

    from safetensors.numpy import load, save

    file = directory / "adapter_model.safetensors"
    tensors = load(file.read_bytes())
    name = "base_model.model.lm_head.lora_A.weight"
    tensors["base_model.model.model.lm_head.lora_A.weight"] = tensors.pop(name)
    data = save(tensors)
    file.write_bytes(data)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"][0] |= {
        "sha256": hashlib.sha256(data).hexdigest(),
        "size_bytes": len(data),
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))


def test_change_on_a_full_disk_says_so_and_changes_nothing(caller: Caller, monkeypatch):
    path = saved(caller).path("a")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(version_files, "share", full)
        service = caller.checkpoints
        for call, request in (
            (service.PublishCheckpoint, pb.PublishCheckpointRequest(path=path)),
            (service.SetCheckpointTtl, pb.SetCheckpointTtlRequest(path=path)),
            (service.CopyCheckpoint, pb.CopyCheckpointRequest(path=path, session="b")),
        ):
            assert refusal(call, request).reason == "RESOURCE_EXHAUSTED"
    assert not caller.checkpoints.GetCheckpoint(get(path)).is_public
    caller.checkpoints.PublishCheckpoint(pb.PublishCheckpointRequest(path=path))


def test_download_gives_the_files_that_peft_reads(caller: Caller):
    run = saved(caller, kind="INFERENCE")
    path = run.path("a", "sampler_weights")
    files: dict[str, bytes] = {}
    for piece in caller.checkpoints.DownloadCheckpoint(pb.DownloadCheckpointRequest(path=path)):
        assert piece.offset == len(files.get(piece.filename, b""))
        files[piece.filename] = files.get(piece.filename, b"") + piece.data
        assert len(piece.data) <= 1024 * 1024 < piece.size_bytes + 1024 * 1024
    assert set(files) == {"adapter_model.safetensors", "adapter_config.json", "manifest.json"}
    config = json.loads(files["adapter_config.json"])
    assert (config["r"], config["lora_alpha"]) == (4, 64)
    assert config["target_modules"] == ["lm_head"]
    with pytest.raises(grpc.RpcError) as caught:
        list(
            caller.checkpoints.DownloadCheckpoint(pb.DownloadCheckpointRequest(path=run.path("b")))
        )
    error: Any = caught.value
    assert error.code() == grpc.StatusCode.NOT_FOUND
