"""The parameters of an optimiser step, as they come over the wire. Pure.

Absent ones have the defaults that the contract names, which are Together's; an explicit 0 is 0. Tinker's clients send
each value.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from backend.services.fields import invalid
from backend.trainer.base import AdamParams, DimuonParams, MuonParams, OptimizerConfig, OptimParams
from backend.trainer.param_checks import check_optim
from together_post_training.errors import Reason, fail
from together_post_training.v1 import trainer_pb2 as pb

_NATIVE_ADAM = AdamParams(eps=1e-8, grad_clip_norm=1.0)
# The field that carries each family's parameters.
_FIELDS = {"adamw": "adam", "muon": "muon", "dimuon": "dimuon"}


def optim_params(request: pb.OptimStepRequest, optimizer: OptimizerConfig) -> OptimParams:
    """The parameters of one step.

    Args:
        optimizer: the session's.

    Raises:
        PostTrainingError: INVALID_ARGUMENT without parameters, for those of another family, and outside a range.
    """
    params = _params(request, wanted=_FIELDS[optimizer.family])
    check_optim(params, optimizer)
    return params


def _params(request: pb.OptimStepRequest, *, wanted: str) -> OptimParams:
    match request.WhichOneof("params"):
        case "adam":
            return replace(_NATIVE_ADAM, **_scalars(request.adam))
        case "muon":
            return replace(MuonParams(), **_scalars(request.muon), adam=_inner_adam(request.muon))
        case "dimuon":
            if not request.dimuon.HasField("learning_rate"):
                raise invalid("dimuon.learning_rate", "absent", "given: it has no default")
            return DimuonParams(**_scalars(request.dimuon))
        case _:
            defaults = "" if wanted == "dimuon" else " ({} for the defaults)"
            raise fail(
                Reason.INVALID_ARGUMENT,
                f"The optimiser's parameters are missing: set {wanted}{defaults}.",
                parameter=wanted,
            )


def _inner_adam(muon: pb.MuonParams) -> AdamParams:
    if muon.adam.grad_clip_norm != 0:
        raise invalid(
            "muon.adam.grad_clip_norm",
            muon.adam.grad_clip_norm,
            "absent",
            "All tensors are clipped together: set muon.grad_clip_norm.",
        )
    return replace(MuonParams().adam, **_scalars(muon.adam))


def _scalars(message: Message) -> dict[str, Any]:
    """Those that are present, by name."""
    return {
        field.name: value for field, value in message.ListFields() if field.message_type is None
    }
