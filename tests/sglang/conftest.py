"""A real SGLang server, and what tests need that start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.trainer import builtin_models
from tests.sglang import environment
from tests.sglang.environment import Installation
from tests.sglang.server import Server, running

_LOG = pytest.StashKey[Path]()


@pytest.fixture(scope="session")
def sglang() -> Installation:
    """SGLang as it is installed here. A test that asks for it fails, and is never skipped, where it is not."""
    return environment.installation()


@pytest.fixture(scope="session")
def server(sglang: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running server of a tiny model with a tokenizer, ready for LoRA adapters."""
    model = builtin_models.directory("builtin:tiny")
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    with running(sglang, model, log, *environment.LORA_ARGUMENTS) as server:
        yield server


@pytest.fixture(autouse=True)
def _log_of_the_server(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        request.node.stash[_LOG] = request.getfixturevalue("server").log


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """What the server wrote last stands in the report of a test that fails."""
    outcome = yield
    report = outcome.get_result()
    log = item.stash.get(_LOG, None)
    if report.failed and log is not None:
        report.sections.append((f"The end of {log}", environment.end_of(log)))
