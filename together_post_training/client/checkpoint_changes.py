"""Changes of checkpoints that are made once, also where the answer was lost and the call is repeated.

The repetition finds the change made, and the server refuses to make it twice; that is then the answer.
"""

from __future__ import annotations

from together_post_training.client.channel import Connection
from together_post_training.client.checkpoint_files import get_checkpoint
from together_post_training.errors import Reason
from together_post_training.v1 import checkpoints_pb2 as pb


async def publish(connection: Connection, path: str) -> pb.Checkpoint:
    """Raises CHECKPOINT_NOT_FOUND, ALREADY_PUBLIC."""
    published = await connection.call(
        "checkpoints.PublishCheckpoint",
        pb.PublishCheckpointRequest(path=path),
        done=Reason.ALREADY_PUBLIC,
    )
    return published or await get_checkpoint(connection, path)


async def unpublish(connection: Connection, path: str) -> pb.Checkpoint:
    """Raises CHECKPOINT_NOT_FOUND, NOT_PUBLIC."""
    unpublished = await connection.call(
        "checkpoints.UnpublishCheckpoint",
        pb.UnpublishCheckpointRequest(path=path),
        done=Reason.NOT_PUBLIC,
    )
    return unpublished or await get_checkpoint(connection, path)


async def delete(connection: Connection, path: str) -> None:
    """Raises CHECKPOINT_NOT_FOUND."""
    await connection.call(
        "checkpoints.DeleteCheckpoint",
        pb.DeleteCheckpointRequest(path=path),
        done=Reason.CHECKPOINT_NOT_FOUND,
    )
