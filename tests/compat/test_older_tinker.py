"""The same tests with the oldest Tinker that is supported, in the place of the one that is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.compatibility.versions import OLDEST, environment

HERE = Path(__file__).parent


@pytest.mark.registry
@pytest.mark.slow
def test_everything_here_holds_with_the_oldest_tinker_too():
    variables = environment(OLDEST)
    version = [sys.executable, "-c", "import tinker; print(tinker.__version__)"]
    found = subprocess.run(version, env=variables, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == OLDEST
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", str(HERE)],
        cwd=HERE.parents[1],
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
