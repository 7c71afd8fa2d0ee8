"""The journal in SQLite: small values in the database, large ones as files beside it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from backend.operations.database import Database, Durability, Schema, as_failure
from backend.operations.ended import contiguous, end, is_ended, without_result
from backend.operations.journal import OperationEntry, SessionEntry, is_published
from backend.store import write_whole
from together_post_training.v1 import generator_pb2, sessions_pb2
from together_post_training.v1 import operations_pb2 as pb

T = TypeVar("T")

MAX_INLINE_BYTES = 64 * 1024

# `result` holds a whole Operation message with its result, `header` one without; files are named by session number
# and sequence.
_SCHEMA = Schema(
    version=1,
    statements="""
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, state INTEGER NOT NULL,
    policy_version INTEGER NOT NULL, digest BLOB NOT NULL, message BLOB NOT NULL);
CREATE TABLE operations (
    session INTEGER NOT NULL, sequence INTEGER NOT NULL, is_ended INTEGER NOT NULL,
    digest BLOB NOT NULL, header BLOB NOT NULL, has_request_file INTEGER NOT NULL,
    has_result_file INTEGER NOT NULL, request BLOB, result BLOB,
    PRIMARY KEY (session, sequence));
CREATE INDEX unfinished ON operations (session) WHERE NOT is_ended;
CREATE TABLE snapshots (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, is_published INTEGER NOT NULL,
    message BLOB NOT NULL);
