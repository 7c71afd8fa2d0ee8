"""What becomes of a checkpoint after it was saved: another expiry, published, copied."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from backend.checkpoints import version_files
from backend.checkpoints.manifest import ADAPTER_WEIGHTS, MANIFEST, OPTIMIZER, Manifest
from backend.checkpoints.store import CheckpointStore
from tests.checkpoints.data import Clock, adapter, assert_same_tensors, manifest, optimizer
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.names import CheckpointPath

HOUR = 3600.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> CheckpointStore:
    return CheckpointStore(tmp_path, clock)


def save(store: CheckpointStore, name: str = "a", **fields) -> Manifest:
    return store.save(manifest(name, **fields), adapter(), optimizer(), overwrite=False)


def reason_of(call: Callable, *args, **kwargs) -> Reason:
    with pytest.raises(PostTrainingError) as caught:
        call(*args, **kwargs)
    return caught.value.reason


def directory(root: Path, path: CheckpointPath) -> Path:
    return (root / path.session / path.folder / path.name).resolve()


def num_versions(root: Path) -> int:
    return len(list((root / ".data").iterdir()))


def assert_whole(store: CheckpointStore, path: CheckpointPath) -> None:
    loaded = store.load(path, optimizer=True)
    assert_same_tensors(loaded.weights, adapter())
    assert loaded.optimizer is not None


def test_expiry_is_moved_taken_away_and_set(store: CheckpointStore, clock: Clock, tmp_path: Path):
    saved = save(store, expire_time_s=clock.now + HOUR)
    clock.now += HOUR / 2
    later = store.set_ttl(saved.path, HOUR)
    assert later.expire_time_s == clock.now + HOUR
    assert store.get(saved.path) == later
    assert store.set_ttl(saved.path, None).expire_time_s is None
    clock.now += 10 * HOUR
    assert store.sweep() == 0
    assert store.set_ttl(saved.path, 1.0).expire_time_s == clock.now + 1
    assert_whole(store, saved.path)
    clock.now += 1
    assert reason_of(store.get, saved.path) == Reason.CHECKPOINT_NOT_FOUND
    assert store.sweep() == 1
    assert num_versions(tmp_path) == 0


def test_sweep_keeps_what_was_extended_after_it_was_seen_to_expire(
    store: CheckpointStore, clock: Clock, tmp_path: Path
):
    """Of another server whose clock is behind, it has not expired yet when it is extended."""
    saved = save(store, expire_time_s=clock.now + 1)
    behind = CheckpointStore(tmp_path, Clock(clock.now))
    clock.now += 2

    class Sweeping(CheckpointStore):
        def _all(self, session):
            found = list(super()._all(session))
            behind.set_ttl(saved.path, HOUR)
            return iter(found)

    assert Sweeping(tmp_path, clock).sweep() == 0
    assert_whole(store, saved.path)


def test_expired_checkpoint_cannot_be_changed_or_copied(store: CheckpointStore, clock: Clock):
    path = save(store, expire_time_s=clock.now + 1).path
    clock.now += 1
    for call, args in (
        (store.set_ttl, (path, HOUR)),
        (store.set_ttl, (path, None)),
        (store.publish, (path,)),
        (store.unpublish, (path,)),
        (store.copy, (path, "other", None)),
    ):
        assert reason_of(call, *args) == Reason.CHECKPOINT_NOT_FOUND
    assert store.list() == []


def test_checkpoint_that_expires_during_a_change_stays_expired(tmp_path: Path):
    """Otherwise one that was missing for a moment would be back."""
    clock = Clock()

    class Slow(CheckpointStore):
        def _is_still(self, version, manifest):
            clock.now += 2
            return super()._is_still(version, manifest)

    store = Slow(tmp_path, clock)
    path = save(store, expire_time_s=clock.now + 1).path
    assert reason_of(store.set_ttl, path, HOUR) == Reason.CHECKPOINT_NOT_FOUND


def test_public_is_a_mark_that_comes_and_goes(store: CheckpointStore, clock: Clock):
    path = save(store, expire_time_s=clock.now + HOUR).path
    assert reason_of(store.unpublish, path) == Reason.NOT_PUBLIC
    assert store.publish(path).is_public
    assert reason_of(store.publish, path) == Reason.ALREADY_PUBLIC
    assert store.set_ttl(path, 2 * HOUR).is_public, "the other change keeps it"
    assert store.unpublish(path).expire_time_s == clock.now + 2 * HOUR
    assert reason_of(store.unpublish, path) == Reason.NOT_PUBLIC
    assert_whole(store, path)


def test_overwriting_replaces_what_was_changed_too(store: CheckpointStore):
    path = save(store).path
    store.publish(path)
    store.set_ttl(path, HOUR)
    replaced = store.save(manifest(), adapter(), optimizer(), overwrite=True)
    assert store.get(path) == replaced
    assert not replaced.is_public
    assert replaced.expire_time_s is None


def test_other_server_sees_each_change_though_it_keeps_manifests_in_memory(
    store: CheckpointStore, clock: Clock, tmp_path: Path
):
    path = save(store).path
    other = CheckpointStore(tmp_path, clock)
    for change in (store.publish, store.unpublish, lambda p: store.set_ttl(p, HOUR)):
        before = other.get(path)
        after = change(path)
        assert after != before
        assert other.get(path) == after
        assert other.list() == [after]
    assert len(other._manifests) == 4
    other.sweep()
    assert len(other._manifests) == 1, "of those that are gone, none is kept"


def test_download_that_runs_during_a_change_gives_one_version_whole(store: CheckpointStore):
    path = save(store).path
    pieces = store.pieces(path)
    files = {(first := next(pieces)).filename: first.data}
    store.publish(path)
    files |= {piece.filename: piece.data for piece in pieces}
    assert not json.loads(files[MANIFEST])["is_public"]
    manifests = [p.data for p in store.pieces(path) if p.filename == MANIFEST]
    assert json.loads(manifests[0])["is_public"]


def test_change_takes_no_disk_for_the_files_and_leaves_one_version(
    store: CheckpointStore, tmp_path: Path
):
    path = save(store).path
    before = (directory(tmp_path, path) / ADAPTER_WEIGHTS).stat()
    store.publish(path)
    after = (directory(tmp_path, path) / ADAPTER_WEIGHTS).stat()
    assert after.st_ino == before.st_ino
    assert after.st_nlink == 1, "the version before is gone"
    assert num_versions(tmp_path) == 1


@pytest.fixture(params=["links", "no links"])
def linking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "links":
        return True

    def refuse(*args, **kwargs):
        raise PermissionError("this file system has no hard links")

    monkeypatch.setattr(os, "link", refuse)
    return False


def test_copy_is_a_checkpoint_of_its_own(
    store: CheckpointStore, clock: Clock, tmp_path: Path, linking: bool
):
    source = save(store, expire_time_s=clock.now + HOUR)
    store.publish(source.path)
    clock.now += 5
    copy = store.copy(source.path, "other:session", 2 * HOUR)
    assert str(copy.path) == "tinker://other:session/weights/a"
    assert copy.copied_from == str(source.path)
    assert (copy.create_time_s, copy.expire_time_s) == (clock.now, clock.now + 2 * HOUR)
    assert not copy.is_public
    assert (copy.files, copy.user_metadata) == (source.files, source.user_metadata)
    assert store.list("other:session") == [copy]
    shared, own = (directory(tmp_path, p) / OPTIMIZER for p in (source.path, copy.path))
    assert shared.samefile(own) == linking
    store.delete(source.path)
    assert_whole(store, copy.path)
    assert_whole(CheckpointStore(tmp_path, clock), copy.path)
    assert store.copy(copy.path, "third", None).copied_from == str(copy.path)


def test_change_works_where_there_are_no_links(
    store: CheckpointStore, tmp_path: Path, linking: bool
):
    path = save(store).path
    store.publish(path)
    assert store.get(path).is_public
    assert_whole(store, path)
    assert num_versions(tmp_path) == 1


def test_copy_that_is_there_is_the_answer_and_another_checkpoint_is_not(
    store: CheckpointStore, clock: Clock
):
    source = save(store)
    copy = store.copy(source.path, "other", HOUR)
    clock.now += 1
    assert store.copy(source.path, "other", None) == copy
    assert store.publish(copy.path) == store.copy(source.path, "other", None)
    third = store.save(manifest(session="third"), adapter(), optimizer(), overwrite=False)
    assert reason_of(store.copy, third.path, "other", None) == Reason.CHECKPOINT_EXISTS
    assert reason_of(store.copy, source.path, "third", None) == Reason.CHECKPOINT_EXISTS
    assert reason_of(store.copy, source.path, source.session, None) == Reason.CHECKPOINT_EXISTS
    assert store.get(third.path) == third
    store.save(manifest(), adapter(7), optimizer(), overwrite=True)
    assert reason_of(store.copy, source.path, "other", None) == Reason.CHECKPOINT_EXISTS
    store.delete(copy.path)
    again = store.copy(source.path, "other", None)
    assert_same_tensors(store.load(again.path, optimizer=False).weights, adapter(7))


def test_copy_takes_the_place_of_an_expired_one(store: CheckpointStore, clock: Clock):
    source = save(store)
    store.copy(source.path, "other", 1.0)
    clock.now += 1
    assert store.copy(source.path, "other", None).expire_time_s is None


def test_copy_is_whole_when_its_source_is_deleted_meanwhile(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = save(store)
    other = CheckpointStore(tmp_path, Clock())
    share = version_files.share

    def share_slowly(*args):
        other.delete(source.path)
        other.sweep()
        share(*args)

    monkeypatch.setattr(version_files, "share", share_slowly)
    copy = store.copy(source.path, "other", None)
    assert reason_of(store.get, source.path) == Reason.CHECKPOINT_NOT_FOUND
    assert_whole(store, copy.path)
    assert num_versions(tmp_path) == 1


@pytest.mark.parametrize("meanwhile", ["deleted", "overwritten", "published"])
def test_change_applies_to_what_is_there_in_the_end(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
):
    path = save(store).path
    other = CheckpointStore(tmp_path, Clock())
    actions = {
        "deleted": lambda: other.delete(path),
        "overwritten": lambda: other.save(
            manifest(policy_version=9), adapter(9), optimizer(), overwrite=True
        ),
        "published": lambda: other.publish(path),
    }
    pending = [actions[meanwhile]]
    share = version_files.share

    def share_slowly(*args):
        share(*args)
        if pending:
            pending.pop()()

    monkeypatch.setattr(version_files, "share", share_slowly)
    if meanwhile == "overwritten":
        changed = store.publish(path)
        assert changed.policy_version == 9
        assert_same_tensors(store.load(path, optimizer=False).weights, adapter(9))
    else:
        expected = {
            "deleted": Reason.CHECKPOINT_NOT_FOUND,
            "published": Reason.ALREADY_PUBLIC,
        }[meanwhile]
        assert reason_of(store.publish, path) == expected
    assert num_versions(tmp_path) == len(store.list())


def test_changes_of_several_servers_at_once_are_all_made(tmp_path: Path):
    """None writes over another's: each of 40 publishings and 40 expiries is there in the end."""
    stores = [CheckpointStore(tmp_path, Clock()) for _ in range(2)]
    paths = [save(stores[0], f"c{n}").path for n in range(40)]

    def publish() -> None:
        for path in paths:
            stores[0].publish(path)

    def expire() -> None:
        for path in paths:
            stores[1].set_ttl(path, HOUR)

    threads = [threading.Thread(target=publish), threading.Thread(target=expire)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for made in stores[0].list():
        assert (made.is_public, made.expire_time_s) == (True, Clock().now + HOUR)
    assert num_versions(tmp_path) == len(paths)


@pytest.mark.parametrize("file", [ADAPTER_WEIGHTS, OPTIMIZER])
def test_checkpoint_that_lacks_a_file_is_not_copied_and_stays_as_it_is(
    store: CheckpointStore, tmp_path: Path, file: str
):
    path = save(store).path
    (directory(tmp_path, path) / file).unlink()
    assert reason_of(store.copy, path, "other", None) == Reason.INCOMPATIBLE_CHECKPOINT
    assert reason_of(store.publish, path) == Reason.INCOMPATIBLE_CHECKPOINT
    assert [made.is_public for made in store.list()] == [False]
    assert num_versions(tmp_path) == 1
    store.delete(path)


def test_manifest_of_before_there_were_changes_is_read(store: CheckpointStore, tmp_path: Path):
    path = save(store).path
    file = directory(tmp_path, path) / MANIFEST
    content = json.loads(file.read_text())
    for key in ("is_public", "copied_from", "is_encrypted"):
        del content[key]
    file.write_text(json.dumps(content))
    assert CheckpointStore(tmp_path, Clock()).publish(path).is_public


def test_one_file_is_downloaded_from_where_it_broke_off(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(version_files, "PIECE_BYTES", 100)
    made = save(store)
    entry = made.file(ADAPTER_WEIGHTS)
    assert entry is not None
    whole = b"".join(p.data for p in store.pieces(made.path) if p.filename == ADAPTER_WEIGHTS)
    assert len(whole) == entry.size_bytes > 200
    for offset in (0, 1, 99, 100, 101, len(whole) - 1):
        pieces = list(store.pieces(made.path, ADAPTER_WEIGHTS, offset))
        assert b"".join(piece.data for piece in pieces) == whole[offset:]
        assert {(piece.filename, piece.size_bytes) for piece in pieces} == {
            (ADAPTER_WEIGHTS, len(whole))
        }
        at = offset
        for piece in pieces:
            assert piece.offset == at
            at += len(piece.data)
    (last,) = store.pieces(made.path, ADAPTER_WEIGHTS, len(whole))
    assert (last.data, last.offset, last.size_bytes) == (b"", len(whole), len(whole))
    for offset in (-1, len(whole) + 1, 2**62):
        with pytest.raises(PostTrainingError, match=f"offset is {offset}") as caught:
            list(store.pieces(made.path, ADAPTER_WEIGHTS, offset))
        assert caught.value.reason == Reason.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "name", ["nothing", "../manifest.json", "./manifest.json", "/etc/passwd", "..", ".", "a\x00b"]
)
def test_file_that_is_none_of_the_checkpoints_is_refused(store: CheckpointStore, name: str):
    made = save(store)
    with pytest.raises(PostTrainingError) as caught:
        list(store.pieces(made.path, name))
    assert caught.value.reason == Reason.INVALID_ARGUMENT
    assert repr(name) in caught.value.message
    assert ADAPTER_WEIGHTS in caught.value.message
