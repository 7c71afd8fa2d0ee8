"""Commands run in the test's process, against a server with the exact numpy model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from backend.cli import main
from tests.services.harness import Running, serving


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        assert self.status == 0, self.err
        return json.loads(self.out)


Typed = Callable[..., Outcome]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("cli") / "store") as running:
        yield running


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TOGETHER_POST_TRAINING_ADDRESS", "TINKER_BASE_URL", "TOGETHER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    """Types a command: its exit status and what it printed."""

    def run(*arguments: str) -> Outcome:
        capsys.readouterr()
        try:
            status = main(list(arguments))
        except SystemExit as end:
            status = int(end.code or 0)
        printed = capsys.readouterr()
        return Outcome(status=status, out=printed.out, err=printed.err)

    return run


@pytest.fixture
def ask(typed: Typed, server: Running) -> Typed:
    """The same, of the server."""
    return lambda *arguments: typed(*arguments, "--address", server.address)
