"""Snapshots: published and opened weights, each immutable under its name for as long as it can be sampled.

    snapshots/base:{hash}             a base model
    snapshots/checkpoint:{hash}       the files of a checkpoint, as they were when it was opened
    snapshots/session:{id}:{number}   a session's weights, published by its operation of that number

Names follow from what they stand for, so that opening the same thing twice gives the same snapshot, and one that
was opened before a restart can be opened again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from weakref import WeakValueDictionary

from backend.checkpoints.manifest import Manifest
from backend.checkpoints.store import CheckpointStore, LoadedCheckpoint
from backend.operations.journal import Journal
from backend.operations.session import Session
from backend.resources.resource import Resource
from backend.resources.resources import Resources
from backend.trainer.base import FullConfig, Weights
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.names import CheckpointPath, parse_checkpoint_path
from together_post_training.v1.generator_pb2 import Snapshot


class Snapshots:
    """Owned by the event loop."""

    def __init__(
        self, journal: Journal, checkpoints: CheckpointStore, resources: Resources
    ) -> None:
        self._journal = journal
        self._checkpoints = checkpoints
        self._resources = resources
        self._records: dict[str, Snapshot] = {}
        # Full weights are large: one set is read at a time.
        self._loading_full = asyncio.Lock()
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def restore(self) -> None:
        """Learns the names that an earlier server gave out."""
        for snapshot in await self._journal.list_snapshots():
            self._records[snapshot.name] = snapshot

    def get(self, name: str) -> Snapshot:
        """Raises SNAPSHOT_NOT_FOUND."""
        record = self._records.get(name)
        if record is None:
            raise fail(
                Reason.SNAPSHOT_NOT_FOUND,
                f"Unknown snapshot {name!r}: names come from OpenSnapshot, and from WeightsSync until the server is "
                "restarted. Open a checkpoint instead.",
                snapshot=name,
            )
        return record

    async def publish(self, session: Session, sequence: int, weights: Weights) -> str:
        """See `backend.operations.actions.Publisher`."""
        record = Snapshot(
            name=f"snapshots/session:{session.id}:{sequence}",
            base_model=session.shown.base_model,
            session=session.id,
            policy_version=session.policy_version,
        )
        resource = await self._resources.get(record.base_model)
        await resource.residency.add(record.name, weights)
        await self._keep(record)
        return record.name

    async def open_base(self, base_model: str) -> Snapshot:
        resource = await self._resources.get(base_model)
        name = f"snapshots/base:{_hash(resource.name)}"
        if name not in self._records:
            await self._keep(Snapshot(name=name, base_model=resource.name))
        return self._records[name]

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
            await self._keep(record)
        return self._records[name]

    async def resource(self, name: str) -> Resource:
        """Its model's, once that is loaded."""
        return await self._resources.get(self.get(name).base_model)

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[tuple[Resource, str | None]]:
        """The resource to sample on, and the snapshot's name in its generator; None: the base model."""
        record = self.get(name)
        resource = await self._resources.get(record.base_model)
        if not record.session and not record.path:
            yield resource, None
            return
        if not resource.residency.has(name):
            await self._reopen(record)
        async with resource.residency.use(name) as engine_name:
            yield resource, engine_name

    async def _reopen(self, record: Snapshot) -> None:
        """After a restart: from the checkpoint, if it still is what it was."""
        try:
            opened = await self.open_checkpoint(parse_checkpoint_path(record.path))
        except PostTrainingError as error:
            raise _gone(record, f"its checkpoint cannot be read: {error.message}") from None
        if opened.name != record.name:
            raise _gone(record, f"{record.path} was overwritten since")

    async def _keep(self, record: Snapshot) -> None:
        await self._journal.put_snapshot(record)
        self._records[record.name] = record


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


def _gone(record: Snapshot, why: str) -> PostTrainingError:
    return fail(
        Reason.SNAPSHOT_NOT_FOUND,
        f"Snapshot {record.name!r} is gone: {why}. Open a checkpoint instead.",
        snapshot=record.name,
    )
