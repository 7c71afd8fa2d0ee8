"""RestClient.search_sessions, over what the server lists. Pure; reads the request by attribute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tinker import types

from tinker_compat.response_types import require_type
from tinker_compat.rest_conversion import USER_URN
from tinker_compat.run_records import ClientRecord
from together_post_training.errors import Reason, fail
from together_post_training.v1 import sessions_pb2

CALL = "search_sessions"


def search(clients: Iterable[ClientRecord], request: Any) -> Any:
    """A page of those that the request asks for. `clients`: newest first.

    Raises:
        PostTrainingError: INVALID_ARGUMENT for a status that the server keeps no record of.
    """
    response = require_type("SessionSearchResponse", CALL)
    cursor_type = require_type("SessionSearchCursor", CALL)
    wanted = _statuses(request.statuses)
    found = [
        client
        for client in clients
        if _is_named(client, request)
        and _is_owned(request.owner)
        and request.user_metadata.items() <= client.user_metadata.items()
        and (wanted is None or _status_name(client) in wanted)
        and _is_after(client, request.cursor)
    ]
    shown = found[: request.limit]
    more = len(found) > len(shown)
    cursor = (
        cursor_type(last_created_at=shown[-1].create_time, last_session_id=shown[-1].id)
        if more
        else None
    )
    return response(sessions=[_summary(client) for client in shown], next_cursor=cursor)


def _is_named(client: ClientRecord, request: Any) -> bool:
    """Either by id or by name, where both are given; the name's words in any order and case."""
    if request.session_id is None and request.display_name is None:
        return True
    if request.session_id is not None and client.id == request.session_id:
        return True
    words = (request.display_name or "").casefold().split()
    return bool(words) and all(word in client.display_name.casefold() for word in words)


def _is_owned(owner: Any) -> bool:
    return owner.type != "user" or USER_URN in owner.owner_urns


def _is_after(client: ClientRecord, cursor: Any) -> bool:
    if cursor is None or client.create_time < cursor.last_created_at:
        return True
    return client.create_time == cursor.last_created_at and client.id > cursor.last_session_id


def _statuses(queries: Iterable[Any] | None) -> set[str] | None:
    """None: any."""
    if queries is None:
        return None
    wanted = {query.type for query in queries}
    if "client_finished" in wanted:
        raise fail(
            Reason.INVALID_ARGUMENT,
            "statuses holds 'client_finished': this server does not record how clients ended. Search for 'active' or "
            "'failed' sessions, or leave statuses out.",
            field="statuses",
            value="client_finished",
        )
    return wanted


def _status_name(client: ClientRecord) -> str | None:
    """None: it has ended; how, the server does not record. Nothing is ever cancelled from outside."""
    states = {run.session.state for run in client.runs if run.session is not None}
    if sessions_pb2.SESSION_STATE_RUNNING in states:
        return "active"
    return "failed" if sessions_pb2.SESSION_STATE_LOST in states else None


def _status(client: ClientRecord) -> Any:
    match _status_name(client):
        case "active":
            return require_type("SessionActive", CALL)()
        case "failed":
            lost = next(
                run.id
                for run in client.runs
                if run.session is not None and run.session.state == sessions_pb2.SESSION_STATE_LOST
            )
            reason = require_type("SessionFailedTrainingRunReason", CALL)(training_run_id=lost)
            return require_type("SessionFailed", CALL)(
                category="internal",
                reason=reason,
                message=f"Training run {lost} was lost when the server was restarted. Its checkpoints are kept.",
            )
        case _:
            return None


def _summary(client: ClientRecord) -> Any:
    checkpoints = client.checkpoints
    return types.SessionSummary(
        session_id=client.id,
        created_at=client.create_time,
        owner=USER_URN,
        # There are no projects.
        project_id="",
        status=_status(client),
        checkpoints_count=len(checkpoints),
        display_name=client.display_name or None,
        user_metadata=client.user_metadata or None,
        checkpoint_storage_bytes=sum(checkpoint.size_bytes for checkpoint in checkpoints),
    )
