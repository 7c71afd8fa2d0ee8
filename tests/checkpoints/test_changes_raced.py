"""Two processes that publish the same checkpoints at the same time."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from backend.checkpoints.store import CheckpointStore
from tests.checkpoints.data import Clock, adapter, manifest

_NUM_CHECKPOINTS = 30

_RACE = """
import sys
from pathlib import Path
from backend.checkpoints.store import CheckpointStore
from tests.checkpoints.data import Clock, manifest
from together_post_training.errors import PostTrainingError
store = CheckpointStore(Path(sys.argv[1]), Clock())
for line in sys.stdin:
    name, action = line.split()
    try:
        getattr(store, action)(manifest(name).path)
    except PostTrainingError as error:
        print(name, action, error.reason, flush=True)
    else:
        print(name, action, "done", flush=True)
"""


def test_one_of_two_processes_publishes_and_one_takes_it_back(tmp_path: Path):
    store = CheckpointStore(tmp_path, Clock())
    names = [f"c{n}" for n in range(_NUM_CHECKPOINTS)]
    for name in names:
        store.save(manifest(name), adapter(), None, overwrite=False)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACE, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for _ in range(2)
    ]
    try:
        outcomes = Counter(
            line
            for name in names
            for action in ("publish", "unpublish")
            for line in _both(racers, f"{name} {action}\n")
        )
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    assert outcomes == Counter(
        f"{name} {action} {outcome}\n"
        for name in names
        for action, lost in (("publish", "ALREADY_PUBLIC"), ("unpublish", "NOT_PUBLIC"))
        for outcome in ("done", lost)
    )
    assert [made.is_public for made in store.list()] == [False] * _NUM_CHECKPOINTS
    assert len(list((tmp_path / ".data").iterdir())) == _NUM_CHECKPOINTS


def _both(racers: list[subprocess.Popen[str]], line: str) -> list[str]:
    """What each of them says, having been told so at the same moment."""
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write(line)
        racer.stdin.flush()
    said = []
    for racer in racers:
        assert racer.stdout is not None
        said.append(racer.stdout.readline())
    return said
