"""The directory that servers keep their work in, and the locks that give each a part of its own.

    checkpoints/            saved weights, as PEFT and transformers read them: shared by every server of the store
    server/                 the part of the server that was started by hand
    embedded-1/, -2, ...    the parts of servers that scripts start for themselves

Each part:

    journal.sqlite3         sessions, operations, results, snapshots; with -wal and -shm beside it
    operations/             requests and results too large for the database
    snapshots/              published weights that are not in memory
    handed-out/             published weights for servers of other programs to read
    lock                    held while a server uses the part
"""

from __future__ import annotations

import fcntl
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from together_post_training.errors import Reason, fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """An open store: `root` is shared, `part` is this server's alone until `close`."""

    root: Path
    part: Path
    lock_fd: int

    @property
    def journal(self) -> Path:
        return self.part / "journal.sqlite3"

    @property
    def operations(self) -> Path:
        return self.part / "operations"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def snapshots(self) -> Path:
        return self.part / "snapshots"

    @property
    def handed_out(self) -> Path:
        """Made by who needs it."""
        return self.part / "handed-out"

    def close(self) -> None:
        os.close(self.lock_fd)


def open_store(root: Path) -> Store:
    """Takes the part `server`; makes the directory where it is missing.

    Raises:
        PostTrainingError: UNAVAILABLE while another server uses it, naming that server's process; INVALID_ARGUMENT
            where there can be no such directory.
    """
    root = _make(root)
    store = _take(root, "server")
    if store is None:
        owner = _owner(root / "server")
        raise fail(
            Reason.UNAVAILABLE,
            f"The store {root} is in use by another server (process {owner}). Stop that server, or give this one "
            "another directory with --store.",
            store=root,
            process=owner,
        )
    return store


def open_embedded_store(root: Path) -> Store:
    """Takes the first of embedded-1, embedded-2, ... that no server uses."""
    root = _make(root)
    parts = (_take(root, f"embedded-{number}") for number in itertools.count(1))
    return next(store for store in parts if store is not None)


def _make(root: Path) -> Path:
    root = root.expanduser().resolve()
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"The store {root} cannot be made ({error.strerror}): give a directory that this user may write to with "
            "--store.",
            store=root,
        ) from None
    return root


def _take(root: Path, name: str) -> Store | None:
    """None: another server has it."""
    part = root / name
    part.mkdir(exist_ok=True, mode=0o700)
    fd = os.open(part / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    store = Store(root=root, part=part, lock_fd=fd)
    for folder in (store.operations, store.checkpoints, store.snapshots):
        folder.mkdir(exist_ok=True)
    return store


def _owner(part: Path) -> str:
    return (part / "lock").read_text(errors="replace").strip() or "unknown"


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
