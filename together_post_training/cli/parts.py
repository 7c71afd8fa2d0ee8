"""The files of a checkpoint, fetched one after the other, each going on where it broke off."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from together_post_training.cli.client import CommandError
from together_post_training.client.channel import Connection
from together_post_training.client.checkpoint_files import parts_of_file
from together_post_training.v1 import checkpoints_pb2 as pb

# (file name, bytes that are there)
Report = Callable[[str, int], None]


async def fetch_all(
    connection: Connection,
    path: str,
    files: Sequence[pb.CheckpointFile],
    directory: Path,
    report: Report,
) -> None:
    """What is there of a file is kept, and gone on with.

    Raises:
        CommandError: what arrives is not what the server listed.
        ConnectionLostError: the server was gone for too long; what has arrived stays.
    """
    for file in files:
        target = directory / file.name
        was_there = os.path.lexists(target)
        is_whole = await _fetch(connection, path, file, target, report)
        if not is_whole and was_there:
            # It was the beginning of something else.
            is_whole = await _fetch(connection, path, file, target, report)
        if not is_whole:
            raise CommandError(
                f"{file.name} of {path} arrived with another SHA-256 than the server lists: it was replaced meanwhile, "
                "or is damaged there. Nothing was written; download it again."
            )


async def _fetch(
    connection: Connection, path: str, file: pb.CheckpointFile, target: Path, report: Report
) -> bool:
    """False: the file is not what the server lists, and is removed."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    with io.FileIO(descriptor, "ab") as out:
        place = out.seek(0, os.SEEK_END)
        report(file.name, place)
        if place < file.size_bytes:
            pieces = parts_of_file(connection, path, file, place)
            async with aclosing(pieces):
                async for piece in pieces:
                    await asyncio.to_thread(_write_all, out, piece.data)
                    place += len(piece.data)
                    if place > file.size_bytes:
                        break
                    report(file.name, place)
        await asyncio.to_thread(os.fsync, out.fileno())
    if place == file.size_bytes and await asyncio.to_thread(_sha256, target) == file.sha256:
        return True
    target.unlink()
    return False


def _write_all(out: io.FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[out.write(view) :]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
