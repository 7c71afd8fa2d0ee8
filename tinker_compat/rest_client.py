"""RestClient: what the server has. Training runs, sessions and checkpoints; nothing here trains or samples."""

from __future__ import annotations

import os
import warnings
from collections.abc import Coroutine
from datetime import date, datetime
from typing import Any, Literal, NoReturn, TypeVar

import tinker
from tinker import types

from tinker_compat import rest_calls
from tinker_compat.errors import refuse
from tinker_compat.futures import OperationFuture
from tinker_compat.holder import Holder, shared_holder
from tinker_compat.response_types import (
    CheckpointArchiveUrlResponse,
    ExternalWeightsUrlsResponse,
    WhoamiResponse,
    require_type,
)
from tinker_compat.rest_conversion import checkpoint_path
from tinker_compat.training_client import check_access_token

T = TypeVar("T")
AccessScope = Literal["owned", "accessible"]


class RestClient:
    """Every method returns a future at once; its `_async` twin is a coroutine that returns the result.

    There are no accounts: every run and checkpoint on the server is the caller's, whatever the `access_scope`. A wrong
    `tinker_path` is a ValueError at the call. What the server refuses is raised by the future: NotFoundError for what
    is not there, BadRequestError for a value that it does not take, InternalServerError where it failed itself.

    Args:
        _holder: a ServiceClient's.
        base_url, api_key: as ServiceClient's. Clients made with the same ones share a connection, which stays open as
            long as the process lives.

    Raises:
        ValueError: for a holder together with one of the others, or an address that is none.
        TinkerError: for a key that cannot be sent.
    """

    def __init__(
        self,
        _holder: Holder | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        if _holder is None:
            self.holder = shared_holder(base_url, api_key)
        elif base_url is None and api_key is None:
            self.holder = _holder
        else:
            raise ValueError(
                "RestClient takes a holder, which has an address and a key, or base_url and api_key, not both."
            )

    def get_telemetry(self) -> None:
        """Nothing is collected."""

    def get_server_capabilities(self) -> OperationFuture[types.GetServerCapabilitiesResponse]:
        """The models that the server serves."""
        return self._start(rest_calls.get_server_capabilities(self._connection))

    def whoami(self) -> OperationFuture[WhoamiResponse]:
        """The same for everybody: this service has no accounts."""
        return self._start(rest_calls.whoami(self._connection))

    # Training runs

    def get_training_run(
        self, training_run_id: str, access_scope: AccessScope = "owned"
    ) -> OperationFuture[types.TrainingRun]:
        """By a TrainingClient's `model_id`."""
        return self._start(
            rest_calls.get_training_run(self._connection, training_run_id, access_scope)
        )

    async def get_training_run_async(
        self, training_run_id: str, access_scope: AccessScope = "owned"
    ) -> types.TrainingRun:
        return await self.get_training_run(training_run_id, access_scope)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> OperationFuture[types.TrainingRun]:
        """The run that a checkpoint belongs to. `user_metadata` is the run's, not the checkpoint's."""
        return self.get_training_run(checkpoint_path(tinker_path).session, access_scope)

    async def get_training_run_by_tinker_path_async(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> types.TrainingRun:
        return await self.get_training_run_by_tinker_path(tinker_path, access_scope)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> OperationFuture[types.TrainingRunsResponse]:
        """Newest first. `cursor.total_count` is the number of all runs. `project_id` is ignored with a warning."""
        _warn_of_project("project_id", project_id)
        return self._start(
            rest_calls.list_training_runs(self._connection, limit, offset, access_scope)
        )

    async def list_training_runs_async(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> types.TrainingRunsResponse:
        return await self.list_training_runs(limit, offset, access_scope, project_id)

    # Checkpoints

    def list_checkpoints(
        self, training_run_id: str
    ) -> OperationFuture[types.CheckpointsListResponse]:
        """A run's, newest first."""
        return self._start(rest_calls.list_checkpoints(self._connection, training_run_id))

    async def list_checkpoints_async(self, training_run_id: str) -> types.CheckpointsListResponse:
        return await self.list_checkpoints(training_run_id)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0
    ) -> OperationFuture[types.CheckpointsListResponse]:
        """All runs', newest first. `cursor.total_count` is the number of all checkpoints."""
        return self._start(rest_calls.list_user_checkpoints(self._connection, limit, offset))

    async def list_user_checkpoints_async(
        self, limit: int = 100, offset: int = 0
    ) -> types.CheckpointsListResponse:
        return await self.list_user_checkpoints(limit, offset)

    def get_weights_info_by_tinker_path(
        self, tinker_path: str
    ) -> OperationFuture[types.WeightsInfoResponse]:
        """What a client that loads the checkpoint has to be like."""
        return self._start(rest_calls.get_weights_info(self._connection, tinker_path))

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> OperationFuture[None]:
        """`checkpoint_id`: as listed, e.g. "weights/0001"."""
        path = rest_calls.path_of(training_run_id, checkpoint_id)
        return self._start(rest_calls.delete_checkpoint(self._connection, path))

    async def delete_checkpoint_async(self, training_run_id: str, checkpoint_id: str) -> None:
        await self.delete_checkpoint(training_run_id, checkpoint_id)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> OperationFuture[None]:
        path = str(checkpoint_path(tinker_path))
        return self._start(rest_calls.delete_checkpoint(self._connection, path))

    async def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await self.delete_checkpoint_from_tinker_path(tinker_path)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> OperationFuture[None]:
        """Marks it as one that others may read. ConflictError if it is."""
        path = str(checkpoint_path(tinker_path))
        return self._start(rest_calls.publish_checkpoint(self._connection, path))

    async def publish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await self.publish_checkpoint_from_tinker_path(tinker_path)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> OperationFuture[None]:
        """ConflictError if it is not published."""
        path = str(checkpoint_path(tinker_path))
        return self._start(rest_calls.unpublish_checkpoint(self._connection, path))

    async def unpublish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await self.unpublish_checkpoint_from_tinker_path(tinker_path)

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> OperationFuture[None]:
        """It expires so many seconds from now; None: never."""
        path = str(checkpoint_path(tinker_path))
        return self._start(rest_calls.set_checkpoint_ttl(self._connection, path, ttl_seconds))

    async def set_checkpoint_ttl_from_tinker_path_async(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> None:
        await self.set_checkpoint_ttl_from_tinker_path(tinker_path, ttl_seconds)

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> OperationFuture[str]:
        """Copies a checkpoint into a training run of its own; the future has the copy's path.

        The project must be named, as in Tinker's SDK, and is then ignored with a warning.

        Raises:
            ValueError: without a project, here or in TINKER_PROJECT_ID.
        """
        project = destination_project_id or os.environ.get("TINKER_PROJECT_ID")
        if not project:
            raise ValueError("Provide destination_project_id or set TINKER_PROJECT_ID")
        _warn_of_project("destination_project_id", project)
        check_access_token(weights_access_token, stacklevel=3)
        return self._start(rest_calls.copy_weights(self.holder, path, ttl_seconds))

    async def copy_weights_async(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> str:
        return await self.copy_weights(
            path,
            destination_project_id,
            ttl_seconds=ttl_seconds,
            weights_access_token=weights_access_token,
        )

    # Downloads

    def get_checkpoint_archive_url(
        self, training_run_id: str, checkpoint_id: str
    ) -> OperationFuture[CheckpointArchiveUrlResponse]:
        """A link to a tar of the checkpoint's files, for programs on this machine.

        The response has `url`, plain HTTP on 127.0.0.1, and `expires`, a day from now. This process answers it: the
        link ends with the process. Tinker has dropped this method; scripts have not.
        """
        path = rest_calls.path_of(training_run_id, checkpoint_id)
        return self._start(rest_calls.get_archive_url(self._connection, path))

    async def get_checkpoint_archive_url_async(
        self, training_run_id: str, checkpoint_id: str
    ) -> CheckpointArchiveUrlResponse:
        return await self.get_checkpoint_archive_url(training_run_id, checkpoint_id)

    def get_checkpoint_archive_url_from_tinker_path(
        self, tinker_path: str
    ) -> OperationFuture[CheckpointArchiveUrlResponse]:
        """See `get_checkpoint_archive_url`."""
        path = str(checkpoint_path(tinker_path))
        return self._start(rest_calls.get_archive_url(self._connection, path))

    async def get_checkpoint_archive_url_from_tinker_path_async(
        self, tinker_path: str
    ) -> CheckpointArchiveUrlResponse:
        return await self.get_checkpoint_archive_url_from_tinker_path(tinker_path)

    def get_external_weights_urls(
        self, tinker_path: str
    ) -> OperationFuture[ExternalWeightsUrlsResponse]:
        """A link for each file of what `save_weights_external` saved; see `get_checkpoint_archive_url`.

        Raises:
            ValueError: for a checkpoint of another kind.
        """
        path = checkpoint_path(tinker_path)
        if path.folder != "external_weights":
            raise ValueError(
                "get_external_weights_urls takes what save_weights_external saved, "
                f"tinker://<training run id>/external_weights/<name>, got {tinker_path!r}."
            )
        return self._start(rest_calls.get_external_weights_urls(self._connection, str(path)))

    async def get_external_weights_urls_async(
        self, tinker_path: str
    ) -> ExternalWeightsUrlsResponse:
        return await self.get_external_weights_urls(tinker_path)

    # Sessions and samplers

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> OperationFuture[types.GetSessionResponse]:
        """What a ServiceClient has made: its training runs, and the samplers that it holds or that came from them."""
        return self._start(
            rest_calls.get_session(
                self._connection, session_id, access_scope, self.holder.get_session_id()
            )
        )

    async def get_session_async(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> types.GetSessionResponse:
        return await self.get_session(session_id, access_scope)

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> OperationFuture[types.ListSessionsResponse]:
        """Ids of ServiceClients that have training runs, newest first."""
        return self._start(rest_calls.list_sessions(self._connection, limit, offset, access_scope))

    async def list_sessions_async(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> types.ListSessionsResponse:
        return await self.list_sessions(limit, offset, access_scope)

    def search_sessions(self, request: Any) -> OperationFuture[Any]:
        """A page of sessions, newest first. `project_ids` is ignored with a warning; a status of "client_finished" is
        refused: the server does not record how clients ended."""
        require_type("SessionSearchRequest", "search_sessions")
        warnings.warn(
            "search_sessions is experimental in Tinker's SDK, and may change with it.",
            tinker.ExperimentalWarning,
            stacklevel=2,
        )
        _warn_of_project("project_ids", request.project_ids)
        return self._start(rest_calls.search_sessions(self._connection, request))

    def assign_session_project(self, session_id: str, project_id: str) -> OperationFuture[None]:
        refuse(
            "assign_session_project is not supported: this service has no projects. To find sessions again, give "
            "ServiceClient a display_name or user_metadata and use search_sessions."
        )

    async def assign_session_project_async(self, session_id: str, project_id: str) -> None:
        await self.assign_session_project(session_id, project_id)

    def export_session_trace(self, session_id: str) -> OperationFuture[str]:
        refuse(
            "export_session_trace is not supported: this server records no traces. OperationService.ListOperations "
            "tells over gRPC when each operation of a run was made, started and ended."
        )

    async def export_session_trace_async(self, session_id: str) -> str:
        return await self.export_session_trace(session_id)

    def get_sampler(self, sampler_id: str) -> OperationFuture[types.GetSamplerResponse]:
        """`model_path` is the checkpoint that it was opened from, if any."""
        return self._start(rest_calls.get_sampler(self._connection, sampler_id))

    async def get_sampler_async(self, sampler_id: str) -> types.GetSamplerResponse:
        return await self.get_sampler(sampler_id)

    # What an organisation's administrator asks

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> OperationFuture[Any]:
        """Number and size of all checkpoints; without prices. `project_id` is ignored with a warning."""
        require_type(
            "CurrentCheckpointStorageUsageResponse", "get_current_checkpoint_storage_usage"
        )
        _warn_of_project("project_id", project_id)
        return self._start(rest_calls.get_storage_usage(self._connection))

    async def get_current_checkpoint_storage_usage_async(
        self, project_id: str | None = None
    ) -> Any:
        return await self.get_current_checkpoint_storage_usage(project_id)

    def get_audit_log(
        self,
        event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all",
        day: date | None = None,
    ) -> NoReturn:
        refuse(
            "get_audit_log is not supported: this server keeps none. list_training_runs and list_user_checkpoints "
            "tell when each was made."
        )

    async def get_audit_log_async(
        self,
        event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all",
        day: date | None = None,
    ) -> NoReturn:
        self.get_audit_log(event_type, day)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> NoReturn:
        refuse(
            "get_billing_usage is not supported: a server of your own sends no bills. "
            "get_current_checkpoint_storage_usage tells what its checkpoints take."
        )

    async def get_billing_usage_async(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> NoReturn:
        self.get_billing_usage(starting_on, ending_before)

    @property
    def _connection(self) -> Any:
        return self.holder.connection

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> OperationFuture[T]:
        try:
            return self.holder.start(rest_calls.answered(coroutine))
        except RuntimeError:
            coroutine.close()
            raise


def _warn_of_project(name: str, value: Any) -> None:
    if value is not None:
        warnings.warn(f"{name}={value!r} is ignored: this service has no projects.", stacklevel=3)
