"""The service's messages as Tinker's response types. Pure."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from typing import Any

from google.protobuf.duration_pb2 import Duration
from tinker import types

from tinker_compat.optimizers import from_config
from tinker_compat.response_types import WhoamiResponse, require_type, respond
from tinker_compat.run_records import RunRecord, to_datetime
from together_post_training.names import CheckpointPath, parse_checkpoint_path
from together_post_training.v1 import (
    catalog_pb2,
    checkpoints_pb2,
    generator_pb2,
    sessions_pb2,
    trainer_pb2,
)

# There are no accounts: whoever reaches the server is its owner.
USER_URN = "urn:together-post-training:user:owner"
ORGANIZATION_URN = "urn:together-post-training:organization:owner"

_FOLDERS = ("weights", "sampler_weights", "external_weights")
_TYPES = {
    trainer_pb2.CHECKPOINT_KIND_TRAINING: "training",
    trainer_pb2.CHECKPOINT_KIND_INFERENCE: "sampler",
    trainer_pb2.CHECKPOINT_KIND_EXTERNAL: "external",
}
_BYTES_PER_GIGABYTE = 1e9


def checkpoint_path(tinker_path: str) -> CheckpointPath:
    """Raises ValueError, as Tinker's own parser, for what is not tinker://<run>/<kind>/<name>."""
    scheme, _, rest = str(tinker_path).partition("tinker://")
    session, folder, name = rest.split("/") if rest.count("/") == 2 else ("", "", "")
    if scheme or folder not in _FOLDERS:
        raise ValueError(
            f"Invalid tinker path: {tinker_path}. It must be tinker://<training run id>/<kind>/<name>, the kind "
            f"{', '.join(_FOLDERS[:-1])} or {_FOLDERS[-1]}."
        )
    return CheckpointPath(session=session, folder=folder, name=name)


def checkpoint_from(message: checkpoints_pb2.Checkpoint) -> types.Checkpoint:
    path = parse_checkpoint_path(message.path)
    kind = _TYPES[message.kind]
    known = typing.get_args(types.CheckpointType)
    # Older Tinkers know no external checkpoints.
    make: Any = types.Checkpoint if kind in known else types.Checkpoint.model_construct
    return make(
        checkpoint_id=f"{path.folder}/{path.name}",
        checkpoint_type=kind,
        time=to_datetime(message.create_time),
        tinker_path=message.path,
        size_bytes=message.size_bytes,
        public=message.is_public,
        user_metadata=dict(message.user_metadata) or None,
        expires_at=to_datetime(message.expire_time) if message.HasField("expire_time") else None,
    )


def training_run_from(run: RunRecord) -> types.TrainingRun:
    shown = run.configuration
    lost = run.session is not None and run.session.state == sessions_pb2.SESSION_STATE_LOST
    return types.TrainingRun(
        training_run_id=run.id,
        base_model=shown.base_model,
        model_owner=USER_URN,
        is_lora=shown.HasField("lora"),
        corrupted=lost,
        lora_rank=shown.lora.rank if shown.HasField("lora") else None,
        last_request_time=run.last_request_time,
        last_checkpoint=_last(run, trainer_pb2.CHECKPOINT_KIND_TRAINING),
        last_sampler_checkpoint=_last(run, trainer_pb2.CHECKPOINT_KIND_INFERENCE),
        user_metadata=run.user_metadata or None,
    )


def _last(run: RunRecord, kind: trainer_pb2.CheckpointKind) -> types.Checkpoint | None:
    return next((checkpoint_from(c) for c in run.checkpoints if c.kind == kind), None)


def weights_info_from(message: checkpoints_pb2.Checkpoint) -> types.WeightsInfoResponse:
    lora = message.lora
    # Absent where the layers that are trained were named one by one.
    flags = {
        name: getattr(lora, name) if lora.HasField(name) else None
        for name in ("train_unembed", "train_mlp", "train_attn")
    }
    # Older WeightsInfoResponses know nothing of optimisers.
    known = "optimizer_config" in types.WeightsInfoResponse.model_fields
    optimizer = {"optimizer_config": from_config(message.optimizer)} if known else {}
    is_lora = message.HasField("lora")
    return types.WeightsInfoResponse(
        base_model=message.base_model,
        is_lora=is_lora,
        lora_rank=lora.rank if is_lora else None,
        **(flags if is_lora else {}),
        **optimizer,
    )


def sampler_from(message: generator_pb2.Snapshot) -> types.GetSamplerResponse:
    return types.GetSamplerResponse(
        sampler_id=message.name, base_model=message.base_model, model_path=message.path or None
    )


def capabilities_from(
    message: catalog_pb2.ListModelsResponse,
) -> types.GetServerCapabilitiesResponse:
    models = [
        # Older SupportedModels leave out the fields they do not know.
        types.SupportedModel(
            model_name=model.name,
            max_context_length=model.max_context_length
            if model.HasField("max_context_length")
            else None,
            trainable=model.trainable,
            sampleable=model.sampleable,
        )
        for model in message.models
    ]
    return types.GetServerCapabilitiesResponse(supported_models=models)


def identity() -> WhoamiResponse:
    return respond(WhoamiResponse, user_urn=USER_URN, org_urn=ORGANIZATION_URN, email=None)


def storage_usage_from(checkpoints: Iterable[checkpoints_pb2.Checkpoint]) -> Any:
    """A gigabyte is 10^9 bytes. There are no prices."""
    response = require_type(
        "CurrentCheckpointStorageUsageResponse", "get_current_checkpoint_storage_usage"
    )
    item = require_type("CurrentCheckpointStorageUsageItem", "get_current_checkpoint_storage_usage")
    sizes = [checkpoint.size_bytes for checkpoint in checkpoints]
    owned = item(
        org_user_urn=USER_URN,
        checkpoint_count=len(sizes),
        size_bytes=sum(sizes),
        size_gigabytes=sum(sizes) / _BYTES_PER_GIGABYTE,
    )
    return response(data=[owned] if sizes else [])


def ttl_from(ttl_seconds: float | None) -> Duration | None:
    """Raises TypeError or ValueError for what is no whole number. Which are accepted is for the server to say."""
    if ttl_seconds is None:
        return None
    if isinstance(ttl_seconds, float) and ttl_seconds.is_integer():
        ttl_seconds = int(ttl_seconds)
    try:
        return Duration(seconds=ttl_seconds)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"ttl_seconds is {ttl_seconds!r}: must be a whole number of seconds, at most ten years."
        ) from None
