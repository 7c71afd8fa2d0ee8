"""The directory that a server keeps its work in, and the lock that keeps a second server out.

journal.sqlite3     sessions, operations, results, snapshots; with -wal and -shm beside it
operations/         requests and results too large for the database
checkpoints/        saved weights, in PEFT's format
snapshots/          published weights that are not in memory
lock                held while a server runs
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from together_post_training.errors import Reason, fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The open directory. `close` lets another server use it."""

    root: Path
    lock_fd: int

    @property
    def journal(self) -> Path:
        return self.root / "journal.sqlite3"

    @property
    def operations(self) -> Path:
        return self.root / "operations"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def snapshots(self) -> Path:
        return self.root / "snapshots"

    def close(self) -> None:
        os.close(self.lock_fd)


def open_store(root: Path) -> Store:
    """Makes the directory where it is missing and locks it.

    Raises:
        PostTrainingError: UNAVAILABLE while another server uses it, naming that server's process.
    """
    root = root.expanduser().resolve()
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise fail(
            Reason.UNAVAILABLE,
            f"The store {root} is in use by another server (process {owner}). Stop that server, or give this one "
            "another directory with --store.",
            store=root,
            process=owner,
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    store = Store(root=root, lock_fd=fd)
    for folder in (store.operations, store.checkpoints, store.snapshots):
        folder.mkdir(exist_ok=True)
    return store


def write_whole(path: Path, data: bytes, *, sync: bool) -> None:
    """The file appears whole or not at all. `sync`: it also survives the machine's failure."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)
    if sync:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
