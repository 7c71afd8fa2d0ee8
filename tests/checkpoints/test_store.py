from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from backend.checkpoints.manifest import ADAPTER_WEIGHTS, MANIFEST, OPTIMIZER, PEFT_CONFIG, Manifest
from backend.checkpoints.store import CheckpointStore
from backend.checkpoints.version_files import PIECE_BYTES
from tests.checkpoints.data import Clock, adapter, assert_same_tensors, manifest, optimizer
from together_post_training.errors import PostTrainingError, Reason


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", clock)


def save(store: CheckpointStore, made: Manifest, seed: int = 0, *, overwrite: bool = False):
    moments = optimizer(seed + 1) if made.kind == "training" else None
    return store.save(made, adapter(seed), moments, overwrite=overwrite)


def reason_of(call, *args, **kwargs) -> PostTrainingError:
    with pytest.raises(PostTrainingError) as caught:
        call(*args, **kwargs)
    return caught.value


def directory(tmp_path: Path, made: Manifest) -> Path:
    return tmp_path / "checkpoints" / made.session / made.path.folder / made.name


def test_checkpoint_loads_bitwise_what_was_saved(store: CheckpointStore):
    saved = save(store, manifest())
    loaded = store.load(saved.path, optimizer=True)
    assert loaded.manifest == saved
    assert_same_tensors(loaded.weights, adapter(0))
    expected = optimizer(1)
    assert loaded.optimizer is not None
    assert loaded.optimizer.num_steps == expected.num_steps
    for moments in ("exp_avg", "exp_avg_sq"):
        got = loaded.optimizer.moments[moments]
        for name, tensor in expected.moments[moments].items():
            np.testing.assert_array_equal(got[name], tensor)


def test_checkpoint_is_read_by_the_next_server(
    store: CheckpointStore, tmp_path: Path, clock: Clock
):
    saved = save(store, manifest())
    again = CheckpointStore(tmp_path / "checkpoints", clock)
    assert again.list() == [saved]
    assert_same_tensors(again.load(saved.path, optimizer=False).weights, adapter(0))


def test_checkpoint_manifest_lists_its_files_with_size_and_digest(
    store: CheckpointStore, tmp_path: Path
):
    saved = save(store, manifest())
    assert [f.name for f in saved.files] == [ADAPTER_WEIGHTS, PEFT_CONFIG, OPTIMIZER]
    for file in saved.files:
        data = (directory(tmp_path, saved) / file.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.size_bytes, file.sha256)
    content = json.loads((directory(tmp_path, saved) / MANIFEST).read_text())
    assert content["path"] == "tinker://run:train:0/weights/a"
    assert content["lora"]["seed"] == 2**63


def test_checkpoint_of_the_same_name_is_refused_and_the_first_stays(store: CheckpointStore):
    saved = save(store, manifest())
    error = reason_of(save, store, manifest(), seed=5)
    assert error.reason == Reason.CHECKPOINT_EXISTS
    assert "'a' already exists" in error.message
    assert reason_of(store.check_free, saved.path).reason == Reason.CHECKPOINT_EXISTS
    assert_same_tensors(store.load(saved.path, optimizer=False).weights, adapter(0))


def test_checkpoint_of_another_kind_or_session_may_have_the_same_name(store: CheckpointStore):
    made = [manifest(), manifest(kind="inference"), manifest(session="other")]
    paths = {save(store, m, seed).path for seed, m in enumerate(made)}
    assert {m.path for m in store.list()} == paths
    assert {m.path for m in store.list("other")} == {made[2].path}
    assert store.list("unknown") == []


def test_checkpoint_is_replaced_with_overwrite_and_its_old_files_go(
    store: CheckpointStore, tmp_path: Path
):
    save(store, manifest())
    replaced = save(store, manifest(user_metadata={"new": "1"}), seed=7, overwrite=True)
    assert store.get(replaced.path) == replaced
    assert_same_tensors(store.load(replaced.path, optimizer=False).weights, adapter(7))
    assert len(list((tmp_path / "checkpoints" / ".data").iterdir())) == 1


def test_law_13_there_is_no_moment_without_a_whole_checkpoint_while_it_is_overwritten(
    store: CheckpointStore,
):
    path = save(store, manifest(policy_version=0)).path
    is_done = threading.Event()

    def overwrite() -> None:
        for seed in range(1, 40):
            save(store, manifest(policy_version=seed), seed, overwrite=True)
        is_done.set()

    writer = threading.Thread(target=overwrite)
    writer.start()
    seen = set()
    while not is_done.is_set():
        loaded = store.load(path, optimizer=True)
        seed = loaded.manifest.policy_version
        seen.add(seed)
        assert_same_tensors(loaded.weights, adapter(seed))
        assert loaded.optimizer is not None
        assert loaded.optimizer.num_steps == seed + 1
        assert [piece.filename for piece in store.pieces(path)][-1] == MANIFEST
        assert len(store.list()) == 1
    writer.join()
    assert len(seen) > 3


