"""Snapshots of full weights, each a plain Hugging Face directory for servers to read."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backend.checkpoints import model_files
from backend.checkpoints.manifest import FULL_WEIGHTS
from backend.generator.sglang.finite import FiniteCheck
from backend.generator.sglang.held import Held
from backend.generator.sglang.names import unique_name
from backend.trainer.base import FullWeights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FullSnapshot:
    """name: what the server is to call these weights. The files are there while it is held."""

    name: str
    directory: Path
    finite: FiniteCheck
    held: Held


class FullDirectories:
    """Owned by the event loop.

    directory: which the server sees under the same path. base: the base model's directory.
    finite_check: of the weights that the server has.
    """

    def __init__(
        self, directory: Path, base: Path, finite_check: Callable[[], FiniteCheck]
    ) -> None:
        self._directory = directory
        self._base = base
        self._finite_check = finite_check
        self._snapshots: dict[str, FullSnapshot] = {}
        self._directories: dict[str, Path] = {}

    def find(self, snapshot: str) -> FullSnapshot | None:
        return self._snapshots.get(snapshot)

    async def add(self, snapshot: str, weights: FullWeights) -> None:
        name = unique_name(snapshot)
        directory = self._directory / name
        try:
            await asyncio.to_thread(self._write, directory, weights)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._directories[name] = directory
        self._snapshots[snapshot] = FullSnapshot(
            name=name,
            directory=directory,
            finite=self._finite_check(),
            held=Held(lambda: self._remove(name)),
        )

    def drop(self, snapshot: str) -> None:
        self._snapshots.pop(snapshot).held.drop()

    def directory(self, name: str | None) -> Path:
        """By the server's name for the weights; None: the base model's."""
        return self._base if name is None else self._directories[name]

    def _write(self, directory: Path, weights: FullWeights) -> None:
        directory.mkdir(parents=True)
        model_files.write_weights(directory / FULL_WEIGHTS, weights)
        model_files.write_companions(directory, self._base)

    def _remove(self, name: str) -> None:
        shutil.rmtree(self._directories.pop(name), ignore_errors=True)
