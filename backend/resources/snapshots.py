"""Snapshots: published and opened weights, each immutable under its name for as long as it is kept.

    snapshots/base:{hash}             a base model
    snapshots/checkpoint:{hash}       the files of a checkpoint, as they were when it was opened
    snapshots/session:{id}:{number}   a session's weights, published by its operation of that number
    snapshots/live:{id}               what a session published last: no weights of its own

Names follow from what they stand for, so that opening the same thing twice gives the same snapshot, and one that
was opened before a restart can be opened again. How long they are kept is in `retention`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from weakref import WeakValueDictionary

from backend.checkpoints.manifest import Manifest
from backend.checkpoints.store import CheckpointStore, LoadedCheckpoint
from backend.operations.journal import Journal
from backend.operations.publishing import Published
from backend.operations.session import Session
from backend.operations.work import SyncType
from backend.resources.live import LivePolicies, Use
from backend.resources.resource import Resource
from backend.resources.resources import Resources
from backend.resources.retention import Lifetimes, Retention
from backend.resources.snapshot_records import SnapshotRecords, gone
from backend.trainer.base import FullConfig, Weights
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.names import (
    CheckpointPath,
    base_snapshot,
    live_snapshot,
    parse_checkpoint_path,
)
from together_post_training.v1.generator_pb2 import Snapshot

log = logging.getLogger(__name__)


class Snapshots:
    """Owned by the event loop. `monotonic`: seconds, never back."""

    def __init__(
        self,
        journal: Journal,
        checkpoints: CheckpointStore,
        resources: Resources,
        lifetimes: Lifetimes,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checkpoints = checkpoints
        self._resources = resources
        self._records = SnapshotRecords(journal, monotonic)
        self._live = LivePolicies()
        self._retention = Retention(
            self._records, self._live, resources, lifetimes, monotonic, self._still_opens
        )
        self._lease_s = lifetimes.lease_s
        # Full weights are large: one set is read at a time.
        self._loading_full = asyncio.Lock()
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._returning: dict[str, asyncio.Task[None]] = {}

    @property
    def lease_s(self) -> float:
        return self._lease_s

    async def restore(self) -> None:
        """Learns the names that an earlier server gave out."""
        await self._records.restore()

    def get(self, name: str) -> Snapshot:
        """As it is now. Raises SNAPSHOT_NOT_FOUND."""
        live = self._live.find(name)
        return self._records.get(name) if live is None else live.message()

    def all(self, holder: str = "", session: str = "") -> list[Snapshot]:
        """Live ones too, as they are now.

        Args:
            holder: only what it said last that it holds; empty: whoever does.
            session: only what was published from it; empty: any.
        """
        pinned = (record.shown for record in self._records.all())
        shown = [*pinned, *(live.message() for live in self._live.all())]
        held = self._retention.held_by(holder)
        return [
            one
            for one in shown
            if (not holder or one.name in held) and session in ("", one.session)
        ]

    def hold(self, holder: str, names: Sequence[str]) -> list[str]:
        """`names`: all that it holds from now on. Returns those that do not exist.

        Those of checkpoints that are not here, e.g. after a restart, come back before the checkpoint may change.
        """
        missing = self._retention.hold(holder, names)
        for name in set(names).difference(missing, self._returning):
            if name in self._records and self._is_asleep(self._records.get(name)):
                self._returning[name] = asyncio.create_task(self._return(name))
        return missing

    async def sweep(self) -> None:
        """Drops what nobody holds or uses any more."""
        await self._retention.sweep()

    async def settle(self, session: Session) -> None:
        """See `backend.operations.publishing.Publisher`."""
        live = self._live.find(live_snapshot(session.id))
        if live is not None:
            resource = await self._resources.get(live.target.base_model)
            await resource.residency.settle(live.target.name)

    async def publish(
        self, session: Session, sequence: int, weights: Weights, sync: SyncType
    ) -> Published:
        """See `backend.operations.publishing.Publisher`."""
        shown = Snapshot(
            name=f"snapshots/session:{session.id}:{sequence}",
            base_model=session.shown.base_model,
            session=session.id,
            policy_version=session.policy_version,
        )
        resource = await self._resources.get(shown.base_model)
        if sync == "background":
            await self._records.put(shown)
            resource.residency.add_later(shown.name, weights)
            self._turn_to(session, shown, sync)
            return Published(snapshot=shown.name, is_pending=True)
        await resource.residency.add(shown.name, weights)
        try:
            await self._records.put(shown)
        except BaseException:
            await resource.residency.drop(shown.name)
            raise
        if sync == "pipeline":
            return await self._move(session, shown, resource)
        self._turn_to(session, shown, sync)
        return Published(snapshot=shown.name)

    def _turn_to(self, session: Session, shown: Snapshot, sync: SyncType) -> None:
        before = self._live.turn_to(session, shown, for_followers=sync == "pipeline")
        if before is not None:
            self._retention.let_go(before.name)

    async def _move(self, session: Session, shown: Snapshot, resource: Resource) -> Published:
        def share(use: Use) -> None:
            use.until_end.enter_context(self._records.used(shown.name))
            resource.residency.share(shown.name, use.until_end)

        async with resource.residency.use(shown.name) as engine_name:
            self._turn_to(session, shown, "pipeline")
            notices = self._live.move(session, shown, engine_name, share)
        return Published(snapshot=shown.name, notices=notices)

    async def open_base(self, base_model: str) -> Snapshot:
        resource = await self._resources.get(base_model)
        name = base_snapshot(_hash(resource.name))
        if name not in self._records:
            await self._records.put(Snapshot(name=name, base_model=resource.name))
        return self._records.get(name)

    async def open_checkpoint(self, path: CheckpointPath) -> Snapshot:
        """Raises CHECKPOINT_NOT_FOUND, INCOMPATIBLE_CHECKPOINT."""
        async with self._opening.setdefault(str(path), asyncio.Lock()):
            manifest = await asyncio.to_thread(self._checkpoints.get, path)
            resource = await self._resources.get(manifest.base_model)
            if not resource.residency.has(_checkpoint_name(manifest)):
                is_full = isinstance(manifest.weights, FullConfig)
                async with self._loading_full if is_full else nullcontext():
                    manifest = await self._load(resource, path)
            return await self._keep_opened(manifest)

    async def _load(self, resource: Resource, path: CheckpointPath) -> Manifest:
        """It may have been overwritten since it was looked at: the manifest of what was loaded."""
        loaded = await asyncio.to_thread(self._checkpoints.load, path, optimizer=False)
        await _check_fits(resource, loaded)
        await resource.residency.add(_checkpoint_name(loaded.manifest), loaded.weights)
        return loaded.manifest

    async def _keep_opened(self, manifest: Manifest) -> Snapshot:
        name = _checkpoint_name(manifest)
        if name not in self._records:
            record = Snapshot(
                name=name,
                base_model=manifest.base_model,
                session=manifest.session,
                policy_version=manifest.policy_version,
                path=str(manifest.path),
            )
            await self._records.put(record)
        self._records.touch(name)
        return self._records.get(name)

    def used(self, name: str) -> AbstractContextManager[object]:
        """It is kept until the end. Raises SNAPSHOT_NOT_FOUND."""
        return nullcontext() if self._live.find(name) else self._records.used(name)

    async def resource(self, name: str) -> Resource:
        """Its model's, once that is loaded."""
        return await self._resources.get(self.get(name).base_model)

    @asynccontextmanager
    async def use(self, name: str, *, follow: bool = False) -> AsyncIterator[Use]:
        """The weights to sample from. A live snapshot's are those published last; with `follow` they may change."""
        while (live := self._live.find(name)) is not None:
            target = live.target
            async with self._use_pinned(target) as use:
                # It may have taken a while, and others come since.
                if live.target is target:
                    if follow:
                        live.follow(use)
                    yield use
                    return
        async with self._use_pinned(self._records.get(name)) as use:
            yield use

    @asynccontextmanager
    async def _use_pinned(self, shown: Snapshot) -> AsyncIterator[Use]:
        with self._records.used(shown.name):
            resource = await self._resources.get(shown.base_model)
            if not shown.session and not shown.path:
                yield Use(resource=resource, engine_name=None, snapshots={None: shown})
                return
            if not resource.residency.has(shown.name):
                await self._reopen(shown)
            async with resource.residency.use(shown.name) as engine_name:
                use = Use(
                    resource=resource, engine_name=engine_name, snapshots={engine_name: shown}
                )
                with use.until_end:
                    yield use

    def _is_asleep(self, shown: Snapshot) -> bool:
        """Of a checkpoint, and not here, although its model is."""
        resource = self._resources.ready(shown.base_model)
        return bool(shown.path and resource and not resource.residency.has(shown.name))

    async def _return(self, name: str) -> None:
        try:
            with self._records.used(name) as shown:
                await self._reopen(shown)
        except PostTrainingError as error:
            log.info("snapshot %s is held and cannot come back: %s", name, error.reason)
        finally:
            del self._returning[name]

    async def _reopen(self, shown: Snapshot) -> None:
        """After a restart, or when it was not kept: from the checkpoint, if it still is what it was."""
        try:
            opened = await self.open_checkpoint(parse_checkpoint_path(shown.path))
        except PostTrainingError as error:
            why = f"its checkpoint cannot be read: {error.message}"
            is_gone = error.reason is Reason.CHECKPOINT_NOT_FOUND
        else:
            why = f"{shown.path} was overwritten since"
            is_gone = opened.name != shown.name
            if not is_gone:
                return
        if is_gone and shown.name in self._records:
            await self._records.forget(shown.name, why)
        raise gone(shown.name, why)

    def _still_opens(self, shown: Snapshot) -> bool:
        """Of a checkpoint's. Reads files."""
        try:
            manifest = self._checkpoints.get(parse_checkpoint_path(shown.path))
        except PostTrainingError:
            return False
        return _checkpoint_name(manifest) == shown.name


async def _check_fits(resource: Resource, loaded: LoadedCheckpoint) -> None:
    """Loads an adapter into a session of its own, which checks every tensor; full weights are the generator's to check,
    without a second copy.

    Raises:
        PostTrainingError: INCOMPATIBLE_CHECKPOINT.
    """
    if isinstance(loaded.manifest.weights, FullConfig):
        return
    trial = f"trial of {loaded.manifest.path}"

    def check() -> None:
        resource.trainer.create_session(trial, loaded.manifest.weights)
        try:
            resource.trainer.load(trial, loaded.weights, None)
        finally:
            resource.trainer.delete_session(trial)

    await resource.thread.call(check)


def _checkpoint_name(manifest: Manifest) -> str:
    content = "\n".join(file.sha256 for file in manifest.files)
    identity = f"{manifest.path}\n{manifest.create_time_s}\n{content}"
    return f"snapshots/checkpoint:{_hash(identity)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
