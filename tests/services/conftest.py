from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.harness import Caller, Running, serving, serving_watched


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for the tests of a module that leave it as it was."""
    with serving(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture
def caller(shared: Running) -> Caller:
    return shared.caller


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Running]:
    """A server of the test's own, whose trainer it controls."""
    with serving_watched(tmp_path / "store") as running:
        yield running
