from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.packaging.environments import OLDEST_TINKER, REPOSITORY, Environment, create, run


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation"),
        *("--outdir", str(target), str(REPOSITORY)),
    )
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return create(tmp_path / "venv")


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """One with the wheel in it, for tests that only look."""
    environment = create(tmp_path_factory.mktemp("installed") / "venv")
    environment.install(str(wheel))
    return environment


@pytest.fixture(scope="session")
def official_sdk(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Together's own SDK, and what its import needs that this environment lacks."""
    return download(tmp_path_factory.mktemp("sdk"), "together==3.1.1", "detect-agent==0.6.0")


@pytest.fixture(scope="session")
def oldest_tinker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The oldest version of Tinker's SDK that the project says it works with."""
    (wheel,) = download(tmp_path_factory.mktemp("tinker"), f"tinker=={OLDEST_TINKER}")
    return wheel


def download(target: Path, *requirements: str) -> tuple[str, ...]:
    """Their wheels. Needs a package registry, and fails without one."""
    run(
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(target)),
        *requirements,
    )
    wheels = tuple(sorted(str(path) for path in target.glob("*.whl")))
    assert len(wheels) == len(requirements), wheels
    return wheels
