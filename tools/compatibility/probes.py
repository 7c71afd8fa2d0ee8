"""What Tinker's methods are called with: values of their parameters, and of the fields of what they are given."""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tinker
from tinker import types

from tools.compatibility.recorder import MODEL
from tools.compatibility.surface import Parameter

ADDRESS = "grpc://localhost:1"


def datum(targets: Any = (2, 3), tokens: tuple[int, ...] = (1, 2), **fields: Any) -> tinker.Datum:
    return tinker.Datum(
        **{
            "model_input": tinker.ModelInput.from_ints(list(tokens)),
            "loss_fn_inputs": {"target_tokens": tensor(targets)},
            **fields,
        }
    )


def tensor(values: Any, dtype: Any = "int64") -> tinker.TensorData:
    array = np.asarray(values, np.int64 if dtype == "int64" else np.float32)
    return tinker.TensorData(data=array.ravel(), dtype=dtype, shape=list(array.shape))


def _handle(snapshot: str) -> str:
    state = {"address": ADDRESS, "snapshot": snapshot, "base_model": MODEL}
    return base64.urlsafe_b64encode(json.dumps(state).encode()).decode()


def _given(name: str, **fields: Any) -> tuple[Any, ...]:
    """An object of a type that the installed version may lack; then there is nothing to give."""
    cls = getattr(types, name, None)
    return () if cls is None else (cls(**fields),)


def _search(name: str, **fields: Any) -> Any:
    """One of the types of newer versions that searches are made of."""
    return next(iter(_given(name, **fields)), None)


def _spans() -> tuple[list[Any], list[Any]]:
    """Where the tokens of a sample came from, for its input and for its targets."""
    spans = list(_given("PromptProvenanceSpan", sequence_id="sequence", length=2))
    return spans, spans


_THEN = datetime.datetime(2033, 5, 18, 3, 33, 19, tzinfo=datetime.UTC)


