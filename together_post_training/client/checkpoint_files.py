"""The files of a checkpoint, read over the wire piece by piece, so that none has to fit into memory.

What is no coroutine blocks: it is for threads other than the background loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, TypeVar

from together_post_training.client.channel import Connection
from together_post_training.client.loop import background_loop
from together_post_training.errors import ConnectionLostError, PostTrainingError, Reason, fail
from together_post_training.v1 import checkpoints_pb2 as pb

T = TypeVar("T")

# In a row, without a byte in between.
_ATTEMPTS = 3


async def get_checkpoint(connection: Connection, path: str) -> pb.Checkpoint:
    """With its files. Raises CHECKPOINT_NOT_FOUND."""
    return await connection.call("checkpoints.GetCheckpoint", pb.GetCheckpointRequest(path=path))


def find_checkpoint(connection: Connection, path: str) -> pb.Checkpoint:
    return _wait(get_checkpoint(connection, path))


def whole_file(connection: Connection, path: str, file: pb.CheckpointFile) -> Iterator[bytes]:
    """The pieces of a file; the last one comes only if all together are what was saved.

    Raises:
        PostTrainingError: CHECKPOINT_NOT_FOUND for one that was deleted or replaced meanwhile.
    """
    digest, held = hashlib.sha256(), b""
    for piece in part_of_file(connection, path, file, 0, file.size_bytes):
        digest.update(piece)
        yield held
        held = piece
    if digest.hexdigest() != file.sha256:
        raise _changed(path, file.name)
    yield held


def part_of_file(
    connection: Connection, path: str, file: pb.CheckpointFile, start: int, stop: int
) -> Iterator[bytes]:
    """The bytes from `start` up to, not including, `stop`."""
    parts = parts_of_file(connection, path, file, start)
    place = start
    try:
        while place < stop:
            part = _wait(anext(parts, None))
            if part is None:
                raise _changed(path, file.name)
            yield part.data[: stop - place]
            place += len(part.data)
    finally:
        _wait(parts.aclose())


async def parts_of_file(
    connection: Connection, path: str, file: pb.CheckpointFile, start: int
) -> AsyncGenerator[pb.DownloadCheckpointResponse, None]:
    """From `start` on. Where the connection breaks, goes on from there once the server answers again."""
    place, attempts_left = start, _ATTEMPTS
    while place < file.size_bytes:
        request = pb.DownloadCheckpointRequest(path=path, filename=file.name, offset=place)
        answer = connection.stream("checkpoints.DownloadCheckpoint", request)
        try:
            async with contextlib.aclosing(answer):
                async for part in answer:
                    if (part.filename, part.offset) != (file.name, place):
                        raise _changed(path, file.name)
                    place += len(part.data)
                    attempts_left = _ATTEMPTS
                    yield part
        except ConnectionLostError:
            attempts_left -= 1
            if not attempts_left:
                raise
            # Waits for the server as long as the connection's policy allows.
            found = await get_checkpoint(connection, path)
            if file not in found.files:
                raise _changed(path, file.name) from None
        else:
            return


def _wait(coroutine: Coroutine[Any, Any, T] | Any) -> T:
    async def run() -> T:
        return await coroutine

    return asyncio.run_coroutine_threadsafe(run(), background_loop().loop).result()


def _changed(path: str, name: str) -> PostTrainingError:
    return fail(
        Reason.CHECKPOINT_NOT_FOUND,
        f"{name} of checkpoint {path!r} was deleted or replaced while it was being read: start again.",
        path=path,
        file=name,
    )
