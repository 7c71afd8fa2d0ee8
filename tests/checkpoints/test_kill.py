"""Law 13 under kill -9: a process that saves without pause is killed, and everything visible is whole."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from backend.checkpoints.store import CheckpointStore
from tests.checkpoints.data import Clock, adapter, assert_same_tensors

_SAVE_FOR_EVER = """
import sys
from pathlib import Path
from backend.checkpoints.store import CheckpointStore
from tests.checkpoints.data import Clock, adapter, manifest, optimizer
store = CheckpointStore(Path(sys.argv[1]), Clock())
print("ready", flush=True)
n = 0
while True:
    n += 1
    store.save(manifest(f"c{n % 7}", policy_version=n), adapter(n), optimizer(n), overwrite=True)
"""


def test_law_13_a_checkpoint_is_visible_whole_or_not_at_all_when_its_writer_is_killed(
    tmp_path: Path,
):
    for round_ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", _SAVE_FOR_EVER, str(tmp_path)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(0.13 + 0.037 * round_)
        writer.kill()
        writer.wait()
        writer.stdout.close()
        store = CheckpointStore(tmp_path, Clock())
        found = store.list()
        assert found
        for manifest in found:
            loaded = store.load(manifest.path, optimizer=True)
            assert loaded.optimizer is not None
            assert loaded.optimizer.num_steps == manifest.policy_version
            assert_same_tensors(loaded.weights, adapter(manifest.policy_version))
        assert len(list((tmp_path / ".data").iterdir())) == len(found)
