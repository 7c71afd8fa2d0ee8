"""Which snapshots' weights are in a generator's memory: the latest used ones. The others wait on disk.

The files are of this process only: after a restart, the snapshots that they belonged to are gone.

Adapters are small, and those in use come on top of those that stay. Full weights take 4 bytes a parameter, so their
number is bounded: at most MAX_RESIDENT_FULL of them, and one more while an older one is written to disk. Whoever wants
to sample from yet another waits, first come, first served, until one of those is not in use.
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

from backend.checkpoints import model_files, peft_files
from backend.generator.base import Generator
from backend.store import write_whole
from backend.trainer.base import Adapter, FullConfig, FullWeights, Weights, WeightsConfig

log = logging.getLogger(__name__)

MAX_RESIDENT_FULL = 2


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
        self._max_resident = {Adapter: max_resident, FullWeights: MAX_RESIDENT_FULL}
        # The latest used last.
        self._resident: OrderedDict[str, _Resident] = OrderedDict()
        self._spilled: dict[str, WeightsConfig] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._spilling: asyncio.Task[None] | None = None
        self._num_stays = 0
        # Of those who want full weights, one after the other; they wait until some are not in use any more.
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()

    def has(self, name: str) -> bool:
        return name in self._resident or name in self._spilled

    async def add(self, name: str, weights: Weights) -> None:
        """Makes a new snapshot sampleable. With full weights, waits for the room that they take."""
        assert not self.has(name), f"snapshot {name!r} exists"
        if isinstance(weights, FullWeights):
            await self._spilled_surplus()
        await self._enter(name, weights)
        if isinstance(weights, FullWeights):
            await self._spilled_surplus()

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[str]:
        """The generator's name of a snapshot that was added. It stays in memory until the end."""
        resident = await self._claim(name)
        try:
            yield resident.engine_name
        finally:
            resident.num_users -= 1
            self._released.set()

    async def _claim(self, name: str) -> _Resident:
        if not self._is_full(name):
            return await self._take(name)
        async with self._turn:
            while name not in self._resident and self._num_full_in_use() >= MAX_RESIDENT_FULL:
                self._released.clear()
                await self._released.wait()
            if name not in self._resident:
                await self._spilled_surplus()
            return await self._take(name)

    async def _take(self, name: str) -> _Resident:
        while name not in self._resident:
            await self._load(name)
        resident = self._resident[name]
        self._resident.move_to_end(name)
        resident.num_users += 1
        return resident

    def _is_full(self, name: str) -> bool:
        resident = self._resident.get(name)
        if resident is not None:
            return isinstance(resident.weights, FullWeights)
        return isinstance(self._spilled[name], FullConfig)

    def _num_full_in_use(self) -> int:
        residents = self._resident.values()
        return sum(bool(r.num_users) and isinstance(r.weights, FullWeights) for r in residents)

    async def _enter(self, name: str, weights: Weights) -> None:
        self._num_stays += 1
        engine_name = f"{name}#{self._num_stays}"
        await self._generator.add_snapshot(engine_name, weights)
        self._resident[name] = _Resident(weights=weights, engine_name=engine_name)
        if self._spilling is None and self._oldest_unused() is not None:
            self._spilling = asyncio.create_task(self._spill_surplus(), name="spill snapshots")

    async def _spilled_surplus(self) -> None:
        if self._spilling is not None:
            await asyncio.shield(self._spilling)

    async def _spill_surplus(self) -> None:
        try:
            while (name := self._oldest_unused()) is not None:
                await self._spill(name)
        except OSError:
            log.exception("snapshots stay in memory: they could not be written to the store")
        finally:
            self._spilling = None

    def _oldest_unused(self) -> str | None:
        """Of those that are more than may stay."""
        for kind, most in self._max_resident.items():
            names = [n for n, r in self._resident.items() if isinstance(r.weights, kind)]
            unused = [n for n in names if not self._resident[n].num_users]
            if len(names) > most and unused:
                return unused[0]
        return None

    async def _spill(self, name: str) -> None:
        resident = self._resident[name]
        if name not in self._spilled:
            await asyncio.to_thread(_write, self._path(name), resident.weights)
            self._spilled[name] = _config(resident.weights)
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
            await self._enter(name, weights)
        finally:
            del self._loading[name]

    def _path(self, name: str) -> Path:
        return self._directory / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.safetensors"


def _write(path: Path, weights: Weights) -> None:
    if isinstance(weights, Adapter):
        write_whole(path, peft_files.encode_adapter(weights), sync=False)
        return
    temporary = path.with_suffix(".tmp")
    model_files.write_weights(temporary, weights)
    temporary.replace(path)


def _read(path: Path, config: WeightsConfig) -> Weights:
    if isinstance(config, FullConfig):
        return model_files.read_weights(path)
    return peft_files.decode_adapter(path.read_bytes(), config)


def _config(weights: Weights) -> WeightsConfig:
    return weights.lora if isinstance(weights, Adapter) else FullConfig()