def test_checkpoint_that_was_deleted_is_not_found_and_can_be_saved_again(store: CheckpointStore):
    path = save(store, manifest()).path
    store.delete(path)
    for call in (store.get, store.delete, lambda p: list(store.pieces(p))):
        assert reason_of(call, path).reason == Reason.CHECKPOINT_NOT_FOUND
    assert reason_of(store.load, path, optimizer=False).reason == Reason.CHECKPOINT_NOT_FOUND
    assert store.list() == []
    save(store, manifest(), seed=3)
    assert_same_tensors(store.load(path, optimizer=False).weights, adapter(3))


def test_checkpoint_that_is_being_read_stays_whole_when_it_is_deleted(
    store: CheckpointStore, tmp_path: Path
):
    saved = save(store, manifest())
    pieces = store.pieces(saved.path)
    names = [next(pieces).filename]
    store.delete(saved.path)
    assert store.list() == []
    names += [piece.filename for piece in pieces]
    assert names == [ADAPTER_WEIGHTS, PEFT_CONFIG, OPTIMIZER, MANIFEST]
    assert not list((tmp_path / "checkpoints" / ".data").iterdir())


def test_checkpoint_is_downloaded_in_pieces_that_make_up_its_files(
    store: CheckpointStore, tmp_path: Path
):
    large = adapter(size=PIECE_BYTES // 8 + 1)
    saved = store.save(manifest(kind="inference"), large, None, overwrite=False)
    files: dict[str, bytes] = {}
    for piece in store.pieces(saved.path):
        data = files.setdefault(piece.filename, b"")
        assert piece.offset == len(data)
        assert len(piece.data) <= PIECE_BYTES
        files[piece.filename] = data + piece.data
    assert len(files[ADAPTER_WEIGHTS]) > 4 * PIECE_BYTES
    for name, data in files.items():
        assert data == (directory(tmp_path, saved) / name).read_bytes()


def test_checkpoint_expires_for_everyone_at_once_and_is_swept_from_the_disk(
    store: CheckpointStore, clock: Clock, tmp_path: Path
):
    """CK-13."""
    kept = save(store, manifest("kept"))
    path = save(store, manifest(expire_time_s=clock.now + 1)).path
    clock.now += 0.999
    assert store.get(path).expire_time_s == 1_000_001.0
    assert len(store.list()) == 2
    reading = store.pieces(path)
    next(reading)
    clock.now += 0.001
    for call in (store.get, store.delete, lambda p: list(store.pieces(p))):
        assert reason_of(call, path).reason == Reason.CHECKPOINT_NOT_FOUND
    assert reason_of(store.load, path, optimizer=False).reason == Reason.CHECKPOINT_NOT_FOUND
    assert store.list() == [kept]
    assert store.sweep() == 1
    assert [p.filename for p in reading] == [PEFT_CONFIG, OPTIMIZER, MANIFEST]
    assert len(list((tmp_path / "checkpoints" / ".data").iterdir())) == 1
    assert store.sweep() == 0


def test_checkpoint_name_is_free_again_when_it_has_expired(store: CheckpointStore, clock: Clock):
    save(store, manifest(expire_time_s=clock.now + 1))
    clock.now += 2
    path = save(store, manifest(), seed=4).path
    assert store.sweep() == 0
    assert_same_tensors(store.load(path, optimizer=False).weights, adapter(4))


def test_checkpoint_without_optimizer_says_what_is_missing(store: CheckpointStore):
    """CK-04."""
    path = save(store, manifest(kind="inference")).path
    error = reason_of(store.load, path, optimizer=True)
    assert error.reason == Reason.WRONG_CHECKPOINT_KIND
    assert error.metadata["missing"] == OPTIMIZER
    assert "weights/" in error.message
    assert "sampler_weights/" in error.message


@pytest.mark.parametrize("name", [ADAPTER_WEIGHTS, OPTIMIZER])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "empty"])
def test_checkpoint_that_is_damaged_is_refused_naming_the_file(
    store: CheckpointStore, tmp_path: Path, name: str, damage: str
):
    saved = save(store, manifest())
    file = directory(tmp_path, saved) / name
    data = bytearray(file.read_bytes())
    match damage:
        case "truncate":
            file.write_bytes(data[:-5])
        case "flip":
            data[-1] ^= 1
            file.write_bytes(data)
        case "remove":
            file.unlink()
        case "empty":
            file.write_bytes(b"")
    error = reason_of(store.load, saved.path, optimizer=True)
    assert error.reason == Reason.INCOMPATIBLE_CHECKPOINT
    assert error.metadata["file"] == name
    if name == OPTIMIZER:
        assert_same_tensors(store.load(saved.path, optimizer=False).weights, adapter(0))


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff\xfe", b'{"format_version": 99}', b"[1]", b"null", b'"x"']
)
def test_checkpoint_with_an_unreadable_manifest_hides_no_other_and_can_be_deleted(
    store: CheckpointStore, tmp_path: Path, clock: Clock, content: bytes
):
    kept = save(store, manifest("kept"))
    broken = save(store, manifest("broken"))
    (directory(tmp_path, broken) / MANIFEST).write_bytes(content)
    fresh = CheckpointStore(tmp_path / "checkpoints", clock)
    assert fresh.list() == [kept]
    assert fresh.sweep() == 0
    assert reason_of(fresh.get, broken.path).reason == Reason.INCOMPATIBLE_CHECKPOINT
    assert reason_of(save, fresh, manifest("broken")).reason == Reason.CHECKPOINT_EXISTS
    save(fresh, manifest("broken"), overwrite=True)
    (directory(tmp_path, broken) / MANIFEST).write_bytes(content)
    again = CheckpointStore(tmp_path / "checkpoints", clock)
    again.delete(broken.path)
    assert again.list() == [kept]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "later"),
        ("expire_time_s", "soon"),
        ("user_metadata", {"note": 5}),
        ("files", [{"name": "a", "size_bytes": "1", "sha256": ""}]),
        ("lora", {"rank": "4", "alpha": 32.0, "seed": 0}),
        ("session", "another"),
    ],
)
def test_checkpoint_whose_manifest_says_what_cannot_be_hides_no_other(
    store: CheckpointStore, tmp_path: Path, clock: Clock, field: str, value: object
):
    kept, broken = save(store, manifest("kept")), save(store, manifest("broken"))
    file = directory(tmp_path, broken) / MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_bytes()), field: value}))
    fresh = CheckpointStore(tmp_path / "checkpoints", clock)
    assert fresh.list() == [kept]
    assert fresh.sweep() == 0
    error = reason_of(fresh.get, broken.path)
    assert error.reason in (Reason.INCOMPATIBLE_CHECKPOINT, Reason.CHECKPOINT_NOT_FOUND)


