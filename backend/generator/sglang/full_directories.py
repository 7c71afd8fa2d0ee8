"""Snapshots of full weights, each a plain Hugging Face directory for servers to read."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from backend.checkpoints import model_files
from backend.checkpoints.manifest import FULL_WEIGHTS
from backend.generator.sglang.adapters import unique_name
from backend.generator.sglang.finite import FiniteCheck
from backend.trainer.base import FullWeights


@dataclass(slots=True, kw_only=True, eq=False)
class FullSnapshot:
    """name: what the server is to call these weights."""

    name: str
    directory: Path
    finite: FiniteCheck
    num_users: int = 0
    is_dropped: bool = False


class FullDirectories:
    """Owned by the event loop.

    directory: which the server sees under the same path. base: the base model's directory.
    finite_check: of weights, by the server's name for them.
    """

    def __init__(
        self, directory: Path, base: Path, finite_check: Callable[[str], FiniteCheck]
    ) -> None:
        self._directory = directory
        self._base = base
        self._finite_check = finite_check
        self._snapshots: dict[str, FullSnapshot] = {}
        self._by_name: dict[str, FullSnapshot] = {}

    def __contains__(self, snapshot: str) -> bool:
        return snapshot in self._snapshots

    async def add(self, snapshot: str, weights: FullWeights) -> None:
        name = unique_name(snapshot)
        entry = FullSnapshot(
            name=name, directory=self._directory / name, finite=self._finite_check(name)
        )
        try:
            await asyncio.to_thread(self._write, entry.directory, weights)
        except BaseException:
            shutil.rmtree(entry.directory, ignore_errors=True)
            raise
        self._snapshots[snapshot] = self._by_name[name] = entry

    def drop(self, snapshot: str) -> None:
        entry = self._snapshots.pop(snapshot)
        entry.is_dropped = True
        self._remove_unused(entry)

    @contextmanager
    def use(self, snapshot: str) -> Iterator[FullSnapshot]:
        """Its files are there until the end."""
        entry = self._snapshots[snapshot]
        entry.num_users += 1
        try:
            yield entry
        finally:
            entry.num_users -= 1
            self._remove_unused(entry)

    def directory(self, name: str | None) -> Path:
        """By the server's name for them; None: the base model's."""
        return self._base if name is None else self._by_name[name].directory

    def _write(self, directory: Path, weights: FullWeights) -> None:
        directory.mkdir(parents=True)
        model_files.write_weights(directory / FULL_WEIGHTS, weights)
        model_files.write_companions(directory, self._base)

    def _remove_unused(self, entry: FullSnapshot) -> None:
        if entry.is_dropped and not entry.num_users:
            del self._by_name[entry.name]
            shutil.rmtree(entry.directory, ignore_errors=True)
