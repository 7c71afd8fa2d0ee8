"""Directories of files that appear, change and vanish whole.

    .data/{id}/                     a version's files; never written to again
    {session}/{folder}/{name}       a symbolic link to one of them

Everything is written and synced under .data; a checkpoint appears, is replaced and vanishes by one rename or
unlink of its link. A version that is being read is removed when its last reader has left.
"""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from backend.store import sync_directory

_DATA = ".data"


class CheckpointFolder:
    """Safe to use from several threads of the one process that holds the store."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._data = root / _DATA
        self._data.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._readers: Counter[Path] = Counter()
        self._doomed: set[Path] = set()
        self._remove_orphans()

    def write(
        self,
        relative: Path,
        files: Mapping[str, bytes],
        may_replace: Callable[[Path], bool],
    ) -> None:
        """Puts the files there, in place of any that were.

        Raises:
            FileExistsError: `may_replace` says no of the version that is there at the end; it is still there.
        """
        version = self._data / uuid.uuid4().hex
        version.mkdir(mode=0o755)
        try:
            for name, data in files.items():
                _write_synced(version / name, data)
            sync_directory(version)
            sync_directory(self._data)
            self._point(relative, version, may_replace)
        except BaseException:
            shutil.rmtree(version, ignore_errors=True)
            raise

    def delete(self, relative: Path, expected: Path | None = None) -> bool:
        """False: there was nothing, or another version than the `expected` one."""
        link = self._root / relative
        with self._lock:
            version = self._version(link)
            if version is None or expected not in (None, version):
                return False
            link.unlink()
            sync_directory(link.parent)
            self._discard(version)
        return True

    @contextmanager
    def reading(self, relative: Path) -> Iterator[Path | None]:
        """The directory of the version that is there now, which stays for as long as it is read. None: nothing."""
        with self._lock:
            version = self._version(self._root / relative)
            if version is not None:
                self._readers[version] += 1
        try:
            yield version
        finally:
            if version is not None:
                self._leave(version)

    def links(self, session: str | None) -> list[Path]:
        """Everything there is, relative to the root."""
        pattern = f"{session or '*'}/*/*"
        return [p.relative_to(self._root) for p in self._root.glob(pattern) if p.is_symlink()]

    def _point(self, relative: Path, version: Path, may_replace: Callable[[Path], bool]) -> None:
        link = self._root / relative
        link.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._data / f"{version.name}.link"
        temporary.symlink_to(os.path.relpath(version, link.parent))
        with self._lock:
            replaced = self._version(link)
            if replaced is not None and not may_replace(replaced):
                temporary.unlink()
                raise FileExistsError(relative)
            os.replace(temporary, link)
            sync_directory(link.parent)
            if replaced is not None:
                self._discard(replaced)

    def _version(self, link: Path) -> Path | None:
        try:
            return self._data / Path(os.readlink(link)).name
        except OSError:
            return None

    def _discard(self, version: Path) -> None:
        if self._readers[version]:
            self._doomed.add(version)
        else:
            del self._readers[version]
            shutil.rmtree(version, ignore_errors=True)

    def _leave(self, version: Path) -> None:
        with self._lock:
            self._readers[version] -= 1
            if self._readers[version]:
                return
            del self._readers[version]
            if version in self._doomed:
                self._doomed.remove(version)
                shutil.rmtree(version, ignore_errors=True)

    def _remove_orphans(self) -> None:
        """What a server that was killed had begun to write, or had not finished removing."""
        linked = {self._version(self._root / relative) for relative in self.links(None)}
        for path in self._data.iterdir():
            if path.is_symlink():
                path.unlink()
            elif path not in linked:
                shutil.rmtree(path, ignore_errors=True)


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
