"""Where downloads end up: written beside it, and put in place by one rename."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from together_post_training.cli.client import CommandError
from together_post_training.client import tar

_PIECE_BYTES = 1024 * 1024


def check_free(target: Path, *, force: bool) -> None:
    """Raises CommandError where something is, that may not be replaced."""
    if os.path.lexists(target) and not force:
        raise CommandError(
            f"{target} exists already: choose another place with --output or --archive, or give --force to replace it."
        )


@contextmanager
def held_scratch(target: Path) -> Iterator[Path]:
    """The directory that downloads to `target` go through: what an earlier one left is still in it.

    Raises:
        CommandError: another process downloads to the same place, or somebody else made the directory.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.parent / f".{target.name}.partial"
    scratch.mkdir(exist_ok=True)
    there = scratch.lstat()
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid():
        raise CommandError(
            f"{scratch} is not a directory of yours: remove it, or download elsewhere."
        )
    descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"Another process is downloading to {target}.") from None
        yield scratch
    finally:
        os.close(descriptor)


def remove_strangers(scratch: Path, names: set[str]) -> None:
    """What an earlier download left of other files."""
    for path in scratch.iterdir():
        if path.name not in names:
            _remove(path)


def put_directory(scratch: Path, target: Path, *, force: bool) -> None:
    check_free(target, force=force)
    _sync(scratch)
    if os.path.lexists(target):
        old = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.old"
        os.rename(target, old)
        os.rename(scratch, target)
        _remove(old)
    else:
        os.rename(scratch, target)
    _sync(target.parent)


def put_archive(scratch: Path, target: Path, time_s: float, *, force: bool) -> None:
    """The files at the top of a tar archive, which depends on nothing but them and `time_s` (since 1970)."""
    # Inside, so that nothing else is left when this is killed.
    whole = scratch / ".archive"
    paths = sorted(path for path in scratch.iterdir() if path != whole)
    with open(whole, "wb") as out:
        for piece in tar.pieces((_entry(path, time_s), _read(path)) for path in paths):
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
    check_free(target, force=force)
    if target.is_dir():
        raise CommandError(f"{target} is a directory: --archive names a file.")
    os.replace(whole, target)
    _sync(target.parent)
    shutil.rmtree(scratch)


def _entry(path: Path, time_s: float) -> tar.Entry:
    return tar.Entry(name=path.name, size_bytes=path.stat().st_size, time_s=int(time_s))


def _read(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def _remove(path: Path) -> None:
    """Never what a link points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
