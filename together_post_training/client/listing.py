"""Whole lists, page by page."""

from __future__ import annotations

from typing import Any

from together_post_training.client.channel import Connection
from together_post_training.v1 import checkpoints_pb2, generator_pb2, sessions_pb2

_PAGE_SIZE = 1000


async def all_sessions(connection: Connection) -> list[sessions_pb2.Session]:
    """Newest first."""
    request = sessions_pb2.ListSessionsRequest(page_size=_PAGE_SIZE)
    return await _all(connection, "sessions.ListSessions", request, "sessions")


async def all_checkpoints(
    connection: Connection, session: str = ""
) -> list[checkpoints_pb2.Checkpoint]:
    """Of one session, or of all. Newest first."""
    request = checkpoints_pb2.ListCheckpointsRequest(session=session, page_size=_PAGE_SIZE)
    return await _all(connection, "checkpoints.ListCheckpoints", request, "checkpoints")


async def all_snapshots(
    connection: Connection, *, holder: str = "", session: str = ""
) -> list[generator_pb2.Snapshot]:
    """That a holder holds, or that were published from a session. By name."""
    request = generator_pb2.ListSnapshotsRequest(
        holder=holder, session=session, page_size=_PAGE_SIZE
    )
    return await _all(connection, "generator.ListSnapshots", request, "snapshots")


async def _all(connection: Connection, method: str, request: Any, field: str) -> list[Any]:
    found: list[Any] = []
    while True:
        page = await connection.call(method, request)
        found.extend(getattr(page, field))
        if not page.next_page_token:
            return found
        request.page_token = page.next_page_token
