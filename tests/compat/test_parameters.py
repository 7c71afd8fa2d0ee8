"""Law 18: every parameter of Tinker's is honoured, refused or warned about. This is the list.

A Tinker with a parameter that is not listed here fails the first test: decide, then list it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect

import pytest
import tinker
from tinker import types

import tinker_compat

HONOURED, REFUSED, WARNED = "honoured", "refused", "warned"

# Methods that are refused as a whole, whatever their parameters.
REFUSED_METHODS = {
    f"RestClient.{method}{twin}"
    for method in (
        "assign_session_project",
        "export_session_trace",
        "get_audit_log",
        "get_billing_usage",
    )
    for twin in ("", "_async")
}
PASS = dict.fromkeys(["data", "loss_fn", "loss_fn_config"], HONOURED)
SAMPLER = {"retry_config": WARNED, "record_stability_info": HONOURED}
SAVE = dict.fromkeys(["name", "ttl_seconds", "overwrite", "user_metadata"], HONOURED)
RESUME = {
    "path": HONOURED,
    "base_model": HONOURED,
    "user_metadata": HONOURED,
    "weights_access_token": WARNED,
    "optimizer": HONOURED,
}
PAGE = dict.fromkeys(["limit", "offset"], HONOURED)
# There are no accounts: what is accessible is owned.
SCOPE = {"access_scope": HONOURED}
PATH = {"tinker_path": HONOURED}
CHECKPOINT = {"training_run_id": HONOURED, "checkpoint_id": HONOURED}
COPY = {"path": HONOURED, "ttl_seconds": HONOURED, "weights_access_token": WARNED}
FATE: dict[str, dict[str, str]] = {
    "ServiceClient.__init__": {
        "user_metadata": HONOURED,
        "project_id": WARNED,
        "display_name": HONOURED,
        "base_url": HONOURED,
        "api_key": HONOURED,
        "default_headers_overrides": HONOURED,
        "kwargs": WARNED,
    },
    "ServiceClient.close": {"status": HONOURED, "detail": WARNED},
    "ServiceClient.create_lora_training_client": {
        **dict.fromkeys(["base_model", "rank", "seed", "user_metadata"], HONOURED),
        **dict.fromkeys(["train_mlp", "train_attn", "train_unembed"], HONOURED),
        "optimizer": HONOURED,
    },
    "ServiceClient.create_training_client_from_state": RESUME,
    "ServiceClient.create_training_client_from_state_with_optimizer": RESUME,
    "ServiceClient.create_sampling_client": {
        "model_path": HONOURED,
        "base_model": HONOURED,
        **SAMPLER,
    },
    "ServiceClient.create_custom_loss": {"fn": HONOURED, "input_ranks": HONOURED},
    "ServiceClient.copy_weights": COPY,
    "ServiceClient.create_rest_client": {},
    "ServiceClient.get_console_url": {},
    "ServiceClient.get_server_capabilities": {},
    "ServiceClient.get_telemetry": {},
    "TrainingClient.forward": PASS,
    "TrainingClient.forward_backward": PASS,
    "TrainingClient.forward_backward_custom": {
        "data": HONOURED,
        "loss_fn": HONOURED,
        "loss_type_input": HONOURED,
    },
    "TrainingClient.optim_step": {"optim_params": HONOURED, "adam_params": HONOURED},
    "TrainingClient.save_state": SAVE,
    "TrainingClient.save_weights_for_sampler": SAVE,
    "TrainingClient.save_weights_external": {
        "name": HONOURED,
        "ttl_seconds": HONOURED,
        "age_encryption_recipients": HONOURED,
    },
    "TrainingClient.get_console_url": {},
    "TrainingClient.load_state": {"path": HONOURED, "weights_access_token": WARNED},
    "TrainingClient.load_state_with_optimizer": {"path": HONOURED, "weights_access_token": WARNED},
    "TrainingClient.save_weights_and_get_sampling_client": {
        "name": WARNED,
        "kind": REFUSED,
        **SAMPLER,
    },
    "TrainingClient.create_sampling_client": {"model_path": HONOURED, **SAMPLER},
    "TrainingClient.get_info": {},
    "TrainingClient.get_tokenizer": {},
    "TrainingClient.get_telemetry": {},
    "SamplingClient.create": {
        **dict.fromkeys(["holder", "model_path", "base_model", "sampling_session_id"], HONOURED),
        **SAMPLER,
    },
    "SamplingClient.on_queue_state_change": {
        "queue_state": HONOURED,
        "queue_state_reason": HONOURED,
    },
    "SamplingClient.sample": {
        **dict.fromkeys(["prompt", "num_samples", "sampling_params"], HONOURED),
        **dict.fromkeys(["include_prompt_logprobs", "topk_prompt_logprobs"], HONOURED),
        **dict.fromkeys(["topk_sample_logprobs", "prompt_logprobs_last_n"], HONOURED),
        **dict.fromkeys(["target_prompt_logprobs", "prompt_alt_tokens_k"], HONOURED),
    },
    "SamplingClient.compute_logprobs": {"prompt": HONOURED, "prompt_logprobs_last_n": HONOURED},
    "SamplingClient.get_tokenizer": {},
    "SamplingClient.get_base_model": {},
    "SamplingClient.get_telemetry": {},
    "SamplingClient.get_sampler_handle": {},
    "SamplingClient.from_sampler_handle": {"handle": HONOURED, "api_key": HONOURED},
    "RestClient.__init__": dict.fromkeys(["_holder", "base_url", "api_key"], HONOURED),
    "RestClient.copy_weights": {**COPY, "destination_project_id": WARNED},
    "RestClient.delete_checkpoint": CHECKPOINT,
    "RestClient.delete_checkpoint_from_tinker_path": PATH,
    "RestClient.get_checkpoint_archive_url": CHECKPOINT,
    "RestClient.get_checkpoint_archive_url_from_tinker_path": PATH,
    "RestClient.get_current_checkpoint_storage_usage": {"project_id": WARNED},
    "RestClient.get_external_weights_urls": PATH,
    "RestClient.get_sampler": {"sampler_id": HONOURED},
    "RestClient.get_server_capabilities": {},
    "RestClient.get_session": {"session_id": HONOURED, **SCOPE},
    "RestClient.get_telemetry": {},
    "RestClient.get_training_run": {"training_run_id": HONOURED, **SCOPE},
    "RestClient.get_training_run_by_tinker_path": {**PATH, **SCOPE},
    "RestClient.get_weights_info_by_tinker_path": PATH,
    "RestClient.list_checkpoints": {"training_run_id": HONOURED},
    "RestClient.list_sessions": {**PAGE, **SCOPE},
    "RestClient.list_training_runs": {**PAGE, **SCOPE, "project_id": WARNED},
    "RestClient.list_user_checkpoints": PAGE,
    "RestClient.publish_checkpoint_from_tinker_path": PATH,
    "RestClient.search_sessions": {"request": HONOURED},
    "RestClient.set_checkpoint_ttl_from_tinker_path": {**PATH, "ttl_seconds": HONOURED},
    "RestClient.unpublish_checkpoint_from_tinker_path": PATH,
    "RestClient.whoami": {},
}
FIELDS: dict[str, dict[str, str]] = {
    "AdamParams": dict.fromkeys(
        ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"], HONOURED
    ),
    "DimuonParams": dict.fromkeys(["learning_rate", "beta1", "grad_clip_norm", "type"], HONOURED),
    "AdamOptimizerConfig": {"type": HONOURED},
    "DimuonOptimizerConfig": {"type": HONOURED, "version": HONOURED},
    "SamplingParams": dict.fromkeys(
        ["max_tokens", "seed", "stop", "temperature", "top_k", "top_p"], HONOURED
    ),
    "Datum": dict.fromkeys(
        ["model_input", "loss_fn_inputs", "model_input_spans", "loss_fn_input_spans"], HONOURED
    ),
    "TensorData": dict.fromkeys(
        ["dtype", "shape", "sparse_crow_indices", "sparse_col_indices", "_numpy"], HONOURED
    ),
    "EncodedTextChunk": {"tokens": HONOURED, "type": HONOURED},
    "ImageChunk": dict.fromkeys(["data", "format", "expected_tokens", "type"], HONOURED),
    "ImageAssetPointerChunk": dict.fromkeys(
        ["location", "format", "expected_tokens", "type"], REFUSED
    ),
    "DmelChunk": dict.fromkeys(["dmel", "type"], REFUSED),
    "SessionSearchRequest": {
        **dict.fromkeys(["session_id", "display_name", "user_metadata", "owner"], HONOURED),
        # But for "client_finished", which is refused.
        "statuses": HONOURED,
        **dict.fromkeys(["limit", "cursor"], HONOURED),
        "project_ids": WARNED,
    },
}
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")


def client_class(module: object, name: str) -> type:
    """Older Tinkers do not export RestClient, and it is not for making there."""
    return (
        getattr(module, name, None)
        or importlib.import_module("tinker.lib.public_interfaces.rest_client").RestClient
    )


def methods(module: object) -> dict[str, inspect.Signature]:
    found: dict[str, inspect.Signature] = {}
    for client in CLIENTS:
        cls = client_class(module, client)
        for name, member in inspect.getmembers(cls):
            if name.startswith("_") or not callable(member):
                continue
            found[f"{client}.{name}"] = inspect.signature(member)
    for client in ("ServiceClient", "RestClient"):
        cls = getattr(module, client, None)
        if cls is not None:
            found[f"{client}.__init__"] = inspect.signature(cls.__init__)
    return found


THEIRS, OURS = methods(tinker), methods(tinker_compat)


@pytest.mark.parametrize("method", sorted(THEIRS.keys() - REFUSED_METHODS))
def test_every_parameter_of_tinkers_clients_has_a_fate(method):
    parameters = set(THEIRS[method].parameters) - {"self"}
    assert parameters <= set(FATE[method.removesuffix("_async")])


# Where Tinker's versions differ, what callers of each may write is taken all the same.
DIFFERENT = {
    ("TrainingClient.optim_step", "adam_params"),
    ("TrainingClient.forward_backward_custom", "loss_type_input"),
    ("ServiceClient.create_training_client_from_state", "user_metadata"),
    ("ServiceClient.create_training_client_from_state", "weights_access_token"),
    ("ServiceClient.create_training_client_from_state_with_optimizer", "user_metadata"),
    ("ServiceClient.create_training_client_from_state_with_optimizer", "weights_access_token"),
}


@pytest.mark.parametrize("method", sorted(THEIRS.keys() - REFUSED_METHODS))
def test_every_method_of_tinkers_clients_takes_what_theirs_takes_in_its_place(method):
    ours = list(OURS[method].parameters.values())
    for place, theirs in enumerate(THEIRS[method].parameters.values()):
        mine = OURS[method].parameters[theirs.name]
        if (method.removesuffix("_async"), theirs.name) in DIFFERENT:
            continue
        assert mine.default == theirs.default, theirs.name
        if theirs.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            assert mine.kind is theirs.kind, theirs.name
            assert ours.index(mine) == place, theirs.name


@pytest.mark.parametrize("method", sorted(THEIRS))
def test_every_method_of_tinkers_clients_is_here_and_a_coroutine_where_its_name_says_so(method):
    client, name = method.split(".")
    ours = getattr(getattr(tinker_compat, client), name)
    assert inspect.iscoroutinefunction(ours) == name.endswith("_async")


# Older Tinkers lack some types.
@pytest.mark.parametrize("name", sorted(name for name in FIELDS if hasattr(types, name)))
def test_every_field_of_tinkers_types_has_a_fate(name):
    cls = getattr(types, name)
    if dataclasses.is_dataclass(cls):
        fields = {field.name for field in dataclasses.fields(cls)}
    else:
        fields = set(cls.model_fields)
    assert fields <= set(FIELDS[name])


def test_every_public_attribute_of_tinkers_module_is_there():
    missing = [
        name
        for name in dir(tinker)
        if not name.startswith("_") and not hasattr(tinker_compat, name)
    ]
    assert missing == []
