"""What the server writes down before it says so: sessions, operations, results, snapshots.

    a submission is acknowledged     after `add_operation` has returned
    a result or failure is announced after `finish_operation` has returned

One server uses a journal at a time. When it opens, `recover` says what an earlier server left: its sessions, whose
weights were in that server's memory, are lost, and their unfinished operations have failed. (Replaying the
operations from their journaled requests will take the place of `recover`; `requests` gives them in order.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from together_post_training.v1 import generator_pb2, operations_pb2, sessions_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEntry:
    """A session as it is shown, and the digest of the request that made it."""

    session: sessions_pb2.Session
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationEntry:
    """An operation, with its result where it has one, and the digest of its request.

    digest: empty for a number that was used up without a submission.
    """

    operation: operations_pb2.Operation
    digest: bytes


class Journal(Protocol):
    """All methods may raise PostTrainingError RESOURCE_EXHAUSTED when the disk is full; nothing is written then."""

    async def put_session(self, entry: SessionEntry) -> None:
        """Adds it, or replaces it by its id."""
        ...

    async def get_session(self, session: str) -> SessionEntry | None: ...

    async def list_sessions(self) -> Sequence[SessionEntry]:
        """Newest first."""
        ...

    async def add_operation(
        self, session: str, sequence: int, entry: OperationEntry, request: bytes
    ) -> None:
        """`request`: the submission's bytes; empty where there was none, or where it was refused."""
        ...

    async def finish_operation(
        self,
        session: str,
        sequence: int,
        operation: operations_pb2.Operation,
        policy_version: int | None,
    ) -> None:
        """Keeps the end of an operation; a `policy_version` becomes its session's in the same write."""
        ...

    async def get_operation(self, session: str, sequence: int) -> OperationEntry | None: ...

    async def list_operations(
        self, session: str, before: int, count: int
    ) -> Sequence[operations_pb2.Operation]:
        """At most `count` with smaller sequence numbers than `before`, newest first, without results."""
        ...

    async def requests(self, session: str) -> Sequence[tuple[int, bytes]]:
        """The kept requests of a session, in sequence order."""
        ...

    async def forget_requests(self, session: str) -> None:
        """They will not be replayed any more; results stay."""
        ...

    async def put_snapshot(self, snapshot: generator_pb2.Snapshot) -> None: ...

    async def list_snapshots(self) -> Sequence[generator_pb2.Snapshot]:
        """Oldest first."""
        ...

    async def delete_snapshot(self, name: str) -> None:
        """Also one that is not there."""
        ...

    async def recover(self, lost: operations_pb2.Operation, now: float) -> int:
        """Running sessions become LOST; unfinished operations end with the state and error of `lost`; snapshots that
        sessions published, which were in memory, are forgotten.

        Returns the number of sessions that were lost.
        """
        ...

    async def close(self) -> None: ...


def is_published(snapshot: generator_pb2.Snapshot) -> bool:
    """By a session's weights_sync; others were opened from a base model or a checkpoint."""
    return bool(snapshot.session) and not snapshot.path
