from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.packaging.environments import REPOSITORY, Environment, create, run


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
    """The wheels of Together's own SDK and of what its import needs that this environment lacks.

    Needs a package registry, and fails without one.
    """
    target = tmp_path_factory.mktemp("sdk")
    run(
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(target)),
        *("together==3.1.1", "detect-agent==0.6.0"),
    )
    wheels = tuple(sorted(str(path) for path in target.glob("*.whl")))
    assert len(wheels) == 2, wheels
    return wheels
