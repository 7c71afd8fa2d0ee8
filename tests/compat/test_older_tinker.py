"""The same tests with the oldest Tinker that is supported, in the place of the one that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

OLDEST = "0.23.1"
HERE = Path(__file__).parent


@pytest.mark.registry
@pytest.mark.slow
def test_everything_here_holds_with_the_oldest_tinker_too(tmp_path):
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    subprocess.run([*pip, f"tinker=={OLDEST}"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "packages")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "packages")}
    version = [sys.executable, "-c", "import tinker; print(tinker.__version__)"]
    found = subprocess.run(version, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == OLDEST
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", str(HERE)],
        cwd=HERE.parents[1],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
