"""What RestClient asks the server, as coroutines for the background loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Any, TypeVar

from tinker import types

from tinker_compat.conversion import set_fields
from tinker_compat.errors import to_status_error
from tinker_compat.holder import Holder
from tinker_compat.response_types import (
    CheckpointArchiveUrlResponse,
    ExternalWeightsUrlsResponse,
    WhoamiResponse,
    respond,
)
from tinker_compat.rest_conversion import (
    capabilities_from,
    checkpoint_from,
    identity,
    sampler_from,
    storage_usage_from,
    training_run_from,
    ttl_from,
    weights_info_from,
)
from tinker_compat.run_records import (
    ClientRecord,
    RunRecord,
    check_access_scope,
    client_id,
    clients_from,
    page,
    paged,
    runs_from,
)
from tinker_compat.session_search import search
from together_post_training.client import checkpoint_changes
from together_post_training.client.channel import Connection
from together_post_training.client.checkpoint_files import get_checkpoint
from together_post_training.client.downloads import downloads
from together_post_training.client.listing import all_checkpoints, all_sessions, all_snapshots
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.v1 import (
    catalog_pb2,
    checkpoints_pb2,
    generator_pb2,
    sessions_pb2,
)

T = TypeVar("T")


async def answered(call: Coroutine[Any, Any, T]) -> T:
    """Raises what the server says as the exception of its HTTP status, whatever it is."""
    try:
        return await call
    except PostTrainingError as error:
        raise to_status_error(error) from error


async def get_server_capabilities(connection: Connection) -> types.GetServerCapabilitiesResponse:
    reply = await connection.call("catalog.ListModels", catalog_pb2.ListModelsRequest())
    return capabilities_from(reply)


async def whoami(connection: Connection) -> WhoamiResponse:
    """Asks, so that a server that refuses the key says so."""
    await connection.call("catalog.GetServerInfo", catalog_pb2.GetServerInfoRequest())
    return identity()


async def get_training_run(
    connection: Connection, training_run_id: str, access_scope: str
) -> types.TrainingRun:
    check_access_scope(access_scope)
    return training_run_from(await _run(connection, training_run_id))


async def list_training_runs(
    connection: Connection, limit: int, offset: int, access_scope: str
) -> types.TrainingRunsResponse:
    check_access_scope(access_scope)
    limit, offset = page(limit, offset, 20)
    runs = await _runs(connection)
    shown = [training_run_from(run) for run in paged(runs, limit, offset)]
    cursor = types.Cursor(offset=offset, limit=limit, total_count=len(runs))
    return types.TrainingRunsResponse(training_runs=shown, cursor=cursor)


async def list_checkpoints(
    connection: Connection, training_run_id: str
) -> types.CheckpointsListResponse:
    run = await _run(connection, training_run_id)
    return types.CheckpointsListResponse(checkpoints=[checkpoint_from(c) for c in run.checkpoints])


async def list_user_checkpoints(
    connection: Connection, limit: int, offset: int
) -> types.CheckpointsListResponse:
    limit, offset = page(limit, offset, 100)
    found = await all_checkpoints(connection)
    shown = [checkpoint_from(checkpoint) for checkpoint in paged(found, limit, offset)]
    cursor = types.Cursor(offset=offset, limit=limit, total_count=len(found))
    return types.CheckpointsListResponse(checkpoints=shown, cursor=cursor)


async def get_weights_info(connection: Connection, tinker_path: str) -> types.WeightsInfoResponse:
    return weights_info_from(await get_checkpoint(connection, tinker_path))


async def delete_checkpoint(connection: Connection, path: str) -> None:
    await checkpoint_changes.delete(connection, path)


async def publish_checkpoint(connection: Connection, path: str) -> None:
    await checkpoint_changes.publish(connection, path)


async def unpublish_checkpoint(connection: Connection, path: str) -> None:
    await checkpoint_changes.unpublish(connection, path)


async def set_checkpoint_ttl(connection: Connection, path: str, ttl_seconds: int | None) -> None:
    request = checkpoints_pb2.SetCheckpointTtlRequest(path=path, ttl=ttl_from(ttl_seconds))
    await connection.call("checkpoints.SetCheckpointTtl", request)


def copy_weights(holder: Holder, path: str, ttl_seconds: int | None) -> Coroutine[Any, Any, str]:
    """Into a new training run of this client's. What is no path or time to live is raised at the call."""
    request = checkpoints_pb2.CopyCheckpointRequest(ttl=ttl_from(ttl_seconds))
    set_fields(request, path=path, session=holder.new_training_id())
    return _copy(holder.connection, request)


async def _copy(connection: Connection, request: checkpoints_pb2.CopyCheckpointRequest) -> str:
    copied = await connection.call("checkpoints.CopyCheckpoint", request)
    return copied.path