# By the name of the parameter: of the method if it is there, else of any. Values other than the default; where one has
# to be given there are two, to see that the second has another effect.
PROBES: Mapping[str, tuple[Any, ...]] = {
    "access_scope": ("accessible",),
    "adam_params": (tinker.AdamParams(), tinker.AdamParams(learning_rate=0.5)),
    "age_encryption_recipients": (
        ["age1x3ewkjgcf8mxt7q0sm53g6fn27fp52kmld29ps4v6h2rwunaav5smayycy"],
    ),
    "api_key": ("key",),
    "base_model": (MODEL, "other"),
    "base_url": (ADDRESS,),
    "checkpoint_id": ("weights/name", "weights/other"),
    "data": ([datum()], [datum((4, 5))]),
    "day": (datetime.date(2026, 1, 1),),
    "default_headers_overrides": ({"header": "value"},),
    "destination_project_id": ("project",),
    "detail": ("text",),
    "display_name": ("text",),
    "ending_before": ("2026-02-01", "2026-03-01"),
    "event_type": ("checkpoints",),
    "fn": (lambda logprobs: (logprobs.sum(), {}), lambda logprobs: (logprobs.mean(), {})),
    "from_sampler_handle.handle": (_handle("name"), _handle("other")),
    "include_prompt_logprobs": (True,),
    "input_ranks": ({"logprobs": 1}, {"logprobs": 2}),
    "kind": ("inflight",),
    "kwargs": ({"max_retries": 3},),
    "limit": (2,),
    "loss_fn": ("importance_sampling", "ppo"),
    "forward_backward_custom.loss_fn": (
        lambda data, logprobs: (logprobs[0].sum(), {}),
        lambda data, logprobs: (2 * logprobs[0].sum(), {}),
    ),
    "loss_fn_config": ({"clip_low_threshold": 0.9},),
    "loss_type_input": ("logprobs",),
    "model_path": ("tinker://run/sampler_weights/name", "tinker://run/sampler_weights/other"),
    "name": ("name", "other"),
    "num_samples": (1, 2),
    "offset": (1,),
    "optim_params": (tinker.AdamParams(), tinker.AdamParams(learning_rate=0.5)),
    "optimizer": _given("DimuonOptimizerConfig"),
    "overwrite": (True,),
    "path": ("tinker://run/weights/name", "tinker://run/weights/other"),
    "project_id": ("project", "other"),
    "prompt": (tinker.ModelInput.from_ints([1, 2]), tinker.ModelInput.from_ints([1, 3])),
    "prompt_alt_tokens_k": (1,),
    "prompt_logprobs_last_n": (1,),
    "rank": (8,),
    "record_stability_info": (True,),
    "request": (
        *_given("SessionSearchRequest"),
        *_given("SessionSearchRequest", display_name="nobody"),
    ),
    "retry_config": (object(),),
    "sampler_id": ("snapshots/name", "snapshots/other"),
    "sampling_params": (tinker.SamplingParams(), tinker.SamplingParams(max_tokens=5)),
    "seed": (1,),
    "session_id": ("client-0", "client-1"),
    "starting_on": ("2026-01-01", "2026-01-02"),
    "status": ("success", "errored"),
    "target_prompt_logprobs": (tensor([[1]]),),
    "timeout": (5.0,),
    "tinker_path": ("tinker://run/weights/name", "tinker://run-1/weights/other"),
    "get_external_weights_urls.tinker_path": (
        "tinker://run/external_weights/name",
        "tinker://run/external_weights/other",
    ),
    "topk_prompt_logprobs": (1,),
    "topk_sample_logprobs": (1,),
    "train_attn": (False,),
    "train_mlp": (False,),
    "train_unembed": (False,),
    "training_run_id": ("run", "run-1"),
    "ttl_seconds": (3600, 7200),
    "user_metadata": ({"key": "value"},),
    "weights_access_token": ("token",),
}
# Given along with a parameter of a method, because it makes no sense alone.
ALONG: Mapping[str, tuple[str, ...]] = {
    "sample.prompt_logprobs_last_n": ("include_prompt_logprobs",),
}
# Needed although it has a default.
NEEDED: Mapping[str, tuple[str, ...]] = {"RestClient.copy_weights": ("destination_project_id",)}
# Methods that need one of these and take no two.
ALTERNATIVES: Mapping[str, tuple[str, ...]] = {
    "optim_step": ("optim_params", "adam_params"),
    "ServiceClient.create_sampling_client": ("model_path", "base_model"),
}
# What may be given and changes nothing, because it is so anyway.
SO_ANYWAY: Mapping[str, str] = {
    "access_scope": "whatever is on the server is the caller's",
    "loss_type_input": "losses always receive log-probabilities",
    "RestClient.search_sessions.owner": "whatever is on the server is the caller's",
}
# The SDK's own: its users cannot call them, as they take what only the SDK makes.
INTERNAL: Mapping[str, str] = {
    "TrainingClient.__init__": "training clients are made by a ServiceClient",
    "SamplingClient.__init__": "sampling clients are made by a ServiceClient or a TrainingClient",
    "SamplingClient.create": "takes the SDK's own connection",
    "SamplingClient.on_queue_state_change": "is called by the SDK when the hosted service pauses",
    "BackcompatTrainingClientFuture.__init__": "is what a ServiceClient returns",
    "BackcompatSamplingClientFuture.__init__": "is what clients return",
}


def internal(call: str, parameters: Sequence[Parameter] = ()) -> str | None:
    """Why callers do not call it, if they do not."""
    if any(p.name == "holder" and p.default is None for p in parameters):
        return "takes the SDK's own connection"
    return INTERNAL.get(call)


def lookup(table: Mapping[str, Any], call: str, parameter: str) -> Any:
    """The most specific entry: Client.method.parameter, method.parameter, parameter. None: there is none."""
    client, _, method = call.removesuffix("_async").rpartition(".")
    keys = [
        ".".join(filter(None, parts))
        for parts in ((client, method, parameter), (method, parameter), (parameter,))
    ]
    return next((table[key] for key in keys if key in table), None)


