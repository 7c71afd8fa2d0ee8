"""One server for all recipes, and the hub that they find their models and data in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cookbook import hub, recipe
from tests.cookbook.recipe import Cookbook


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    directory = Path(__file__).parent
    for item in items:
        if directory in item.path.parents:
            item.add_marker(pytest.mark.cookbook)


@pytest.fixture(scope="session")
def cookbook(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cookbook]:
    """Fails, and never skips, where the environment was not made."""
    interpreter = recipe.ENVIRONMENT / "bin" / "python"
    assert interpreter.exists(), f"{interpreter} does not exist: run `make test-cookbook`"
    assert pytestconfig.cache is not None
    directory = hub.prepare(pytestconfig.cache.mkdir("cookbook"))
    scratch = tmp_path_factory.mktemp("cookbook")
    with recipe.running_server(directory, scratch / "store") as address:
        yield Cookbook(hub=directory, address=address, store=scratch / "store", scratch=scratch)
