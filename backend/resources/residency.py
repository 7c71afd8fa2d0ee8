"""Which snapshots' adapters are in a generator's memory: the latest used ones. The others wait on disk.

The files are of this process only: after a restart, the snapshots that they belonged to are gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from backend.checkpoints import peft_files
from backend.generator.base import Generator
from backend.store import write_whole
from backend.trainer.base import Adapter, LoraConfig, Weights

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Resident:
    """engine_name: a generator's names are used once, so each stay in memory has its own."""

    weights: Weights
    engine_name: str
    num_users: int = 0


class Residency:
    """Owned by the event loop. `max_resident`: how many adapters stay in memory, beside those in use."""

    def __init__(self, generator: Generator, directory: Path, max_resident: int) -> None:
        self._generator = generator
        self._directory = directory
        self._max_resident = max_resident
        # The latest used last.
        self._resident: OrderedDict[str, _Resident] = OrderedDict()
        self._spilled: dict[str, LoraConfig] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._spilling: asyncio.Task[None] | None = None
        self._num_stays = 0

    def has(self, name: str) -> bool:
        return name in self._resident or name in self._spilled

    def add(self, name: str, weights: Weights) -> None:
        """Makes a new snapshot sampleable."""
        assert not self.has(name), f"snapshot {name!r} exists"
        self._enter(name, weights)

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[str]:
        """The generator's name of a snapshot that was added. It stays in memory until the end."""
        while name not in self._resident:
            await self._load(name)
        resident = self._resident[name]
        self._resident.move_to_end(name)
        resident.num_users += 1
        try:
            yield resident.engine_name
        finally:
            resident.num_users -= 1

    def _enter(self, name: str, weights: Weights) -> None:
        self._num_stays += 1
        engine_name = f"{name}#{self._num_stays}"
        self._generator.add_snapshot(engine_name, weights)
        self._resident[name] = _Resident(weights=weights, engine_name=engine_name)
        if len(self._resident) > self._max_resident and self._spilling is None:
            self._spilling = asyncio.create_task(self._spill_surplus(), name="spill snapshots")

    async def _spill_surplus(self) -> None:
        try:
            while (name := self._oldest_unused()) is not None:
                await self._spill(name)
        except OSError:
            log.exception("snapshots stay in memory: they could not be written to the store")
        finally:
            self._spilling = None

    def _oldest_unused(self) -> str | None:
        surplus = len(self._resident) - self._max_resident
        if surplus <= 0:
            return None
        return next((name for name, r in self._resident.items() if not r.num_users), None)

    async def _spill(self, name: str) -> None:
        resident = self._resident[name]
        if name not in self._spilled:
            await asyncio.to_thread(_write, self._path(name), resident.weights)
            self._spilled[name] = _lora(resident.weights)
        if resident.num_users:
            return
        del self._resident[name]
        self._generator.drop_snapshot(resident.engine_name)

    async def _load(self, name: str) -> None:
        task = self._loading.get(name)
        if task is None:
            task = asyncio.create_task(self._load_once(name), name="load snapshot")
            self._loading[name] = task
        await asyncio.shield(task)

    async def _load_once(self, name: str) -> None:
        try:
            weights = await asyncio.to_thread(_read, self._path(name), self._spilled[name])
            self._enter(name, weights)
        finally:
            del self._loading[name]

    def _path(self, name: str) -> Path:
        return self._directory / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.safetensors"


def _write(path: Path, weights: Weights) -> None:
    assert isinstance(weights, Adapter)
    write_whole(path, peft_files.encode_adapter(weights), sync=False)


def _read(path: Path, lora: LoraConfig) -> Adapter:
    return peft_files.decode_adapter(path.read_bytes(), lora)


def _lora(weights: Weights) -> LoraConfig:
    assert isinstance(weights, Adapter)
    return weights.lora
