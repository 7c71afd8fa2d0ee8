"""Law 13 of changes: a process is killed before each single thing that it asks of the file system.

The process forks children that do a change. Python tells an audit hook of every such call beforehand; the child's kills
it at the k-th. Then its parent looks at the store as a server would that starts there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_KILL_AT_EVERY_STEP = """
import itertools, json, os, signal, sys
from pathlib import Path
from backend.checkpoints.store import CheckpointStore
from tests.checkpoints.data import Clock, adapter, assert_same_tensors, manifest, optimizer

TOUCHES_FILES = {
    "open", "os.mkdir", "os.link", "os.symlink", "os.rename", "os.remove", "os.rmdir", "os.listdir",
    "os.scandir", "shutil.rmtree", "fcntl.flock",
}
action, top = sys.argv[1], Path(sys.argv[2])
path = manifest().path


def act(store):
    match action:
        case "ttl":
            store.set_ttl(path, 3600.0)
        case "publish":
            store.publish(path)
        case "copy":
            store.copy(path, "other", None)
        case "overwrite":
            store.save(manifest(policy_version=6), adapter(), optimizer(), overwrite=True)


def killed_before(step, root):
    store = CheckpointStore(root, Clock())
    store.get(path)
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    left = itertools.count(step - 1, -1)

    def kill(event, arguments):
        if event in TOUCHES_FILES and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    act(store)
    os._exit(0)


def look(root):
    store = CheckpointStore(root, Clock())
    seen = []
    for made in store.list():
        loaded = store.load(made.path, optimizer=True)
        assert_same_tensors(loaded.weights, adapter())
        assert loaded.optimizer is not None
        seen.append(
            (made.session, made.policy_version, made.is_public, made.expire_time_s, made.copied_from)
        )
    assert len(list((root / ".data").iterdir())) == len(seen)
    return sorted(seen)


for step in itertools.count(1):
    root = top / str(step)
    CheckpointStore(root, Clock()).save(manifest(), adapter(), optimizer(), overwrite=False)
    was_killed = killed_before(step, root)
    print(json.dumps([was_killed, look(root)]), flush=True)
    if not was_killed:
        break
"""

_BEFORE = ["run:train:0", 5, False, None, ""]
_AFTER = {
    "ttl": [["run:train:0", 5, False, 1_003_600.0, ""]],
    "publish": [["run:train:0", 5, True, None, ""]],
    "copy": [["other", 5, False, None, "tinker://run:train:0/weights/a"], _BEFORE],
    "overwrite": [["run:train:0", 6, False, None, ""]],
}


@pytest.mark.parametrize("action", _AFTER)
def test_law_13_a_change_is_made_or_not_made_wherever_its_process_is_killed(
    action: str, tmp_path: Path
):
    done = subprocess.run(
        [sys.executable, "-c", _KILL_AT_EVERY_STEP, action, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    seen = [state for _, state in outcomes]
    num_before = seen.index(_AFTER[action])
    assert num_before > 5
    assert seen[:num_before] == [[_BEFORE]] * num_before
    assert seen[num_before:] == [_AFTER[action]] * (len(seen) - num_before)
    assert [was_killed for was_killed, _ in outcomes] == [True] * (len(seen) - 1) + [False]
