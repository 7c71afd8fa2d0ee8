"""Several servers on one store: locks are held by open files, so two stores stand for two processes here too."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from backend.checkpoints.folder import CheckpointFolder
from backend.checkpoints.manifest import ADAPTER_WEIGHTS, MANIFEST, OPTIMIZER, PEFT_CONFIG
from backend.checkpoints.store import CheckpointStore
from tests.checkpoints.data import Clock, adapter, assert_same_tensors, manifest, optimizer
from together_post_training.errors import PostTrainingError, Reason

_OVERWRITE = """
import sys
from pathlib import Path
from backend.checkpoints.store import CheckpointStore
from tests.checkpoints.data import Clock, adapter, manifest, optimizer
store = CheckpointStore(Path(sys.argv[1]), Clock())
for n in range(1, 60):
    store.save(manifest(policy_version=n), adapter(n), optimizer(n), overwrite=True)
    print(n, flush=True)
"""


def two_stores(root: Path) -> tuple[CheckpointStore, CheckpointStore]:
    clock = Clock()
    return CheckpointStore(root, clock), CheckpointStore(root, clock)


def num_versions(root: Path) -> int:
    return len(list((root / ".data").iterdir()))


def test_law_13_another_process_loads_whole_checkpoints_while_one_is_overwritten(tmp_path: Path):
    store = CheckpointStore(tmp_path, Clock())
    path = store.save(manifest(policy_version=0), adapter(0), optimizer(0), overwrite=False).path
    writer = subprocess.Popen(
        [sys.executable, "-c", _OVERWRITE, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    seen = set()
    while writer.poll() is None:
        loaded = store.load(path, optimizer=True)
        seen.add(loaded.manifest.policy_version)
        assert_same_tensors(loaded.weights, adapter(loaded.manifest.policy_version))
        assert loaded.optimizer is not None
        assert loaded.optimizer.num_steps == loaded.manifest.policy_version
        assert [piece.filename for piece in store.pieces(path)][-1] == MANIFEST
        assert len(store.list()) == 1
        store.sweep()
    writer.communicate()
    assert writer.returncode == 0
    assert len(seen) > 3
    assert store.get(path).policy_version == 59
    assert num_versions(tmp_path) == 1


def test_checkpoint_that_one_server_reads_stays_whole_when_another_deletes_it(tmp_path: Path):
    one, other = two_stores(tmp_path)
    path = one.save(manifest(), adapter(), optimizer(), overwrite=False).path
    pieces = one.pieces(path)
    names = [next(pieces).filename]
    other.delete(path)
    for store in (one, other):
        assert store.list() == []
        with pytest.raises(PostTrainingError) as caught:
            store.delete(path)
        assert caught.value.reason == Reason.CHECKPOINT_NOT_FOUND
    other.sweep()
    names += [piece.filename for piece in pieces]
    assert names == [ADAPTER_WEIGHTS, PEFT_CONFIG, OPTIMIZER, MANIFEST]
    assert num_versions(tmp_path) == 0


def test_server_that_starts_leaves_alone_what_another_one_is_writing(tmp_path: Path):
    folder = CheckpointFolder(tmp_path)
    with folder.writing(Path("s/weights/a"), lambda version: version is None) as version:
        CheckpointFolder(tmp_path)
        (version / "file").write_bytes(b"content")
    assert (tmp_path / "s/weights/a/file").read_bytes() == b"content"


def test_name_that_several_servers_save_at_once_is_given_once(tmp_path: Path):
    stores = [CheckpointStore(tmp_path, Clock()) for _ in range(4)]
    outcomes: list[Reason | None] = []

    def save(number: int) -> None:
        for name in "abcdefgh":
            try:
                stores[number].save(manifest(name), adapter(number), None, overwrite=False)
            except PostTrainingError as error:
                outcomes.append(error.reason)
            else:
                outcomes.append(None)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(None) == 8
    assert outcomes.count(Reason.CHECKPOINT_EXISTS) == 24
    assert len(stores[0].list()) == 8
    assert num_versions(tmp_path) == 8


def test_expired_checkpoint_is_swept_once_whoever_sweeps(tmp_path: Path):
    clock = Clock()
    stores = [CheckpointStore(tmp_path, clock) for _ in range(3)]
    for name in "abc":
        expiring = manifest(name, kind="inference", expire_time_s=clock.now + 1)
        stores[0].save(expiring, adapter(), None, overwrite=False)
    clock.now += 2
    counts: list[int] = []
    threads = [threading.Thread(target=lambda s=s: counts.append(s.sweep())) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == 3
    assert num_versions(tmp_path) == 0


def test_checkpoint_whose_files_were_removed_by_hand_is_not_found_and_can_be_saved_again(
    tmp_path: Path,
):
    store, _ = two_stores(tmp_path)
    path = store.save(manifest(kind="inference"), adapter(), None, overwrite=False).path
    (version,) = (tmp_path / ".data").iterdir()
    for file in version.iterdir():
        file.unlink()
    version.rmdir()
    other = CheckpointStore(tmp_path, Clock())
    assert other.list() == []
    with pytest.raises(PostTrainingError) as caught:
        other.load(path, optimizer=False)
    assert caught.value.reason == Reason.CHECKPOINT_NOT_FOUND
    other.save(manifest(kind="inference"), adapter(3), None, overwrite=False)
    assert_same_tensors(other.load(path, optimizer=False).weights, adapter(3))
