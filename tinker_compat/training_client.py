"""TrainingClient: one set of trainable weights on the server."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tinker import types

from tinker_compat import custom_loss, passes
from tinker_compat.client_future import ClientFuture
from tinker_compat.conversion import check_metadata, loss_config, set_fields
from tinker_compat.errors import refuse
from tinker_compat.futures import OperationFuture
from tinker_compat.loss_handle import LossHandle
from tinker_compat.optimizers import to_optim_step
from tinker_compat.response_types import SaveWeightsExternalResponse, respond
from tinker_compat.rest_conversion import ttl_from
from tinker_compat.run import Run
from tinker_compat.sampling_client import (
    BackcompatSamplingClientFuture,
    SamplingClient,
    check_retry_config,
    open_sampler,
)
from tinker_compat.tokenizer import get_tokenizer
from together_post_training.client.sampler import Sampler
from together_post_training.names import live_snapshot
from together_post_training.v1 import operations_pb2, trainer_pb2

_SYNC_TYPES = {
    "snapshot": trainer_pb2.WEIGHT_SYNC_TYPE_SYNCHRONOUS,
    "inflight": trainer_pb2.WEIGHT_SYNC_TYPE_PIPELINE,
}
Passed = OperationFuture[types.ForwardBackwardOutput]


class TrainingClient:
    """Operations take effect in the order in which they are called, whether or not anyone waits for them.

    Every operation returns a future at once; its `_async` twin is a coroutine that returns the same future. What
    Tinker's SDK checks at the call is raised at the call; what the server refuses is raised by the future.
    """

    def __init__(self, run: Run) -> None:
        self._core = run

    async def _ready(self) -> None:
        """For the twins: a client that is still a future waits here."""

    @property
    def model_id(self) -> str:
        """<session>:train:<n>, also the first part of checkpoint paths."""
        return self._core.session.id

    @property
    def holder(self) -> Any:
        return self._core.holder

    def forward(
        self,
        data: Sequence[types.Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Passed:
        """Losses and log-probabilities; leaves no gradient."""
        loss = loss_config(loss_fn, loss_fn_config)
        requests = passes.forward_requests(data, passes.split(data), loss)
        return self._core.submit(requests, passes.output)

    async def forward_async(
        self,
        data: Sequence[types.Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Passed:
        await self._ready()
        return self.forward(data, loss_fn, loss_fn_config)

    def forward_backward(
        self,
        data: Sequence[types.Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Passed:
        """As `forward`, and adds the gradient of the summed loss to what the next optim_step uses.

        Raises:
            ValueError: "No data provided".
        """
        requests = passes.forward_backward_requests(data, loss_fn, loss_fn_config)
        return self._core.submit(requests, passes.output)

    async def forward_backward_async(
        self,
        data: Sequence[types.Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Passed:
        await self._ready()
        return self.forward_backward(data, loss_fn, loss_fn_config)

    def forward_backward_custom(
        self,
        data: Sequence[types.Datum],
        loss_fn: custom_loss.LossFn | LossHandle,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> Passed:
        """A loss of your own: `loss_fn(data, logprobs) -> (loss, metrics)`, run in a thread of this process, or a
        handle from `ServiceClient.create_custom_loss`.

        `logprobs[i]` is a float32 leaf tensor of the shape of sample i's target_tokens. When the call fails, for
        whatever cause, the client refuses later requests with a RuntimeError, as Tinker's does.
        """
        _check_loss_type_input(loss_type_input)
        return custom_loss.forward_backward_custom(self._core, data, loss_fn)

    async def forward_backward_custom_async(
        self,
        data: Sequence[types.Datum],
        loss_fn: custom_loss.LossFn | LossHandle,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> Passed:
        await self._ready()
        return self.forward_backward_custom(data, loss_fn, loss_type_input=loss_type_input)

    def optim_step(
        self,
        optim_params: Any = None,
        *,
        adam_params: types.AdamParams | dict[str, float] | None = None,
    ) -> OperationFuture[types.OptimStepResponse]:
        """One step of the session's optimiser from the gradient since the last one.

        Raises:
            TypeError: for parameters that are neither an optimiser's nor a dict of AdamParams' fields.
            ValueError: for both arguments at once.
        """
        if optim_params is not None and adam_params is not None:
            raise ValueError("Specify optim_params or legacy adam_params, not both")
        request = to_optim_step(adam_params if optim_params is None else optim_params)
        return self._core.submit([request], _optim_step_response)

    async def optim_step_async(
        self,
        optim_params: Any = None,
        *,
        adam_params: types.AdamParams | dict[str, float] | None = None,
    ) -> OperationFuture[types.OptimStepResponse]:
        await self._ready()
        return self.optim_step(optim_params, adam_params=adam_params)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> OperationFuture[types.SaveWeightsResponse]:
        """Saves weights, optimiser state and step under tinker://<model id>/weights/<name>.

        A name that is taken gives ConflictError, unless `overwrite`.
        """
        request = _save_request(name, ttl_seconds, user_metadata)
        request.kind = trainer_pb2.CHECKPOINT_KIND_TRAINING
        request.overwrite = overwrite
        return self._core.submit(
            [request],
            lambda done: types.SaveWeightsResponse(
                path=done[0].save_checkpoint.path, type="save_weights"
            ),
        )

    async def save_state_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> OperationFuture[types.SaveWeightsResponse]:
        await self._ready()
        return self.save_state(name, ttl_seconds, overwrite, user_metadata)

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> OperationFuture[types.SaveWeightsForSamplerResponse]:
        """Saves weights to sample from under tinker://<model id>/sampler_weights/<name>."""
        request = _save_request(name, ttl_seconds, user_metadata)
        request.kind = trainer_pb2.CHECKPOINT_KIND_INFERENCE
        return self._core.submit(
            [request],
            lambda done: types.SaveWeightsForSamplerResponse(
                path=done[0].save_checkpoint.path, type="save_weights_for_sampler"
            ),
        )

    async def save_weights_for_sampler_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> OperationFuture[types.SaveWeightsForSamplerResponse]:
        await self._ready()
        return self.save_weights_for_sampler(name, ttl_seconds, user_metadata)

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
    ) -> OperationFuture[SaveWeightsExternalResponse]:
        """Saves weights to take elsewhere under tinker://<model id>/external_weights/<name>.

        RestClient.get_external_weights_urls gives links to the files.

        Args:
            age_encryption_recipients: public keys ("age1..."): the files are encrypted for their owners.

        Raises:
            ValueError: for an empty list of recipients.
        """
        request = _save_request(name, ttl_seconds, None)
        request.kind = trainer_pb2.CHECKPOINT_KIND_EXTERNAL
        request.age_recipients.extend(_recipients(age_encryption_recipients))
        return self._core.submit(
            [request],
            lambda done: respond(
                SaveWeightsExternalResponse,
                path=done[0].save_checkpoint.path,
                type="save_weights_external",
            ),
        )

    async def save_weights_external_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
    ) -> OperationFuture[SaveWeightsExternalResponse]:
        await self._ready()
        return self.save_weights_external(name, ttl_seconds, age_encryption_recipients)

    def load_state(
        self, path: str, weights_access_token: str | None = None
    ) -> OperationFuture[types.LoadWeightsResponse]:
        """Replaces the weights by a checkpoint's; the optimiser starts afresh."""
        return self._load(path, weights_access_token, optimizer=False)

    async def load_state_async(
        self, path: str, weights_access_token: str | None = None
    ) -> OperationFuture[types.LoadWeightsResponse]:
        await self._ready()
        return self.load_state(path, weights_access_token)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> OperationFuture[types.LoadWeightsResponse]:
        """Replaces weights, optimiser state and step: training goes on as if it had never stopped."""
        return self._load(path, weights_access_token, optimizer=True)

    async def load_state_with_optimizer_async(
        self, path: str, weights_access_token: str | None = None
    ) -> OperationFuture[types.LoadWeightsResponse]:
        await self._ready()
        return self.load_state_with_optimizer(path, weights_access_token)

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        kind: Literal["snapshot", "inflight"] = "snapshot",
    ) -> BackcompatSamplingClientFuture:
        """Publishes the current weights and returns a client that samples from exactly these, for ever.

        Args:
            kind: "inflight": the client samples from what was published last, by this call or a later one of this kind
                or the other. What it is sampling meanwhile goes on under the weights of later calls of this kind.
        """
        if name is not None:
            warnings.warn(
                f"name={name!r} has no effect: the weights are published without one. To keep them, use "
                "save_weights_for_sampler(name) and create_sampling_client(path).",
                DeprecationWarning,
                stacklevel=2,
            )
        check_retry_config(retry_config)
        if kind not in _SYNC_TYPES:
            refuse(f"kind={kind!r}: only 'snapshot' and 'inflight' are supported.")
        run = self._core
        base_model = run.session.info.base_model

        def to_client(done: list[operations_pb2.Operation]) -> SamplingClient:
            follows = kind == "inflight"
            pinned = done[0].weights_sync.snapshot
            snapshot = live_snapshot(run.session.id) if follows else pinned
            sampler = Sampler(run.session.connection, snapshot, base_model)
            return SamplingClient(run.holder, sampler, record_stability_info=record_stability_info)

        request = trainer_pb2.WeightsSyncRequest(type=_SYNC_TYPES[kind])
        published = run.submit([request], to_client)
        return BackcompatSamplingClientFuture(published)

    async def save_weights_and_get_sampling_client_async(
        self,
        name: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        kind: Literal["snapshot", "inflight"] = "snapshot",
    ) -> SamplingClient:
        await self._ready()
        return await self.save_weights_and_get_sampling_client(
            name, retry_config, record_stability_info, kind
        )

    def create_sampling_client(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> BackcompatSamplingClientFuture:
        """A client that samples from a saved checkpoint."""
        check_retry_config(retry_config)
        holder = self._core.holder
        opened = open_sampler(holder, model_path, None, record_stability_info=record_stability_info)
        return BackcompatSamplingClientFuture(holder.start(opened))

    async def create_sampling_client_async(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        await self._ready()
        return await self.create_sampling_client(model_path, retry_config, record_stability_info)

    def get_info(self) -> types.GetInfoResponse:
        """Known since the client was made: asks nobody."""
        return self._core.info

    async def get_info_async(self) -> types.GetInfoResponse:
        await self._ready()
        return self.get_info()

    def get_tokenizer(self) -> Any:
        """The base model's, as a transformers tokenizer."""
        return get_tokenizer(self._core.holder, self._core.session.info.base_model)

    def get_telemetry(self) -> None:
        """Nothing is collected."""

    def get_console_url(self) -> str:
        """The server's address and the run's id, for logs. This service has no console."""
        return self._core.holder.console_url(self.model_id)

    def _load(
        self, path: str, weights_access_token: str | None, *, optimizer: bool
    ) -> OperationFuture[types.LoadWeightsResponse]:
        check_access_token(weights_access_token)
        request = trainer_pb2.LoadCheckpointRequest()
        set_fields(request, path=path, optimizer=optimizer)
        model_id = self.model_id
        return self._core.submit(
            [request],
            lambda done: types.LoadWeightsResponse(
                path=done[0].load_checkpoint.path, model_id=model_id, type="load_weights"
            ),
        )


class BackcompatTrainingClientFuture(ClientFuture[TrainingClient], TrainingClient):
    """A TrainingClient in the making, usable as one."""


def check_access_token(token: str | None, stacklevel: int = 4) -> None:
    """Warns that it has no effect here."""
    if token is not None:
        warnings.warn(
            "weights_access_token is ignored: this service has no accounts, and the path is opened with the "
            "client's own key.",
            stacklevel=stacklevel,
        )


def _check_loss_type_input(loss_type_input: str | None) -> None:
    if loss_type_input is None:
        return
    if loss_type_input != "logprobs":
        raise ValueError(
            f"Unsupported loss_type_input={loss_type_input!r}. Supported values are: logprobs"
        )
    warnings.warn(
        "loss_type_input is not needed: the loss always receives log-probabilities.",
        DeprecationWarning,
        stacklevel=3,
    )


def _save_request(
    name: str, ttl_seconds: int | None, user_metadata: Mapping[str, str] | None
) -> trainer_pb2.SaveCheckpointRequest:
    request = trainer_pb2.SaveCheckpointRequest(
        user_metadata=check_metadata(user_metadata), ttl=ttl_from(ttl_seconds)
    )
    set_fields(request, name=name)
    return request


def _recipients(recipients: Sequence[str] | None) -> list[str]:
    if recipients is None:
        return []
    if isinstance(recipients, str) or not all(isinstance(key, str) for key in recipients):
        raise TypeError(
            f"age_encryption_recipients is {recipients!r}: must be a list of public keys."
        )
    if not recipients:
        raise ValueError(
            "age_encryption_recipients is empty: name those who may read the files, or leave it out to save them "
            "unencrypted."
        )
    return list(recipients)


def _optim_step_response(done: list[operations_pb2.Operation]) -> types.OptimStepResponse:
    # A message's map has no order.
    return types.OptimStepResponse(metrics=dict(sorted(done[0].optim_step.metrics.items())) or None)
