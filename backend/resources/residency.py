"""Which snapshots' weights are in a generator's memory: the latest used ones. The others wait on disk.

The files are of this process only: after a restart, the snapshots that they belonged to are gone.

Adapters are small, and those in use come on top of those that stay. Full weights take 4 bytes a parameter, so their
number is bounded: at most MAX_RESIDENT_FULL of them, and one more that is published while all of those are in use.
Whoever wants to sample from yet another waits, first come, first served, until one of those is not in use.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from backend.checkpoints import model_files, peft_files
from backend.generator.base import Generator
from backend.trainer.base import Adapter, FullConfig, Weights, WeightsConfig

log = logging.getLogger(__name__)

MAX_RESIDENT_FULL = 2


@dataclass(slots=True, kw_only=True, eq=False)
class _Snapshot:
    """Its weights are here, or in the file, or in both.

    path: where they are written to, if ever.
    engine_name: None: not in the generator. A generator's names are used once, so each stay has its own.
    num_users, num_wanting: who samples from it; who will as soon as it is in the generator.
    bringing: what brings it there.
    """

    name: str
    config: WeightsConfig
    path: Path
    weights: Weights | None
    is_on_disk: bool = False
    engine_name: str | None = None
    num_users: int = 0
    num_wanting: int = 0
    bringing: asyncio.Task[None] | None = None
    is_dropped: bool = False

    @property
    def is_full(self) -> bool:
        return isinstance(self.config, FullConfig)

    @property
    def may_leave(self) -> bool:
        return not (self.num_users or self.num_wanting or self.bringing)


class Residency:
    """Owned by the event loop. `max_resident`: how many adapters stay in memory, beside those in use."""

    def __init__(self, generator: Generator, directory: Path, max_resident: int) -> None:
        self._generator = generator
        self._directory = directory
        self._max_adapters = max_resident
        self._snapshots: dict[str, _Snapshot] = {}
        # Those in memory or on their way there, the latest used last.
        self._resident: OrderedDict[str, _Snapshot] = OrderedDict()
        self._spilling: asyncio.Task[None] | None = None
        # Until the next one comes into memory, another attempt would fail like the last.
        self._can_write = True
        self._num_stays = 0
        # Of those who want full weights, one after the other; they wait until some are not in use any more.
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()
        self._bringing_full = asyncio.Lock()

    def has(self, name: str) -> bool:
        return name in self._snapshots

    async def add(self, name: str, weights: Weights) -> None:
        """Makes a new snapshot sampleable. With full weights, waits for the room that they take.

        When the generator refuses it, it is as if it had never been.
        """
        snapshot = self._new(name, weights)
        try:
            await self._bring(snapshot)
        except BaseException:
            self._forget(snapshot)
            raise
        if snapshot.is_full:
            await self._spilled_surplus()

    def add_later(self, name: str, weights: Weights) -> None:
        """Has it from now on. Whoever uses it waits until it is sampleable, and tries again if that has failed."""
        self._start_bringing(self._new(name, weights)).add_done_callback(_log_failure)

    async def settle(self, name: str) -> None:
        """Returns when what `add_later` began has ended, however."""
        snapshot = self._snapshots.get(name)
        if snapshot is not None and snapshot.bringing is not None:
            await asyncio.wait([snapshot.bringing])

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[str]:
        """The generator's name of a snapshot that is here. It stays in memory until the end.

        Raises:
            PostTrainingError: what the generator refused it with; the next use tries again.
        """
        snapshot = self._snapshots[name]
        await self._claim(snapshot)
        try:
            assert snapshot.engine_name is not None
            yield snapshot.engine_name
        finally:
            self._release(snapshot)

    def share(self, name: str, stack: ExitStack) -> None:
        """As `use`, until the end of `stack`, of a snapshot that somebody is using now."""
        snapshot = self._snapshots[name]
        assert snapshot.num_users, f"nobody uses snapshot {name!r}"
        snapshot.num_users += 1
        stack.callback(self._release, snapshot)

    async def drop(self, name: str) -> None:
        """Frees its memory and its file. Nobody uses it, and nobody will until it is added again."""
        snapshot = self._snapshots[name]
        num_users = snapshot.num_users + snapshot.num_wanting
        assert not num_users, f"snapshot {name!r} has {num_users} users"
        self._forget(snapshot)
        if snapshot.is_on_disk:
            await asyncio.to_thread(snapshot.path.unlink, missing_ok=True)

    def _new(self, name: str, weights: Weights) -> _Snapshot:
        assert name not in self._snapshots, f"snapshot {name!r} exists"
        path = self._directory / f"{uuid.uuid4().hex}.safetensors"
        made = _Snapshot(name=name, config=_config(weights), path=path, weights=weights)
        self._snapshots[name] = self._resident[name] = made
        return made

    def _forget(self, snapshot: _Snapshot) -> None:
        """Whoever is bringing it, or writing it down, looks at `is_dropped` afterwards."""
        snapshot.is_dropped = True
        del self._snapshots[snapshot.name]
        self._take_out(snapshot)

    def _take_out(self, snapshot: _Snapshot) -> None:
        """Of memory."""
        self._resident.pop(snapshot.name, None)
        snapshot.weights = None
        if snapshot.engine_name is not None:
            self._generator.drop_snapshot(snapshot.engine_name)
            snapshot.engine_name = None

    async def _claim(self, snapshot: _Snapshot) -> None:
        if not snapshot.is_full:
            await self._take(snapshot)
            return
        async with self._turn:
            while snapshot.engine_name is None and self._num_full_in_use() >= MAX_RESIDENT_FULL:
                self._released.clear()
                await self._released.wait()
            await self._take(snapshot)

    async def _take(self, snapshot: _Snapshot) -> None:
        snapshot.num_wanting += 1
        try:
            while snapshot.engine_name is None:
                await self._bring(snapshot)
            snapshot.num_users += 1
            self._resident.move_to_end(snapshot.name)
        finally:
            snapshot.num_wanting -= 1

    def _release(self, snapshot: _Snapshot) -> None:
        snapshot.num_users -= 1
        if not snapshot.num_users:
            self._released.set()
            self._start_spilling()

    def _num_full_in_use(self) -> int:
        return sum(bool(s.num_users) and s.is_full for s in self._resident.values())

    async def _bring(self, snapshot: _Snapshot) -> None:
        # Whoever hangs up leaves it to the others who wait for it.
        await asyncio.shield(snapshot.bringing or self._start_bringing(snapshot))

    def _start_bringing(self, snapshot: _Snapshot) -> asyncio.Task[None]:
        task = asyncio.create_task(self._bring_in_turn(snapshot), name=f"bring {snapshot.name}")
        # All who waited for it may have hung up.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        snapshot.bringing = task
        self._resident[snapshot.name] = snapshot
        return task

    async def _bring_in_turn(self, snapshot: _Snapshot) -> None:
        try:
            if not snapshot.is_full:
                await self._bring_once(snapshot)
                return
            async with self._bringing_full:
                self._start_spilling()
                await self._spilled_surplus()
                await self._bring_once(snapshot)
        finally:
            snapshot.bringing = None
            is_here = snapshot.weights is not None or snapshot.engine_name is not None
            if not is_here and self._resident.get(snapshot.name) is snapshot:
                del self._resident[snapshot.name]
            self._can_write = True
            self._start_spilling()

    async def _bring_once(self, snapshot: _Snapshot) -> None:
        weights = snapshot.weights
        if weights is None:
            weights = await asyncio.to_thread(_read, snapshot.path, snapshot.config)
        self._num_stays += 1
        engine_name = f"{snapshot.name}#{self._num_stays}"
        await self._generator.add_snapshot(engine_name, weights)
        if snapshot.is_dropped:
            self._generator.drop_snapshot(engine_name)
            return
        snapshot.engine_name = engine_name
        self._resident.move_to_end(snapshot.name)

    def _start_spilling(self) -> None:
        if self._can_write and self._spilling is None and self._surplus() is not None:
            self._spilling = asyncio.create_task(self._spill_surplus(), name="spill snapshots")

    async def _spilled_surplus(self) -> None:
        if self._spilling is not None:
            await asyncio.shield(self._spilling)

    async def _spill_surplus(self) -> None:
        try:
            while (snapshot := self._surplus()) is not None:
                await self._spill(snapshot)
        except OSError:
            log.exception("snapshots stay in memory: they could not be written to the store")
            self._can_write = False
        finally:
            self._spilling = None

    def _surplus(self) -> _Snapshot | None:
        """The least lately used of those that are more than may stay."""
        adapters = [s for s in self._resident.values() if not s.is_full and s.may_leave]
        if len(adapters) > self._max_adapters:
            return adapters[0]
        full = [s for s in self._resident.values() if s.is_full]
        if len(full) > MAX_RESIDENT_FULL:
            return next((s for s in full if s.may_leave), None)
        return None

    async def _spill(self, snapshot: _Snapshot) -> None:
        if not snapshot.is_on_disk:
            assert snapshot.weights is not None
            await asyncio.to_thread(_write, snapshot.path, snapshot.weights)
            snapshot.is_on_disk = True
        if snapshot.is_dropped:
            await asyncio.to_thread(snapshot.path.unlink, missing_ok=True)
        elif snapshot.may_leave:
            self._take_out(snapshot)


def _log_failure(bringing: asyncio.Task[None]) -> None:
    if not bringing.cancelled() and (error := bringing.exception()) is not None:
        log.error("%s failed; the next sample tries again", bringing.get_name(), exc_info=error)


def _write(path: Path, weights: Weights) -> None:
    try:
        if isinstance(weights, Adapter):
            path.write_bytes(peft_files.encode_adapter(weights))
        else:
            model_files.write_weights(path, weights)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _read(path: Path, config: WeightsConfig) -> Weights:
    if isinstance(config, FullConfig):
        return model_files.read_weights(path)
    return peft_files.decode_adapter(path.read_bytes(), config)


def _config(weights: Weights) -> WeightsConfig:
    return weights.lora if isinstance(weights, Adapter) else FullConfig()