def test_checkpoint_whose_manifest_is_no_file_hides_no_other(
    store: CheckpointStore, tmp_path: Path, clock: Clock
):
    kept, broken = save(store, manifest("kept")), save(store, manifest("broken"))
    file = directory(tmp_path, broken) / MANIFEST
    file.unlink()
    file.mkdir()
    assert CheckpointStore(tmp_path / "checkpoints", clock).list() == [kept]


def test_checkpoint_of_a_name_that_differs_in_case_is_another(store: CheckpointStore):
    """On a file system that ignores case the second is refused; nothing is ever replaced by accident."""
    first = save(store, manifest("final"), seed=1)
    save(store, manifest("Final"), seed=2)
    assert_same_tensors(store.load(first.path, optimizer=False).weights, adapter(1))


def test_checkpoint_of_another_case_is_not_taken_for_it(store: CheckpointStore, tmp_path: Path):
    """What a file system that ignores case would give for "FINAL"."""
    saved = save(store, manifest("final"))
    link = directory(tmp_path, saved)
    (link.parent / "FINAL").symlink_to(link.readlink())
    other = manifest("FINAL")
    assert reason_of(store.get, other.path).reason == Reason.CHECKPOINT_NOT_FOUND
    assert reason_of(save, store, other).reason == Reason.CHECKPOINT_EXISTS
    assert reason_of(save, store, other, overwrite=True).reason == Reason.CHECKPOINT_EXISTS


def test_leftovers_of_a_killed_server_are_removed_at_the_next_start(
    store: CheckpointStore, tmp_path: Path, clock: Clock
):
    saved = save(store, manifest())
    data = tmp_path / "checkpoints" / ".data"
    (data / "half").mkdir()
    (data / "half" / ADAPTER_WEIGHTS).write_bytes(b"half")
    (data / "half.link").symlink_to("half")
    again = CheckpointStore(tmp_path / "checkpoints", clock)
    assert again.list() == [saved]
    assert len(list(data.iterdir())) == 1


def test_listing_is_newest_first(store: CheckpointStore):
    for name, time_s in (("a", 5.0), ("b", 7.0), ("c", 6.0)):
        save(store, manifest(name, create_time_s=time_s))
    assert [m.name for m in store.list()] == ["b", "c", "a"]