async def get_archive_url(connection: Connection, path: str) -> CheckpointArchiveUrlResponse:
    await get_checkpoint(connection, path)
    link = downloads().offer_archive(connection, path)
    return respond(CheckpointArchiveUrlResponse, url=link.url, expires=_time(link.expire_time_s))


async def get_external_weights_urls(
    connection: Connection, path: str
) -> ExternalWeightsUrlsResponse:
    checkpoint = await get_checkpoint(connection, path)
    links = {
        file.name: downloads().offer_file(connection, path, file.name) for file in checkpoint.files
    }
    first_end_s = min(link.expire_time_s for link in links.values())
    return respond(
        ExternalWeightsUrlsResponse,
        urls={name: link.url for name, link in links.items()},
        expires=_time(first_end_s),
    )


async def get_sampler(connection: Connection, sampler_id: str) -> types.GetSamplerResponse:
    request = generator_pb2.GetSnapshotRequest(name=sampler_id)
    return sampler_from(await connection.call("generator.GetSnapshot", request))


async def list_sessions(
    connection: Connection, limit: int, offset: int, access_scope: str
) -> types.ListSessionsResponse:
    check_access_scope(access_scope)
    limit, offset = page(limit, offset, 20)
    clients = clients_from(await _runs(connection))
    return types.ListSessionsResponse(sessions=[c.id for c in paged(clients, limit, offset)])


async def get_session(
    connection: Connection, session_id: str, access_scope: str, own_id: str
) -> types.GetSessionResponse:
    """`own_id`: of the client that asks, which is there whatever it has made yet."""
    check_access_scope(access_scope)
    if not session_id:  # On the wire, no holder asks for everybody's.
        raise _unknown_client(session_id)
    client = await _client(connection, session_id)
    runs = client.runs if client is not None else ()
    held, *published = await asyncio.gather(
        all_snapshots(connection, holder=session_id),
        *(all_snapshots(connection, session=run.id) for run in runs),
    )
    samplers = {snapshot.name for snapshot in held}
    # The live one is there whether or not somebody samples from it.
    samplers |= {one.name for snapshots in published for one in snapshots if not one.is_live}
    if session_id == own_id:
        # The server may not have heard of the newest yet.
        samplers |= connection.holds.names()
    if client is None and not samplers and session_id != own_id:
        raise _unknown_client(session_id)
    # Older GetSessionResponses leave out the fields they do not know.
    return types.GetSessionResponse(
        training_run_ids=[run.id for run in reversed(runs)],
        sampler_ids=sorted(samplers),
        user_metadata=(client.user_metadata or None) if client else None,
        display_name=(client.display_name or None) if client else None,
    )


async def search_sessions(connection: Connection, request: Any) -> Any:
    return search(clients_from(await _runs(connection)), request)


async def get_storage_usage(connection: Connection) -> Any:
    return storage_usage_from(await all_checkpoints(connection))


async def _runs(connection: Connection) -> list[RunRecord]:
    """All. The sessions come first: what is saved meanwhile is of one of them, or of a later one."""
    sessions = await all_sessions(connection)
    return runs_from(sessions, await all_checkpoints(connection))


async def _run(connection: Connection, run_id: str) -> RunRecord:
    """Raises SESSION_NOT_FOUND for one that has neither a session nor a checkpoint."""
    unknown: PostTrainingError | None = None
    session: sessions_pb2.Session | None = None
    try:
        request = sessions_pb2.GetSessionRequest()
        set_fields(request, id=run_id)
        session = await connection.call("sessions.GetSession", request)
    except PostTrainingError as error:
        if error.reason is not Reason.SESSION_NOT_FOUND:
            raise
        unknown = error
    # On the wire, no id asks for everybody's.
    checkpoints = await all_checkpoints(connection, run_id) if run_id else []
    if session is None and not checkpoints:
        assert unknown is not None
        raise unknown
    return RunRecord(id=run_id, session=session, checkpoints=tuple(checkpoints))


async def _client(connection: Connection, session_id: str) -> ClientRecord | None:
    """None: it has no training run."""
    runs = [run for run in await _runs(connection) if client_id(run.id) == session_id]
    return ClientRecord(id=session_id, runs=tuple(runs)) if runs else None


def _unknown_client(session_id: str) -> PostTrainingError:
    return fail(
        Reason.SESSION_NOT_FOUND,
        f"Unknown session {session_id!r}: no client of that id has a training run, checkpoint or sampler here.",
        session=session_id,
    )


def path_of(training_run_id: str, checkpoint_id: str) -> str:
    """`checkpoint_id`: <kind>/<name>."""
    return f"tinker://{training_run_id}/{checkpoint_id}"


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
