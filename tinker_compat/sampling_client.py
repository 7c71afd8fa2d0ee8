"""SamplingClient: samples from, and scores with, weights that never change under it."""

from __future__ import annotations

import base64
import functools
import json
import logging
import os
import warnings
from dataclasses import asdict, dataclass, replace
from typing import Any

from tinker import types

from tinker_compat.client_future import ClientFuture
from tinker_compat.futures import OperationFuture
from tinker_compat.holder import Holder
from tinker_compat.rest_calls import get_sampler
from tinker_compat.sample_conversion import (
    as_list,
    check_topk_sample_logprobs,
    fill_alternatives,
    fill_last_n,
    fill_targets,
    logprobs_request,
    prompt_logprobs_from,
    sample_request,
    sample_response,
)
from tinker_compat.server_warnings import show_new
from tinker_compat.tokenizer import get_tokenizer
from together_post_training.client.address import parse_address, resolve_key
from together_post_training.client.channel import Connection, FixedServer
from together_post_training.client.retry import policy_from
from together_post_training.client.sampler import Sampler, open_base_model, open_checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplerCore:
    holder: Holder
    sampler: Sampler
    record_stability_info: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """A sampling client on its way to another process."""

    address: str
    key: str | None
    headers: tuple[tuple[str, str], ...]
    snapshot: str
    base_model: str
    record_stability_info: bool = False


class SamplingClient:
    """Any number of calls may run at once, from any thread or loop. Can be pickled to other processes.

    record_stability_info: the server keeps a record of every sampled sequence, which the loss "stable_reinforce" reads
        by `sequence_id`. Records live about a day and end with the server.
    """

    def __init__(
        self, holder: Holder, sampler: Sampler, *, record_stability_info: bool = False
    ) -> None:
        self._core = SamplerCore(holder, sampler, record_stability_info)

    @staticmethod
    def create(
        holder: Holder,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
    ) -> OperationFuture[SamplingClient]:
        """What ServiceClient.create_sampling_client does, from a client's `holder`.

        Args:
            sampling_session_id: an existing client's `_sampling_session_id`, to sample from the same weights.

        Raises:
            ValueError: without any of the three.
        """
        check_retry_config(retry_config)
        if sampling_session_id is not None:
            opened = _open_snapshot(holder, sampling_session_id, base_model, record_stability_info)
        elif model_path is None and base_model is None:
            raise ValueError("Either model_path or base_model must be provided")
        else:
            opened = open_sampler(
                holder, model_path, base_model, record_stability_info=record_stability_info
            )
        return holder.start(opened)

    async def _ready(self) -> None:
        """For the twins: a client that is still a future waits here."""

    @property
    def holder(self) -> Holder:
        return self._core.holder

    @property
    def _sampling_session_id(self) -> str:
        return self._core.sampler.snapshot

    def sample(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> OperationFuture[types.SampleResponse]:
        """Samples; cancelling the future stops it on the server.

        The token or tokens that complete a stop are the last of `tokens`. With a seed, sample i uses seed + i.

        Args:
            target_prompt_logprobs: int64 [len(prompt) - 1, K], dense or CSR; row i names tokens whose logprobs at
                prompt position i + 1 are wanted, -1 none.
            prompt_alt_tokens_k: tokens to draw at each prompt position after the first, at the request's temperature.
            prompt_logprobs_last_n: scores only so many of the prompt's last tokens.

        Raises:
            ValueError: for arguments of the wrong kind or in the wrong order.
            BadRequestError: for what the installed tinker package's response has no place for.
        """
        check_topk_sample_logprobs(topk_sample_logprobs)
        request = sample_request(prompt, num_samples, sampling_params)
        request.prompt_logprobs = include_prompt_logprobs
        fill_last_n(request, prompt_logprobs_last_n)
        fill_targets(request, target_prompt_logprobs)
        fill_alternatives(request, prompt_alt_tokens_k)
        request.topk_prompt_logprobs = topk_prompt_logprobs
        request.topk_sample_logprobs = topk_sample_logprobs
        request.record_stability_info = self._core.record_stability_info
        sampler = self._core.sampler

        async def run() -> types.SampleResponse:
            return sample_response(await sampler.sample(request), request)

        return self._core.holder.start(run(), lambda: show_new(sampler.warnings))

    async def sample_async(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> types.SampleResponse:
        """`sample`, awaited."""
        await self._ready()
        return await self.sample(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
        )

    def compute_logprobs(
        self, prompt: types.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> OperationFuture[list[float | None]]:
        """log p(token | the ones before it) for each token of the prompt; None for the first, and for those before the
        last n."""
        request = logprobs_request(prompt, prompt_logprobs_last_n)
        sampler = self._core.sampler

        async def run() -> list[float | None]:
            response = await sampler.compute_logprobs(request)
            return as_list(prompt_logprobs_from(response.logprobs, prompt_logprobs_last_n))

        return self._core.holder.start(run(), lambda: show_new(sampler.warnings))

    async def compute_logprobs_async(
        self, prompt: types.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> list[float | None]:
        """`compute_logprobs`, awaited."""
        await self._ready()
        return await self.compute_logprobs(prompt, prompt_logprobs_last_n)

    def get_tokenizer(self) -> Any:
        """The base model's, as a transformers tokenizer."""
        return get_tokenizer(self._core.holder, self._core.sampler.base_model)

    def get_base_model(self) -> str:
        """Known since the client was made: asks nobody."""
        return self._core.sampler.base_model

    async def get_base_model_async(self) -> str:
        await self._ready()
        return self.get_base_model()

    def get_telemetry(self) -> None:
        """Nothing is collected."""

    def on_queue_state_change(self, queue_state: Any, queue_state_reason: str | None) -> None:
        """Tinker's SDK calls it, for subclasses to see, when its service pauses a queue. This one's queues only ever
        wait their turn: nothing calls it here, and called by hand it logs, as Tinker's does."""
        if getattr(queue_state, "value", queue_state) != "active":
            reason = queue_state_reason or getattr(queue_state, "value", queue_state)
            logger.warning("Sampling from %s is paused: %s", self._sampling_session_id, reason)

    def get_sampler_handle(self) -> str:
        """The client as text, for another process; without its key and headers."""
        state = replace(self._state(), key=None, headers=())
        return base64.urlsafe_b64encode(json.dumps(asdict(state)).encode()).decode()

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        """The key is the argument, else the environment's, as for ServiceClient.

        Raises:
            ValueError: for what is no handle.
        """
        key = resolve_key(api_key, os.environ)
        try:
            fields = json.loads(base64.urlsafe_b64decode(handle))
            state = SamplerState(**{**fields, "key": key, "headers": ()})
        except (TypeError, ValueError):
            raise ValueError(
                f"handle is {handle!r}: expected what get_sampler_handle() returned."
            ) from None
        return _rebuild(state)

    def __reduce__(self) -> tuple[Any, tuple[SamplerState]]:
        return _rebuild, (self._state(),)

    def _state(self) -> SamplerState:
        sampler = self._core.sampler
        sampler.exported()
        connection = sampler.connection
        return SamplerState(
            address=str(connection.address),
            key=connection.key,
            headers=tuple(connection.headers.items()),
            snapshot=sampler.snapshot,
            base_model=sampler.base_model,
            record_stability_info=self._core.record_stability_info,
        )


class BackcompatSamplingClientFuture(ClientFuture[SamplingClient], SamplingClient):
    """A SamplingClient in the making, usable as one."""


async def open_sampler(
    holder: Holder,
    model_path: str | None,
    base_model: str | None,
    *,
    record_stability_info: bool,
) -> SamplingClient:
    """From a checkpoint, else from a base model. With both, the latter only gives the model's name."""
    if model_path is None:
        assert base_model is not None
        sampler = await open_base_model(holder.connection, base_model)
        return SamplingClient(holder, sampler, record_stability_info=record_stability_info)
    if not isinstance(model_path, str) or not model_path.startswith("tinker://"):
        raise ValueError(f"model_path must start with 'tinker://', got {model_path!r}")
    sampler = await open_checkpoint(holder.connection, model_path)
    if base_model is not None:
        sampler = Sampler(sampler.connection, sampler.snapshot, base_model)
    return SamplingClient(holder, sampler, record_stability_info=record_stability_info)


async def _open_snapshot(
    holder: Holder, snapshot: str, base_model: str | None, record_stability_info: bool
) -> SamplingClient:
    if base_model is None:
        base_model = (await get_sampler(holder.connection, snapshot)).base_model
    sampler = Sampler(holder.connection, snapshot, base_model)
    return SamplingClient(holder, sampler, record_stability_info=record_stability_info)


def check_retry_config(retry_config: Any) -> None:
    """Warns that it has no effect here."""
    if retry_config is not None:
        warnings.warn(
            "retry_config is ignored: calls are retried by the client's own policy, for up to 5 minutes while the "
            "server is away.",
            stacklevel=3,
        )


def _rebuild(state: SamplerState) -> SamplingClient:
    holder = _holder_for(os.getpid(), state.address, state.key, state.headers)
    sampler = Sampler(holder.connection, state.snapshot, state.base_model)
    return SamplingClient(holder, sampler, record_stability_info=state.record_stability_info)


@functools.cache
def _holder_for(
    _pid: int, address: str, key: str | None, headers: tuple[tuple[str, str], ...]
) -> Holder:
    """One connection per process and server for all clients that were unpickled."""
    connection = Connection(
        FixedServer(parse_address(address, what="address")),
        key=resolve_key(key, {}),
        headers=dict(headers),
        policy=policy_from(os.environ),
    )
    return Holder(connection)
