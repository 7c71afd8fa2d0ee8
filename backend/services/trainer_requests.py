"""Requests of TrainerService as work: decoded and checked. Pure; large ones are decoded in worker threads."""

from __future__ import annotations

from backend.checkpoints.encryption import check_recipients
from backend.operations.work import (
    CheckpointKind,
    LoadCheckpointWork,
    OptimStepWork,
    PassWork,
    SaveCheckpointWork,
    SyncType,
    WeightsSyncWork,
)
from backend.resources.sample_records import SampleRecords
from backend.services import wire
from backend.services.fields import check_metadata, invalid, optional, ttl_s
from backend.services.optimizer_requests import optim_params
from backend.services.recorded_inputs import with_recorded
from backend.services.routed_experts import routed_experts
from backend.trainer.base import ModelInfo, OptimizerConfig, Pass
from together_post_training import losses, samples, tensors
from together_post_training.errors import Reason, fail
from together_post_training.names import check_checkpoint_name, parse_checkpoint_path
from together_post_training.v1 import data_pb2
from together_post_training.v1 import trainer_pb2 as pb

_MAX_CHUNKS = 1_000_000

_KINDS: dict[int, CheckpointKind] = {
    pb.CHECKPOINT_KIND_TRAINING: "training",
    pb.CHECKPOINT_KIND_INFERENCE: "inference",
    pb.CHECKPOINT_KIND_EXTERNAL: "external",
}

_SYNC_TYPES: dict[int, SyncType] = {
    pb.WEIGHT_SYNC_TYPE_UNSPECIFIED: "synchronous",
    pb.WEIGHT_SYNC_TYPE_SYNCHRONOUS: "synchronous",
    pb.WEIGHT_SYNC_TYPE_BACKGROUND_PUBLISH: "background",
    pb.WEIGHT_SYNC_TYPE_PIPELINE: "pipeline",
}


def pass_work(
    request: pb.ForwardRequest | pb.ForwardBackwardRequest,
    model: ModelInfo,
    records: SampleRecords,
) -> PassWork:
    backward = isinstance(request, pb.ForwardBackwardRequest)
    if backward:
        _check_chunks(request)
    loss = request.loss.type
    params = losses.complete_params(loss, _given_params(request.loss))
    decoded = [wire.sample(message, i) for i, message in enumerate(request.samples)]
    complete = with_recorded(request.samples, decoded, loss, records.sequences)
    checked = samples.check(complete, loss, model.limits)
    inputs = [sample.inputs for sample in checked]
    return PassWork(
        work=Pass(
            session=request.session,
            samples=checked,
            loss=loss,
            params=losses.prepare(loss, params, inputs, max_seq_length=model.limits.max_seq_length),
            backward=backward,
            routed_experts=routed_experts(request.samples, checked, model, records.experts),
        )
    )


def custom_work(
    request: pb.CustomForwardBackwardRequest, model: ModelInfo, records: SampleRecords
) -> PassWork:
    _check_chunks(request)
    decoded = [wire.sample(message, i) for i, message in enumerate(request.samples)]
    checked = samples.check(decoded, "cross_entropy", model.limits)
    gradients = [
        tensors.decode(tensor, what=f"Gradient {i}") for i, tensor in enumerate(request.gradients)
    ]
    return PassWork(
        work=Pass(
            session=request.session,
            samples=checked,
            backward=True,
            gradients=samples.check_gradients(checked, gradients),
            routed_experts=routed_experts(request.samples, checked, model, records.experts),
        )
    )


def optim_step_work(request: pb.OptimStepRequest, optimizer: OptimizerConfig) -> OptimStepWork:
    """`optimizer`: the session's."""
    return OptimStepWork(params=optim_params(request, optimizer))


def weights_sync_work(request: pb.WeightsSyncRequest) -> WeightsSyncWork:
    if request.type not in _SYNC_TYPES:
        raise invalid("type", request.type, ", ".join(pb.WeightSyncType.keys()[1:]))
    return WeightsSyncWork(type=_SYNC_TYPES[request.type])


def save_checkpoint_work(request: pb.SaveCheckpointRequest) -> SaveCheckpointWork:
    if request.kind not in _KINDS:
        raise invalid("kind", request.kind, ", ".join(pb.CheckpointKind.keys()[1:]))
    kind = _KINDS[request.kind]
    if request.age_recipients and kind != "external":
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"age_recipients are set and the kind is {pb.CheckpointKind.Name(request.kind)}: only those of "
            "CHECKPOINT_KIND_EXTERNAL can be encrypted. Leave them out, or save one of that kind.",
            parameter="age_recipients",
        )
    return SaveCheckpointWork(
        kind=kind,
        name=check_checkpoint_name(request.name),
        ttl_s=ttl_s(request),
        overwrite=request.overwrite,
        user_metadata=check_metadata(dict(request.user_metadata)),
        age_recipients=check_recipients(request.age_recipients),
    )


def load_checkpoint_work(request: pb.LoadCheckpointRequest) -> LoadCheckpointWork:
    return LoadCheckpointWork(path=parse_checkpoint_path(request.path), optimizer=request.optimizer)


def _given_params(loss: data_pb2.LossConfig) -> dict[str, float | str]:
    twice = sorted(set(loss.params) & set(loss.options))
    if twice:
        raise invalid("loss.options", twice, "parameters that loss.params does not hold as well")
    return {**loss.params, **loss.options}


def _check_chunks(request: pb.ForwardBackwardRequest | pb.CustomForwardBackwardRequest) -> None:
    num_chunks = optional(request, "num_chunks", 1)
    if not 1 <= num_chunks <= _MAX_CHUNKS:
        raise invalid("num_chunks", num_chunks, f"1 to {_MAX_CHUNKS}")
