"""The snapshots that can be sampled, by name: what they stand for, who uses them and since when nobody does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from backend.operations.journal import Journal
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.names import live_session
from together_post_training.v1.generator_pb2 import Snapshot

_MAX_GONE = 10_000


@dataclass(slots=True, kw_only=True, eq=False)
class Record:
    """num_users: calls that run, or wait to. touched_s: when it was last published, opened, used, held or let go."""

    shown: Snapshot
    touched_s: float
    num_users: int = 0


class SnapshotRecords:
    """Owned by the event loop. `monotonic`: seconds, never back."""

    def __init__(self, journal: Journal, monotonic: Callable[[], float]) -> None:
        self._journal = journal
        self._monotonic = monotonic
        self._records: dict[str, Record] = {}
        # Why those went that did, the latest last.
        self._gone: OrderedDict[str, str] = OrderedDict()

    async def restore(self) -> None:
        """Learns the names that an earlier server gave out."""
        for shown in await self._journal.list_snapshots():
            self._records[shown.name] = Record(shown=shown, touched_s=self._monotonic())

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def all(self) -> list[Record]:
        return list(self._records.values())

    def get(self, name: str) -> Snapshot:
        """Raises SNAPSHOT_NOT_FOUND."""
        return self._get(name).shown

    async def put(self, shown: Snapshot) -> None:
        await self._journal.put_snapshot(shown)
        self._records[shown.name] = Record(shown=shown, touched_s=self._monotonic())
        self._gone.pop(shown.name, None)

    async def forget(self, name: str, why: str) -> None:
        """`why`: what callers are told who ask for it, e.g. "its checkpoint was deleted"."""
        del self._records[name]
        self.note_gone(name, why)
        await self._journal.delete_snapshot(name)

    def note_gone(self, name: str, why: str) -> None:
        self._gone[name] = why
        if len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)

    def touch(self, name: str) -> None:
        record = self._records.get(name)
        if record is not None:
            record.touched_s = self._monotonic()

    @contextmanager
    def used(self, name: str) -> Iterator[Snapshot]:
        """It is not dropped before the end. Raises SNAPSHOT_NOT_FOUND."""
        record = self._get(name)
        record.num_users += 1
        try:
            yield record.shown
        finally:
            record.num_users -= 1
            record.touched_s = self._monotonic()

    def _get(self, name: str) -> Record:
        record = self._records.get(name)
        if record is None:
            raise self._not_found(name)
        return record

    def _not_found(self, name: str) -> PostTrainingError:
        if name in self._gone:
            return gone(name, self._gone[name])
        if session := live_session(name):
            return _nothing_published(session)
        return fail(
            Reason.SNAPSHOT_NOT_FOUND,
            f"Unknown snapshot {name!r}: names come from OpenSnapshot, and from WeightsSync for as long as somebody "
            "holds them and the server is not restarted. Open a checkpoint instead.",
            snapshot=name,
        )


def gone(name: str, why: str) -> PostTrainingError:
    return fail(
        Reason.SNAPSHOT_NOT_FOUND,
        f"Snapshot {name!r} is gone: {why}. Publish its session's weights again, or open a checkpoint instead.",
        snapshot=name,
    )


def _nothing_published(session: str) -> PostTrainingError:
    return fail(
        Reason.SNAPSHOT_NOT_FOUND,
        f"Session {session!r} has no live policy: it has published nothing yet. Publish its weights once, with "
        "WeightsSync.",
        session=session,
    )
