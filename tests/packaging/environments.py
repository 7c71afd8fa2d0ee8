"""Clean virtual environments that share this one's third-party packages but none of the project's own code."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
OLDEST_TINKER = "0.23.1"


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment; commands run outside the repository and see no PYTHON* variables."""

    directory: Path

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (found,) = (self.directory / "lib").glob("python*/site-packages")
        return found

    def pip(self, *arguments: str) -> str:
        return run(sys.executable, "-m", "pip", "--python", str(self.python), *arguments)

    def install(self, *requirements: str) -> None:
        self.pip("install", "--no-deps", "--no-compile", "--no-build-isolation", *requirements)

    def execute(self, code: str) -> str:
        """What the code prints; fails with its traceback."""
        return run(str(self.python), "-I", "-c", code, cwd=self.directory)


def create(directory: Path) -> Environment:
    """Third-party packages come by a .pth file, which does not follow other .pth files: an editable install of the
    project in the environment that runs the tests stays invisible."""
    run(sys.executable, "-m", "venv", "--without-pip", str(directory))
    environment = Environment(directory)
    shared = sysconfig.get_paths()["purelib"]
    (environment.site_packages / "third_party.pth").write_text(shared + "\n")
    return environment


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout
