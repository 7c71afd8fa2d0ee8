"""Directories of files that appear, change and vanish whole, for all the servers of a store.

    .data/{id}/                     a version's files; never written to again
    {session}/{folder}/{name}       a symbolic link to one of them

Everything is written and synced under .data; a checkpoint appears, is replaced and vanishes by one rename or
unlink of its link. Locks are the operating system's, so that a killed process leaves none behind:

    .data          held by whoever changes links, so that nobody replaces what they have not seen
    .data/{id}     shared by those who write or read the version; whoever has it alone may remove it
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from backend.store import sync_directory

_DATA = ".data"


class CheckpointFolder:
    """Safe to use from several threads and several processes of one machine."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._data = root / _DATA
        self._data.mkdir(parents=True, exist_ok=True)
        self.remove_orphans()

    @contextmanager
    def writing(self, relative: Path, may_replace: Callable[[Path | None], bool]) -> Iterator[Path]:
        """An empty directory; the files that the block puts into it are there afterwards, in place of any that were.

        If the block fails, nothing has changed.

        Raises:
            FileExistsError: `may_replace` says no of the version that is there at the end (None: nothing); it still is.
        """
        link = self._root / relative
        version, fd = self._new_version()
        try:
            yield version
            for path in version.iterdir():
                _sync(path)
            sync_directory(version)
            sync_directory(self._data)
            self._point(link, version, may_replace)
        finally:
            self._let_go(link, version, fd)

    def delete(self, relative: Path, expected: Path | None = None) -> bool:
        """False: there was nothing, or another version than the `expected` one."""
        link = self._root / relative
        with self._changing():
            version = self._version(link)
            if version is None or expected not in (None, version):
                return False
            link.unlink()
        sync_directory(link.parent)
        _remove_unused(version)
        return True

    @contextmanager
    def reading(self, relative: Path) -> Iterator[Path | None]:
        """The directory of the version that is there now, which stays for as long as it is read. None: nothing."""
        link = self._root / relative
        held = self._hold(link)
        if held is None:
            yield None
            return
        version, fd = held
        try:
            yield version
        finally:
            self._let_go(link, version, fd)

    def links(self, session: str | None) -> list[str]:
        """Everything there is, relative to the root. Passes over .data, and over what vanishes meanwhile."""
        return [
            f"{owner}/{folder}/{link.name}"
            for owner in ([session] if session else _names(self._root))
            if owner != _DATA
            for folder in _names(self._root / owner)
            for link in _entries(f"{self._root}/{owner}/{folder}")
            if link.is_symlink()
        ]

    def versions(self, session: str | None) -> Iterator[tuple[str, str | None]]:
        """Every link with the id of the version that is there now, which may be gone the next moment. None: its files
        are not there, or came only just now."""
        there = set(_names(self._data))
        for link in self.links(session):
            try:
                id_ = os.readlink(f"{self._root}/{link}").rpartition("/")[2]
            except OSError:
                continue
            yield link, id_ if id_ in there else None

    def directory(self, version: str) -> Path:
        return self._data / version

    def remove_orphans(self) -> None:
        """What a process that was killed had begun to write, or had not finished removing."""
        with self._changing():
            linked = {self._version(self._root / link) for link in self.links(None)}
            for path in self._data.iterdir():
                if path.is_symlink():
                    path.unlink()
                elif path not in linked:
                    _remove_unused(path)

    def _new_version(self) -> tuple[Path, int]:
        version = self._data / uuid.uuid4().hex
        with self._changing():  # Without a link, it is an orphan until it is locked.
            version.mkdir(mode=0o755)
            return version, _lock(version, fcntl.LOCK_SH)

    def _point(self, link: Path, version: Path, may_replace: Callable[[Path | None], bool]) -> None:
        link.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._data / f"{version.name}.link"
        with self._changing():
            replaced = self._version(link)
            if not may_replace(replaced):
                raise FileExistsError(link)
            temporary.symlink_to(os.path.relpath(version, link.parent))
            os.replace(temporary, link)
        sync_directory(link.parent)
        if replaced is not None:
            _remove_unused(replaced)

    def _hold(self, link: Path) -> tuple[Path, int] | None:
        """The version that is there and the lock that keeps it from being removed. None: nothing is there."""
        while (version := self._version(link)) is not None:
            try:
                fd = _lock(version, fcntl.LOCK_SH)
            except FileNotFoundError:
                if self._version(link) == version:
                    return None  # Somebody removed the files by hand.
                continue
            if self._version(link) == version:
                return version, fd
            os.close(fd)
        return None

    def _let_go(self, link: Path, version: Path, fd: int) -> None:
        """The last one to let go of a version that is not there any more removes it."""
        os.close(fd)
        if self._version(link) != version:
            _remove_unused(version)

    def _version(self, link: Path) -> Path | None:
        try:
            return self._data / Path(os.readlink(link)).name
        except OSError:
            return None

    @contextmanager
    def _changing(self) -> Iterator[None]:
        fd = _lock(self._data, fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(fd)


def _lock(directory: Path, how: int) -> int:
    """A file descriptor that holds the lock until it is closed. Raises FileNotFoundError, BlockingIOError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, how)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _remove_unused(version: Path) -> None:
    """Leaves it to those who hold it, if there are any."""
    try:
        fd = _lock(version, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return
    try:
        shutil.rmtree(version, ignore_errors=True)
    finally:
        os.close(fd)


def _names(directory: Path) -> list[str]:
    return [entry.name for entry in _entries(directory)]


def _entries(directory: Path | str) -> list[os.DirEntry[str]]:
    """None of what is no directory, or not any more."""
    try:
        with os.scandir(directory) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