@dataclass(frozen=True, slots=True)
class Given:
    """A type whose objects are given to a method.

    call, parameter: which.
    base: the fields of an object that has only what it must have.
    fields: values of the others, each given along with the base; those that belong together have one tuple of names.
    wrap: makes what is given from an object.
    """

    call: str
    parameter: str
    base: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str | tuple[str, ...], Any] = field(default_factory=dict)
    wrap: Callable[[Any], Any] = lambda value: value


_SPAN = types.EncodedTextChunk(tokens=[1])


def _as_targets(value: Any) -> list[tinker.Datum]:
    return [datum(loss_fn_inputs={"target_tokens": value})]


def _as_chunk(value: Any) -> list[tinker.Datum]:
    return [datum(model_input=tinker.ModelInput(chunks=[_SPAN, value]))]


def _chunk(base: Mapping[str, Any], **fields: Any) -> Given:
    return Given("TrainingClient.forward_backward", "data", base, {**fields}, _as_chunk)


_PASS = ("TrainingClient.forward_backward", "data")
_STEP = ("TrainingClient.optim_step", "optim_params")
_RUN = ("ServiceClient.create_lora_training_client", "optimizer")
GIVEN: Mapping[str, Given] = {
    "AdamOptimizerConfig": Given(*_RUN),
    "AdamParams": Given(
        *_STEP,
        fields=dict.fromkeys(
            ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"], 0.25
        ),
    ),
    "Datum": Given(
        *_PASS,
        {
            "model_input": tinker.ModelInput.from_ints([1, 2]),
            "loss_fn_inputs": {"target_tokens": [2, 3]},
        },
        {
            "model_input": tinker.ModelInput.from_ints([1, 3]),
            "loss_fn_inputs": {"target_tokens": [4, 5]},
            ("model_input_spans", "loss_fn_input_spans"): _spans(),
        },
        lambda value: [value],
    ),
    "DimuonOptimizerConfig": Given(*_RUN),
    "DimuonParams": Given(
        *_STEP,
        {"learning_rate": 0.5},
        dict.fromkeys(["learning_rate", "beta1", "grad_clip_norm"], 0.25),
    ),
    "DmelChunk": _chunk({"dmel": b"x"}),
    "EncodedTextChunk": _chunk({"tokens": [1]}, tokens=[2]),
    "ImageAssetPointerChunk": _chunk({"location": "x", "format": "png"}),
    "ImageChunk": _chunk({"data": b"x", "format": "png"}),
    "ModelInput": Given(
        *_PASS,
        {"chunks": [_SPAN, _SPAN]},
        {"chunks": [_SPAN, types.EncodedTextChunk(tokens=[3])]},
        lambda value: [datum(model_input=value)],
    ),
    "SamplingParams": Given(
        "SamplingClient.sample",
        "sampling_params",
        fields={
            "max_tokens": 5,
            "seed": 1,
            "stop": ["x"],
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.5,
        },
    ),
    "SessionSearchRequest": Given(
        "RestClient.search_sessions",
        "request",
        fields={
            "cursor": _search("SessionSearchCursor", last_created_at=_THEN, last_session_id="x"),
            "display_name": "0",
            "limit": 1,
            "owner": _search("UserSearchOwner", owner_urns=["urn:other"]),
            "project_ids": ["project"],
            "session_id": "client-0",
            "statuses": [_search("FailedSessionStatusQuery")],
            "user_metadata": {"place": "0"},
        },
    ),
    "TensorData": Given(
        *_PASS,
        {"data": [2, 3], "dtype": "int64"},
        {
            "data": [4, 5],
            "dtype": "float32",
            "shape": [2, 1],
            ("data", "shape", "sparse_crow_indices", "sparse_col_indices"): (
                [3],
                [2, 2],
                [0, 1, 1],
                [1],
            ),
        },
        _as_targets,
    ),
}
