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
def official_sdk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of Together's own SDK. Needs a package registry, and fails without one."""
    target = tmp_path_factory.mktemp("sdk")
    run(
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(target)),
        "together==3.1.1",
    )
    (downloaded,) = target.glob("*.whl")
    return downloaded