""",
)


class SqliteJournal:
    """See `backend.operations.journal.Journal`.

    Args:
        path: the database file.
        files: an existing directory for large requests and results.
    """

    def __init__(self, path: Path, files: Path, durability: Durability = "process") -> None:
        self._files = files
        self._sync = durability == "machine"
        self._database = Database(path, durability, _SCHEMA)
        self._numbers: dict[str, int] = {}

    async def put_session(self, entry: SessionEntry) -> None:
        session = entry.session
        row = (
            session.id,
            session.state,
            session.policy_version,
            entry.digest,
            session.SerializeToString(),
        )
        await self._database.call(
            lambda db: db.execute(
                "INSERT INTO sessions (id, state, policy_version, digest, message) VALUES (?,?,?,?,?) "
                "ON CONFLICT (id) DO UPDATE SET state = excluded.state, message = excluded.message, "
                "policy_version = excluded.policy_version, digest = excluded.digest",
                row,
            )
        )

    async def get_session(self, session: str) -> SessionEntry | None:
        query = "SELECT message, policy_version, digest FROM sessions WHERE id = ?"
        row = await self._database.call(lambda db: db.execute(query, (session,)).fetchone())
        return None if row is None else _session_entry(row)

    async def list_sessions(self) -> Sequence[SessionEntry]:
        query = "SELECT message, policy_version, digest FROM sessions ORDER BY number DESC"
        rows = await self._database.call(lambda db: db.execute(query).fetchall())
        return [_session_entry(row) for row in rows]

    async def add_operation(
        self, session: str, sequence: int, entry: OperationEntry, request: bytes
    ) -> None:
        number = await self._number(session)
        in_file = len(request) > MAX_INLINE_BYTES
        if in_file:
            await self._write_file(_file_name(number, sequence, "request"), request)
        row = (
            number,
            sequence,
            is_ended(entry.operation),
            entry.digest,
            without_result(entry.operation).SerializeToString(),
            in_file,
            False,
            request if request and not in_file else None,
        )
        await self._database.call(
            lambda db: db.execute(
                "INSERT INTO operations (session, sequence, is_ended, digest, header, has_request_file, "
                "has_result_file, request) VALUES (?,?,?,?,?,?,?,?)",
                row,
            )
        )

    async def finish_operation(
        self, session: str, sequence: int, operation: pb.Operation, policy_version: int | None
    ) -> None:
        number = await self._number(session)
        result = b""
        if operation.WhichOneof("result"):
            result = await asyncio.to_thread(operation.SerializeToString)
        in_file = len(result) > MAX_INLINE_BYTES
        if in_file:
            await self._write_file(_file_name(number, sequence, "result"), result)
        header = without_result(operation).SerializeToString()
        inline = result if result and not in_file else None

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "UPDATE operations SET is_ended = 1, header = ?, has_result_file = ?, result = ? "
                "WHERE session = ? AND sequence = ?",
                (header, in_file, inline, number, sequence),
            )
            if policy_version is not None:
                db.execute(
                    "UPDATE sessions SET policy_version = ? WHERE number = ?",
                    (policy_version, number),
                )

        await self._database.call(write)

    async def get_operation(self, session: str, sequence: int) -> OperationEntry | None:
        number = await self._number(session)
        query = (
            "SELECT header, result, has_result_file, digest FROM operations "
            "WHERE session = ? AND sequence = ?"
        )
        row = await self._database.call(lambda db: db.execute(query, (number, sequence)).fetchone())
        if row is None:
            return None
        header, result, in_file, digest = row
        if in_file:
            result = await self._read_file(_file_name(number, sequence, "result"))
        return OperationEntry(operation=pb.Operation.FromString(result or header), digest=digest)

    async def list_operations(
        self, session: str, before: int, count: int
    ) -> Sequence[pb.Operation]:
        number = await self._number(session)
        query = (
            "SELECT header FROM operations WHERE session = ? AND sequence < ? "
            "ORDER BY sequence DESC LIMIT ?"
        )
        rows = await self._database.call(
            lambda db: db.execute(query, (number, before, count)).fetchall()
        )
        return [pb.Operation.FromString(header) for (header,) in rows]

    async def requests(self, session: str) -> Sequence[tuple[int, bytes]]:
        number = await self._number(session)
        query = (
            "SELECT sequence, request FROM operations WHERE session = ? "
            "AND (request IS NOT NULL OR has_request_file) ORDER BY sequence"
        )
        rows = await self._database.call(lambda db: db.execute(query, (number,)).fetchall())
        return [
            (n, request or await self._read_file(_file_name(number, n, "request")))
            for n, request in rows
        ]

    async def forget_requests(self, session: str) -> None:
        number = await self._number(session)
        await self._database.call(lambda db: _forget_requests(db, [number]))
        await asyncio.to_thread(self._delete_request_files, number)

    async def put_snapshot(self, snapshot: generator_pb2.Snapshot) -> None:
        row = (snapshot.name, is_published(snapshot), snapshot.SerializeToString())
        await self._database.call(
            lambda db: db.execute(
                "INSERT INTO snapshots (name, is_published, message) VALUES (?,?,?) "
                "ON CONFLICT (name) DO UPDATE SET message = excluded.message",
                row,
            )
        )

    async def list_snapshots(self) -> Sequence[generator_pb2.Snapshot]:
        query = "SELECT message FROM snapshots ORDER BY number"
        rows = await self._database.call(lambda db: db.execute(query).fetchall())
        return [generator_pb2.Snapshot.FromString(message) for (message,) in rows]

    async def delete_snapshot(self, name: str) -> None:
        await self._database.call(
            lambda db: db.execute("DELETE FROM snapshots WHERE name = ?", (name,))
        )

    async def recover(self, lost: pb.Operation, now: float) -> int:
        numbers = await self._database.call(lambda db: _recover(db, lost, now))
        for number in numbers:
            await asyncio.to_thread(self._delete_request_files, number)
        return len(numbers)

    async def close(self) -> None:
        await self._database.close()

    async def _number(self, session: str) -> int:
        if session not in self._numbers:
            query = "SELECT number FROM sessions WHERE id = ?"
            row = await self._database.call(lambda db: db.execute(query, (session,)).fetchone())
            if row is None:
                return 0
            self._numbers[session] = row[0]
        return self._numbers[session]

    async def _write_file(self, name: str, data: bytes) -> None:
        def write() -> None:
            path = self._files / name
            path.parent.mkdir(exist_ok=True)
            write_whole(path, data, sync=self._sync)

        await _off_loop(write)

    async def _read_file(self, name: str) -> bytes:
        return await _off_loop((self._files / name).read_bytes)

    def _delete_request_files(self, number: int) -> None:
        for path in (self._files / str(number)).glob("*.request"):
            path.unlink(missing_ok=True)


async def _off_loop(function: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(function)
    except OSError as error:
        raise as_failure(error) from error


def _file_name(number: int, sequence: int, what: str) -> str:
    return f"{number}/{sequence}.{what}"


def _session_entry(row: tuple[bytes, int, bytes]) -> SessionEntry:
    session = sessions_pb2.Session.FromString(row[0])
    session.policy_version = row[1]
    return SessionEntry(session=session, digest=row[2])


def _forget_requests(db: sqlite3.Connection, numbers: Sequence[int]) -> None:
    for number in numbers:
        db.execute(
            "UPDATE operations SET request = NULL, has_request_file = 0 WHERE session = ?",
            (number,),
        )


def _recover(db: sqlite3.Connection, lost: pb.Operation, now: float) -> list[int]:
    """The numbers of the sessions that were lost."""
    unfinished = "SELECT session, sequence, header FROM operations WHERE NOT is_ended"
    for session, sequence, header in db.execute(unfinished).fetchall():
        operation = pb.Operation.FromString(header)
        end(operation, lost, now)
        db.execute(
            "UPDATE operations SET is_ended = 1, header = ? WHERE session = ? AND sequence = ?",
            (operation.SerializeToString(), session, sequence),
        )
    running = (sessions_pb2.SESSION_STATE_RUNNING,)
    rows = db.execute("SELECT number, message FROM sessions WHERE state = ?", running).fetchall()
    for number, message in rows:
        _lose_session(db, number, sessions_pb2.Session.FromString(message))
    numbers = [number for number, _ in rows]
    db.execute("DELETE FROM snapshots WHERE is_published")
    _forget_requests(db, numbers)
    return numbers


def _lose_session(db: sqlite3.Connection, number: int, session: sessions_pb2.Session) -> None:
    query = "SELECT sequence FROM operations WHERE session = ? ORDER BY sequence"
    session.last_sequence = contiguous(n for (n,) in db.execute(query, (number,)))
    session.state = sessions_pb2.SESSION_STATE_LOST
    db.execute(
        "UPDATE sessions SET state = ?, message = ? WHERE number = ?",
        (session.state, session.SerializeToString(), number),
    )
