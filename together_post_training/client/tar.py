"""A tar archive that is made as it is read: its size is known before its contents are."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_BLOCK_BYTES = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file in it. time_s: since 1970."""

    name: str
    size_bytes: int
    time_s: int

    def header(self) -> bytes:
        info = tarfile.TarInfo(self.name)
        info.size, info.mtime = self.size_bytes, self.time_s
        # Takes files of any size and names of any length.
        return info.tobuf(tarfile.GNU_FORMAT)

    def padding(self) -> bytes:
        return bytes(-self.size_bytes % _BLOCK_BYTES)


def size_bytes(entries: Sequence[Entry]) -> int:
    """Of the whole archive."""
    files = (len(e.header()) + e.size_bytes + len(e.padding()) for e in entries)
    return sum(files) + len(_END)


def pieces(entries: Iterable[tuple[Entry, Iterable[bytes]]]) -> Iterator[bytes]:
    """The archive's bytes. Each entry comes with its contents, which must be as long as it says."""
    for entry, contents in entries:
        yield entry.header()
        yield from contents
        yield entry.padding()
    yield _END
