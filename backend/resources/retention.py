"""How long snapshots are kept: while somebody holds or uses them, and for a while longer.

    the newest of a session       as long as the session runs
    one that somebody holds       as long as they do
    one that was let go           until nobody has used it for `lease_s`
    others                        until nobody has used it for `retention_s`: never held, or by a client that died

Dropping frees memory and disk. A session's snapshot is gone then; one of a checkpoint can be opened again, and its
name works as long as the checkpoint is what it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backend.operations.journal import is_published
from backend.resources.leases import Leases
from backend.resources.live import LivePolicies
from backend.resources.resources import Resources
from backend.resources.snapshot_records import Record, SnapshotRecords
from together_post_training.v1.generator_pb2 import Snapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """lease_s: how long a holder may be silent; also how long one that was let go stays, for whoever is about to hold
    it. retention_s: of others that nobody uses."""

    lease_s: float = 600.0
    retention_s: float = 24 * 3600.0


class Retention:
    """Owned by the event loop.

    monotonic: seconds, never back.
    still_opens: whether a snapshot's checkpoint still is what it was; may read files.
    """

    def __init__(
        self,
        records: SnapshotRecords,
        live: LivePolicies,
        resources: Resources,
        lifetimes: Lifetimes,
        monotonic: Callable[[], float],
        still_opens: Callable[[Snapshot], bool],
    ) -> None:
        self._records = records
        self._live = live
        self._resources = resources
        self._lifetimes = lifetimes
        self._monotonic = monotonic
        self._still_opens = still_opens
        self._leases = Leases(lifetimes.lease_s)

    def hold(self, holder: str, names: Sequence[str]) -> list[str]:
        """`names`: all that it holds from now on. Returns those that do not exist."""
        known = {name for name in names if name in self._records or self._live.find(name)}
        for name in self._leases.hold(holder, known, self._monotonic()):
            self._records.touch(name)
        return sorted(set(names) - known)

    def held_by(self, holder: str) -> frozenset[str]:
        """What it said last that it holds, and what is kept for it still."""
        return self._leases.held_by(holder)

    def let_go(self, name: str) -> None:
        """Of a snapshot that had followers only, and has no more."""
        self._records.touch(name)
        self._leases.let_go(name)

    async def sweep(self) -> None:
        """Drops what is due."""
        for name in self._leases.expire(self._monotonic()):
            self._records.touch(name)
        for record in self._records.all():
            why = self._why_due(record)
            if why is not None and is_published(record.shown):
                await self._drop_published(record.shown, why)
            elif why is not None and record.shown.path:
                await self._drop_opened(record)

    def _why_due(self, record: Record) -> str | None:
        """None: it stays."""
        shown, names = record.shown, [record.shown.name]
        live = self._live.at(shown)
        if live is not None:
            names.append(live.name)
        runs = live is not None and live.session.is_running
        if runs or record.num_users or self._leases.is_held(*names):
            return None
        idle_s = self._monotonic() - record.touched_s
        lifetimes = self._lifetimes
        if self._leases.is_let_go(*names) and idle_s > lifetimes.lease_s:
            return f"its clients let it go, and nobody used it for {_span(lifetimes.lease_s)} after that"
        if idle_s > lifetimes.retention_s:
            return f"nobody held it, and nobody used it for {_span(lifetimes.retention_s)}"
        return None

    def _is_here(self, shown: Snapshot) -> bool:
        resource = self._resources.ready(shown.base_model)
        return resource is not None and resource.residency.has(shown.name)

    async def _drop_published(self, shown: Snapshot, why: str) -> None:
        log.info("snapshot %s is dropped: %s", shown.name, why)
        self._leases.forget(shown.name)
        live = self._live.at(shown)
        if live is not None:
            self._leases.forget(live.name)
            self._live.forget(live)
            self._records.note_gone(live.name, why)
        try:
            await self._records.forget(shown.name, why)
        finally:
            await self._free(shown)

    async def _drop_opened(self, record: Record) -> None:
        """Its name goes with its checkpoint."""
        shown = record.shown
        self._records.touch(shown.name)  # It is looked at again after as long.
        self._leases.forget(shown.name)
        if self._is_here(shown):
            log.info("snapshot %s leaves memory and disk", shown.name)
            await self._free(shown)
        still_opens = await asyncio.to_thread(self._still_opens, shown)
        is_wanted = record.num_users or self._is_here(shown)
        if not (still_opens or is_wanted) and shown.name in self._records:
            await self._records.forget(shown.name, f"{shown.path} was deleted or overwritten")

    async def _free(self, shown: Snapshot) -> None:
        if self._is_here(shown):
            resource = self._resources.ready(shown.base_model)
            assert resource is not None
            await resource.residency.drop(shown.name)


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:g} s"
    return f"{seconds / 60:g} minutes" if seconds < 7200 else f"{seconds / 3600:g} hours"
