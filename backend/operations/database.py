"""SQLite on a thread of its own: jobs are queued, and those that wait together are committed together."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from together_post_training.errors import PostTrainingError, Reason, fail

T = TypeVar("T")
Durability = Literal["process", "machine"]

_MAX_BATCH = 256
_BUSY_TIMEOUT_MS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """statements: what an empty database is made with. version: raised whenever they change; 1 or more."""

    version: int
    statements: str


class Database:
    """Runs functions of a connection, one at a time, each in a savepoint of its own.

    durability "process": what was committed survives the death of the process. "machine": also that of the
    machine, at the price of an fsync for each commit.
    """

    def __init__(self, path: Path, durability: Durability, schema: Schema) -> None:
        """Raises PostTrainingError UNAVAILABLE for a file of another version."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._connection = _connect(path, durability, schema)
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    async def call(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Returns when what the function wrote is committed.

        Raises:
            PostTrainingError: RESOURCE_EXHAUSTED when the disk is full; nothing was written then.
        """
        job = _Job(function, asyncio.get_running_loop())
        self._jobs.put(job)
        return await job.future

    async def close(self) -> None:
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        while True:
            batch = self._next_batch()
            jobs = [job for job in batch if job is not None]
            if jobs:
                self._commit(jobs)
            if len(jobs) < len(batch):
                break
        self._connection.close()

    def _next_batch(self) -> list[_Job | None]:
        batch = [self._jobs.get()]
        while len(batch) < _MAX_BATCH:
            try:
                batch.append(self._jobs.get_nowait())
            except queue.Empty:
                break
        return batch

    def _commit(self, jobs: list[_Job]) -> None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for job in jobs:
                job.run(self._connection)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            for job in jobs:
                job.error = as_failure(error)
        for job in jobs:
            job.deliver()


class _Job:
    def __init__(self, function: Callable, loop: asyncio.AbstractEventLoop) -> None:
        self.function = function
        self.loop = loop
        self.future: asyncio.Future = loop.create_future()
        self.value: object = None
        self.error: Exception | None = None

    def run(self, connection: sqlite3.Connection) -> None:
        connection.execute("SAVEPOINT job")
        try:
            self.value = self.function(connection)
        except Exception as error:
            if not connection.in_transaction:
                raise  # SQLite has given up the whole commit: the disk is full or broken.
            self.error = as_failure(error)
            connection.execute("ROLLBACK TO job")
        connection.execute("RELEASE job")

    def deliver(self) -> None:
        # RuntimeError: the loop was closed, so nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.value)


def as_failure(error: Exception) -> Exception:
    """A full disk as RESOURCE_EXHAUSTED; anything else as it is."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, sqlite3.Error):
        is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    if not is_full or isinstance(error, PostTrainingError):
        return error
    return fail(
        Reason.RESOURCE_EXHAUSTED,
        f"The server's store is full ({error}); nothing was accepted. Free some space and send the request again.",
    )


def _connect(path: Path, durability: Durability, schema: Schema) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}")
        is_new = _check_version(connection, path, schema.version)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={'FULL' if durability == 'machine' else 'NORMAL'}")
        if is_new:
            version = f"PRAGMA user_version = {schema.version};"
            connection.executescript(f"BEGIN; {schema.statements} {version} COMMIT;")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_version(connection: sqlite3.Connection, path: Path, expected: int) -> bool:
    """Whether the database is empty."""
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (num_entries,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.DatabaseError as error:
        raise _incompatible(path, f"cannot be read ({error})", expected) from None
    if num_entries and version != expected:
        raise _incompatible(path, f"has the version {version}", expected)
    return not num_entries


def _incompatible(path: Path, what: str, expected: int) -> PostTrainingError:
    return fail(
        Reason.UNAVAILABLE,
        f"{path} {what}; this server reads and writes version {expected}. Start the release of together-post-training "
        f"that made it, or move {path.parent} away: the results of earlier operations go with it, checkpoints stay.",
        path=path,
        expected=expected,
    )
