"""The versions of Tinker's SDK that are supported, and how to run something with each of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

OLDEST, NEWEST = "0.23.1", "0.38.0"
REPOSITORY = Path(__file__).resolve().parents[2]
_CACHE = REPOSITORY / "build" / "tinker"


def environment(version: str) -> dict[str, str]:
    """Variables for a process in which `tinker` is that version: the installed one, else one beside it.

    Of the others only the package itself is installed; it takes what it needs from the installed one's requirements,
    which are the same.

    Raises:
        CalledProcessError: the package cannot be had.
    """
    if metadata.version("tinker") == version:
        return dict(os.environ)
    path = [str(_installed(version)), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def _installed(version: str) -> Path:
    """Its directory, which holds all of it or is not there."""
    target = _CACHE / version
    if not target.exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as made:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
            subprocess.run([*pip, "--target", made, f"tinker=={version}"], check=True)
            complete = Path(made) / version
            complete.mkdir()
            for part in Path(made).iterdir():
                if part != complete:
                    shutil.move(part, complete)
            # Whoever comes first has made it.
            try:
                complete.rename(target)
            except OSError:
                if not target.exists():
                    raise
    return target


def run_module(version: str, module: str, *arguments: str, stdin: bytes = b"") -> bytes:
    """What a module prints in a process with that version; what it says goes to stderr.

    Raises:
        CalledProcessError: it failed.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment(version),
        input=stdin,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
