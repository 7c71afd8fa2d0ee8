"""A real SGLang server, and what tests need that start their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from backend.trainer import builtin_models
from tests.conformance.bench import Bench
from tests.conformance.conftest import loop, start
from tests.conformance.engines import Engine
from tests.sglang import engines, environment
from tests.sglang.engines import Kind
from tests.sglang.environment import Installation
from tests.sglang.server import Server, running

# The conformance suite's own, which start engines and close them.
__all__ = ["loop", "start"]

_AGREEMENT = pytest.StashKey[list[str]]()
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


@pytest.fixture(scope="session")
def started(
    start: Callable[[Engine], Bench],
    sglang: Installation,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Kind], Bench]:
    """Starts each kind once; `start` closes them."""
    known: dict[str, Engine] = {}

    def get(kind: Kind) -> Bench:
        if kind.name not in known:
            scratch = tmp_path_factory.mktemp(kind.name)
            known[kind.name] = Engine(
                name=kind.name,
                start=partial(engines.start, kind, sglang, scratch),
                is_succ16=kind.is_succ16,
                tolerance=kind.tolerance,
                # What it has read before it adds up in another order.
                repeat_tolerance=kind.tolerance,
            )
        return start(known[kind.name])

    return get


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


@pytest.fixture
def agreement(request: pytest.FixtureRequest) -> list[str]:
    """Lines for the end of the run."""
    return request.config.stash.setdefault(_AGREEMENT, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = terminalreporter.config.stash.get(_AGREEMENT, [])
    if lines:
        terminalreporter.section("max |logprob difference| to the trainer, float32")
        terminalreporter.write_line("\n".join(lines))
