"""ServiceClient: where every script starts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self

from tinker import types

from tinker_compat import loss_handle
from tinker_compat.conversion import check_metadata, set_fields
from tinker_compat.futures import OperationFuture
from tinker_compat.holder import Holder, new_holder
from tinker_compat.loss_handle import LossHandle, PerDatumLossFn
from tinker_compat.optimizers import from_config, to_config
from tinker_compat.rest_calls import copy_weights, get_server_capabilities
from tinker_compat.rest_client import RestClient
from tinker_compat.run import Run
from tinker_compat.sampling_client import (
    BackcompatSamplingClientFuture,
    SamplingClient,
    check_retry_config,
    open_sampler,
)
from tinker_compat.training_client import (
    BackcompatTrainingClientFuture,
    TrainingClient,
    check_access_token,
)
from together_post_training.client.channel import Connection
from together_post_training.client.session import create_session
from together_post_training.v1 import catalog_pb2, sessions_pb2

# Tinker's sessions scale their adapters by this over the rank.
LORA_ALPHA = 32.0


class ServiceClient:
    """A server and one's standing there. Making one calls nobody: the first call connects.

    Args:
        user_metadata: attached to every training run made here.
        base_url: grpc://host:port, grpcs://host:port or host:port. Default: TOGETHER_POST_TRAINING_ADDRESS, then
            TINKER_BASE_URL or TOGETHER_BASE_URL where they hold such an address, then a server that is started in
            a child process for as long as this process lives.
        api_key: default TINKER_API_KEY or TOGETHER_API_KEY. Any key will do where the server asks for none.
        display_name: for listings.
        default_headers_overrides: sent as metadata with every call.
        **kwargs: ignored with a warning.

    Raises:
        ValueError: for an address that is none of these, or a header that cannot be sent.
        TinkerError: for a key that cannot be sent.
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        _warn_of_ignored(project_id, kwargs)
        self._user_metadata = check_metadata(user_metadata)
        self._display_name = display_name
        # By what they compute. On the background loop.
        self._custom_losses: dict[tuple[Any, ...], LossHandle] = {}
        self.holder = new_holder(base_url, api_key, default_headers_overrides)

    def __enter__(self) -> Self:
        self.holder.check_open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None:
            status = "success"
        else:
            status = "errored" if issubclass(exc_type, Exception) else "interrupted"
        # Not close(...).result(): async programs leave the block too, and have no other way.
        Future.result(self.close(status))

    def close(
        self, status: Literal["success", "errored", "interrupted"], detail: str | None = None
    ) -> OperationFuture[None]:
        """Ends this client's training runs on the server; their checkpoints stay.

        With "success" their submitted operations are waited for, otherwise those not started are dropped. `detail`
        is ignored with a warning.
        """
        if detail is not None:
            warnings.warn(
                f"detail={detail!r} is ignored: the server does not record why a client was closed.",
                stacklevel=2,
            )
        return self.holder.close(finish=status == "success")

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: Any = None,
    ) -> BackcompatTrainingClientFuture:
        """A new adapter on a base model.

        Args:
            optimizer: AdamOptimizerConfig() or DimuonOptimizerConfig(); default AdamW. See `tinker_compat.optimizers`
                for Muon.

        Raises:
            AssertionError: when nothing is to be trained.
        """
        assert any([train_mlp, train_attn, train_unembed]), (
            "At least one of train_mlp, train_attn, or train_unembed must be True"
        )
        request = sessions_pb2.CreateSessionRequest(optimizer=to_config(optimizer))
        set_fields(request, base_model=base_model)
        set_fields(
            request.lora,
            rank=rank,
            alpha=LORA_ALPHA,
            seed=seed,
            train_mlp=train_mlp,
            train_attn=train_attn,
            train_unembed=train_unembed,
        )
        return self._create_training_client(request, user_metadata)

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: Any = None,
    ) -> TrainingClient:
        return await self.create_lora_training_client(
            base_model,
            rank,
            seed,
            train_mlp,
            train_attn,
            train_unembed,
            user_metadata,
            optimizer,
        )

    def create_full_training_client(
        self,
        base_model: str,
        user_metadata: dict[str, str] | None = None,
        optimizer: Any = None,
    ) -> BackcompatTrainingClientFuture:
        """A client that trains every parameter of a copy of the base model. Tinker has no such method.

        One runs on a model at a time: a second waits for the first to end, and raises RateLimitError, naming it, after
        five minutes.
        """
        request = sessions_pb2.CreateSessionRequest(optimizer=to_config(optimizer))
        set_fields(request, base_model=base_model)
        request.full_weights.SetInParent()
        return self._create_training_client(request, user_metadata)

    async def create_full_training_client_async(
        self,
        base_model: str,
        user_metadata: dict[str, str] | None = None,
        optimizer: Any = None,
    ) -> TrainingClient:
        return await self.create_full_training_client(base_model, user_metadata, optimizer)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | dict[str, str] | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: Any = None,
    ) -> BackcompatTrainingClientFuture:
        """A new run from a checkpoint's weights and LoRA configuration, with a fresh optimiser."""
        request = sessions_pb2.CreateSessionRequest(optimizer=to_config(optimizer))
        return self._resume(request, path, base_model, user_metadata, weights_access_token)

    async def create_training_client_from_state_async(
        self,
        path: str,
        base_model: str | dict[str, str] | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: Any = None,
    ) -> TrainingClient:
        return await self.create_training_client_from_state(
            path, base_model, user_metadata, weights_access_token, optimizer
        )

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | dict[str, str] | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> BackcompatTrainingClientFuture:
        """A new run that goes on exactly where the checkpoint was saved."""
        request = sessions_pb2.CreateSessionRequest(load_optimizer=True)
        return self._resume(request, path, base_model, user_metadata, weights_access_token)

    async def create_training_client_from_state_with_optimizer_async(
        self,
        path: str,
        base_model: str | dict[str, str] | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        return await self.create_training_client_from_state_with_optimizer(
            path, base_model, user_metadata, weights_access_token
        )

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
    ) -> BackcompatSamplingClientFuture:
        """A client that samples from a checkpoint or a base model.

        Raises:
            ValueError: without either.
        """
        if model_path is None and base_model is None:
            raise ValueError("Either model_path or base_model must be provided")
        check_retry_config(retry_config)
        opened = self.holder.start(
            open_sampler(
                self.holder, model_path, base_model, record_stability_info=record_stability_info
            )
        )
        return BackcompatSamplingClientFuture(opened)

    async def create_sampling_client_async(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        return await self.create_sampling_client(
            model_path, base_model, retry_config, record_stability_info
        )

    def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        """The models that the server serves; waits for the answer."""
        return self.holder.start(get_server_capabilities(self.holder.connection)).result()

    async def get_server_capabilities_async(self) -> types.GetServerCapabilitiesResponse:
        return await self.holder.start(get_server_capabilities(self.holder.connection))

    def get_telemetry(self) -> None:
        """Nothing is collected."""

    def create_rest_client(self) -> RestClient:
        """For what the server has; over this client's connection."""
        return RestClient(self.holder)

    def create_custom_loss(
        self, fn: PerDatumLossFn, input_ranks: Mapping[str, Literal[0, 1, 2]]
    ) -> OperationFuture[LossHandle]:
        """Traces a loss of one sample, to be passed to forward_backward_custom, where it is evaluated by this process.

        Args:
            fn: takes logprobs, then the loss_fn_inputs that its parameters name; returns the loss, a scalar, and
                metrics named custom/<name>:sum or custom/<name>:mean. Samples' losses are summed.
            input_ranks: for each parameter: 0 a scalar, 1 [positions], 2 [positions, K].

        Raises:
            ImportError: without torch.
            ValueError: for a loss that cannot be traced; by the future, for one that this client has already.
        """
        self.holder.check_open()
        handle = loss_handle.trace(fn, input_ranks, self.holder.get_session_id())

        async def register() -> LossHandle:
            return loss_handle.register(handle, self._custom_losses)

        return self.holder.start(register())

    def copy_weights(
        self,
        path: str,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> OperationFuture[str]:
        """Copies a checkpoint into a training run of its own, of this client; the future has the copy's path.

        The copy keeps its kind and name and outlives what it was copied from. The run cannot be trained: start another
        one from the copy.
        """
        check_access_token(weights_access_token, stacklevel=3)
        return self.holder.start(copy_weights(self.holder, path, ttl_seconds))

    def get_console_url(self) -> str:
        """The server's address and this client's id, for logs. This service has no console."""
        return self.holder.console_url(self.holder.get_session_id())

    def _resume(
        self,
        request: sessions_pb2.CreateSessionRequest,
        path: str,
        base_model: str | dict[str, str] | None,
        user_metadata: dict[str, str] | str | None,
        weights_access_token: str | None,
    ) -> BackcompatTrainingClientFuture:
        # The second and third place were those of user_metadata and weights_access_token once.
        if isinstance(user_metadata, str):
            user_metadata, weights_access_token = None, user_metadata
        if isinstance(base_model, Mapping):
            if user_metadata is not None:
                raise TypeError(
                    f"base_model is {base_model!r}: must be a model's name, as user_metadata is given as well."
                )
            base_model, user_metadata = None, dict(base_model)
        check_access_token(weights_access_token)
        set_fields(request, resume_from=path, base_model=base_model)
        return self._create_training_client(request, user_metadata)

    def _create_training_client(
        self, request: sessions_pb2.CreateSessionRequest, user_metadata: dict[str, str] | None
    ) -> BackcompatTrainingClientFuture:
        request.id = self.holder.new_training_id()
        request.user_metadata.update({**self._user_metadata, **check_metadata(user_metadata)})
        request.display_name = self._display_name or ""
        return BackcompatTrainingClientFuture(
            self.holder.start(_create_training_client(self.holder, request))
        )


async def _create_training_client(
    holder: Holder, request: sessions_pb2.CreateSessionRequest
) -> TrainingClient:
    session = await create_session(holder.connection, request)
    holder.add_session(session)
    info = await _info(holder.connection, session.info)
    return TrainingClient(Run(holder, session, info))


async def _info(connection: Connection, session: sessions_pb2.Session) -> types.GetInfoResponse:
    models = await connection.call("catalog.ListModels", catalog_pb2.ListModelsRequest())
    names = {model.name: model for model in models.models}
    model = names.get(session.base_model)
    # Older GetInfoResponses know nothing of optimisers.
    known = "optimizer_config" in types.GetInfoResponse.model_fields
    optimizer = {"optimizer_config": from_config(session.optimizer)} if known else {}
    return types.GetInfoResponse(
        type="get_info",
        model_data=types.ModelData(
            arch=model.architecture if model is not None else None,
            model_name=session.base_model,
            tokenizer_id=session.base_model,
        ),
        model_id=session.id,
        is_lora=session.HasField("lora"),
        lora_rank=session.lora.rank if session.HasField("lora") else None,
        model_name=session.base_model,
        **optimizer,
    )


def _warn_of_ignored(project_id: str | None, kwargs: Mapping[str, Any]) -> None:
    if project_id is not None:
        warnings.warn(
            f"project_id={project_id!r} is ignored: this service has no projects.", stacklevel=3
        )
    if kwargs:
        warnings.warn(
            f"ServiceClient ignores arguments it does not know: {', '.join(sorted(kwargs))}.",
            stacklevel=3,
        )
