"""Requests of TrainerService as work: decoded and checked. Pure; large ones are decoded in worker threads."""

from __future__ import annotations

from backend.operations.work import (
    CheckpointKind,
    LoadCheckpointWork,
    OptimStepWork,
    PassWork,
    SaveCheckpointWork,
    WeightsSyncWork,
)
from backend.resources.sequence_records import SequenceRecords
from backend.services import wire
from backend.services.fields import check_metadata, invalid, optional
from backend.services.optimizer_requests import optim_params
from backend.services.recorded_inputs import with_recorded
from backend.trainer.base import OptimizerConfig, Pass
from together_post_training import losses, samples, tensors
from together_post_training.errors import Reason, fail
from together_post_training.names import check_checkpoint_name, parse_checkpoint_path
from together_post_training.samples import Limits
from together_post_training.v1 import data_pb2
from together_post_training.v1 import trainer_pb2 as pb

_TEN_YEARS_S = 10 * 366 * 24 * 3600
_MAX_CHUNKS = 1_000_000

_KINDS: dict[int, CheckpointKind] = {
    pb.CHECKPOINT_KIND_TRAINING: "training",
    pb.CHECKPOINT_KIND_INFERENCE: "inference",
}


def pass_work(
    request: pb.ForwardRequest | pb.ForwardBackwardRequest,
    limits: Limits,
    records: SequenceRecords,
) -> PassWork:
    backward = isinstance(request, pb.ForwardBackwardRequest)
    if backward:
        _check_chunks(request)
    loss = request.loss.type
    params = losses.complete_params(loss, _given_params(request.loss))
    decoded = [wire.sample(message, i) for i, message in enumerate(request.samples)]
    complete = with_recorded(request.samples, decoded, loss, records)
    checked = samples.check(complete, loss, limits)
    inputs = [sample.inputs for sample in checked]
    return PassWork(
        work=Pass(
            session=request.session,
            samples=checked,
            loss=loss,
            params=losses.prepare(loss, params, inputs, max_seq_length=limits.max_seq_length),
            backward=backward,
        )
    )


def custom_work(request: pb.CustomForwardBackwardRequest, limits: Limits) -> PassWork:
    _check_chunks(request)
    decoded = [wire.sample(message, i) for i, message in enumerate(request.samples)]
    checked = samples.check(decoded, "cross_entropy", limits)
    gradients = [
        tensors.decode(tensor, what=f"Gradient {i}") for i, tensor in enumerate(request.gradients)
    ]
    return PassWork(
        work=Pass(
            session=request.session,
            samples=checked,
            backward=True,
            gradients=samples.check_gradients(checked, gradients),
        )
    )


def optim_step_work(request: pb.OptimStepRequest, optimizer: OptimizerConfig) -> OptimStepWork:
    """`optimizer`: the session's."""
    return OptimStepWork(params=optim_params(request, optimizer))


def weights_sync_work(request: pb.WeightsSyncRequest) -> WeightsSyncWork:
    accepted = (pb.WEIGHT_SYNC_TYPE_UNSPECIFIED, pb.WEIGHT_SYNC_TYPE_SYNCHRONOUS)
    if request.type not in accepted:
        known = request.type in pb.WeightSyncType.values()
        name = pb.WeightSyncType.Name(request.type) if known else str(request.type)
        raise fail(
            Reason.UNIMPLEMENTED,
            f"WeightsSync of type {name}: this server publishes synchronously only; use WEIGHT_SYNC_TYPE_SYNCHRONOUS.",
            type=name,
        )
    return WeightsSyncWork()


def save_checkpoint_work(request: pb.SaveCheckpointRequest) -> SaveCheckpointWork:
    if request.kind not in _KINDS:
        raise invalid("kind", request.kind, "CHECKPOINT_KIND_TRAINING or CHECKPOINT_KIND_INFERENCE")
    return SaveCheckpointWork(
        kind=_KINDS[request.kind],
        name=check_checkpoint_name(request.name),
        ttl_s=_ttl_s(request),
        overwrite=request.overwrite,
        user_metadata=check_metadata(dict(request.user_metadata)),
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


def _ttl_s(request: pb.SaveCheckpointRequest) -> float | None:
    if not request.HasField("ttl"):
        return None
    ttl_s = request.ttl.seconds + request.ttl.nanos / 1e9
    if not 0 < ttl_s <= _TEN_YEARS_S:
        raise invalid(
            "ttl", f"{ttl_s:g} s", "more than 0 and at most ten years", "Leave it out to keep it."
        )
    return ttl_s
