"""A journal that lives as long as its process: for tests, and for servers that need not survive anything."""

from __future__ import annotations

from collections.abc import Sequence

from backend.operations.ended import contiguous, end, is_ended, without_result
from backend.operations.journal import OperationEntry, SessionEntry, is_published
from together_post_training.v1 import generator_pb2, operations_pb2, sessions_pb2


class MemoryJournal:
    """See `backend.operations.journal.Journal`."""

    def __init__(self) -> None:
        self._sessions: dict[str, SessionEntry] = {}
        self._operations: dict[str, dict[int, OperationEntry]] = {}
        self._requests: dict[str, dict[int, bytes]] = {}
        self._snapshots: dict[str, generator_pb2.Snapshot] = {}

    async def put_session(self, entry: SessionEntry) -> None:
        self._sessions[entry.session.id] = _copy_session(entry)

    async def get_session(self, session: str) -> SessionEntry | None:
        entry = self._sessions.get(session)
        return None if entry is None else _copy_session(entry)

    async def list_sessions(self) -> Sequence[SessionEntry]:
        return [_copy_session(entry) for entry in reversed(self._sessions.values())]

    async def add_operation(
        self, session: str, sequence: int, entry: OperationEntry, request: bytes
    ) -> None:
        self._operations.setdefault(session, {})[sequence] = _copy_operation(entry)
        if request:
            self._requests.setdefault(session, {})[sequence] = request

    async def finish_operation(
        self,
        session: str,
        sequence: int,
        operation: operations_pb2.Operation,
        policy_version: int | None,
    ) -> None:
        digest = self._operations[session][sequence].digest
        entry = OperationEntry(operation=operation, digest=digest)
        self._operations[session][sequence] = _copy_operation(entry)
        if policy_version is not None:
            self._sessions[session].session.policy_version = policy_version

    async def get_operation(self, session: str, sequence: int) -> OperationEntry | None:
        entry = self._operations.get(session, {}).get(sequence)
        return None if entry is None else _copy_operation(entry)

    async def list_operations(
        self, session: str, before: int, count: int
    ) -> Sequence[operations_pb2.Operation]:
        kept = self._operations.get(session, {})
        numbers = sorted((n for n in kept if n < before), reverse=True)[:count]
        return [without_result(kept[n].operation) for n in numbers]

    async def requests(self, session: str) -> Sequence[tuple[int, bytes]]:
        return sorted(self._requests.get(session, {}).items())

    async def forget_requests(self, session: str) -> None:
        self._requests.pop(session, None)

    async def put_snapshot(self, snapshot: generator_pb2.Snapshot) -> None:
        copy = generator_pb2.Snapshot()
        copy.CopyFrom(snapshot)
        self._snapshots[snapshot.name] = copy

    async def list_snapshots(self) -> Sequence[generator_pb2.Snapshot]:
        return list(self._snapshots.values())

    async def delete_snapshot(self, name: str) -> None:
        self._snapshots.pop(name, None)

    async def recover(self, lost: operations_pb2.Operation, now: float) -> int:
        running = [
            entry.session
            for entry in self._sessions.values()
            if entry.session.state == sessions_pb2.SESSION_STATE_RUNNING
        ]
        for session in running:
            session.state = sessions_pb2.SESSION_STATE_LOST
            session.last_sequence = contiguous(sorted(self._operations.get(session.id, ())))
            self._requests.pop(session.id, None)
        for operations in self._operations.values():
            for entry in operations.values():
                if not is_ended(entry.operation):
                    end(entry.operation, lost, now)
        for name, snapshot in list(self._snapshots.items()):
            if is_published(snapshot):
                del self._snapshots[name]
        return len(running)

    async def close(self) -> None:
        pass


def _copy_session(entry: SessionEntry) -> SessionEntry:
    copy = sessions_pb2.Session()
    copy.CopyFrom(entry.session)
    return SessionEntry(session=copy, digest=entry.digest)


def _copy_operation(entry: OperationEntry) -> OperationEntry:
    copy = operations_pb2.Operation()
    copy.CopyFrom(entry.operation)
    return OperationEntry(operation=copy, digest=entry.digest)
