"""Tinker's optimisers to messages and back. Pure; reads what it is given by attribute.

AdamW and Dimuon have types of their own in Tinker. Muon is reached through the open bases of those types, which are in
`tinker.types.optimizer`:

    optimizer=OptimizerConfigBase(type="muon", scaling_strategy="original")
    optim_step(OptimParamsBase(type="muon", learning_rate=0.02, momentum=0.95))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tinker import types

from tinker_compat import optimizer_types
from tinker_compat.conversion import set_fields
from tinker_compat.errors import refuse
from together_post_training.v1 import sessions_pb2, trainer_pb2

_ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
_MUON = ("learning_rate", "momentum", "newton_schulz_steps", "weight_decay", "grad_clip_norm")
_DIMUON = ("learning_rate", "beta1", "grad_clip_norm")
_DIMUON_VERSION = 1
_SCALINGS = {
    "match_adam": sessions_pb2.MUON_SCALING_STRATEGY_MATCH_ADAM,
    "original": sessions_pb2.MUON_SCALING_STRATEGY_ORIGINAL,
}


def to_config(optimizer: Any) -> sessions_pb2.OptimizerConfig:
    """An optimiser that a session is made with. None: AdamW.

    Raises:
        BadRequestError: for one that is not there, naming those that are.
    """
    config = sessions_pb2.OptimizerConfig()
    family = "adamw" if optimizer is None else getattr(optimizer, "type", None)
    if family == "adamw":
        _extra(optimizer, ())
        config.adamw.SetInParent()
    elif family == "dimuon":
        _extra(optimizer, ("version",))
        version = getattr(optimizer, "version", _DIMUON_VERSION)
        if version != _DIMUON_VERSION:
            refuse(f"Dimuon of version {version!r}: this service has version {_DIMUON_VERSION}.")
        config.dimuon.SetInParent()
    elif family == "muon":
        config.muon.scaling_strategy = _scaling(_extra(optimizer, ("scaling_strategy",)))
    else:
        refuse(
            f"optimizer={optimizer!r}: it must be AdamOptimizerConfig(), DimuonOptimizerConfig(), or "
            "OptimizerConfigBase(type='muon')."
        )
    return config


def from_config(config: sessions_pb2.OptimizerConfig) -> Any:
    """What Tinker's GetInfoResponse shows of a session's optimiser."""
    family = config.WhichOneof("family") or "adamw"
    if family == "dimuon":
        return types.DimuonOptimizerConfig()
    if family == "adamw":
        return types.AdamOptimizerConfig()
    (scaling,) = (n for n, value in _SCALINGS.items() if value == config.muon.scaling_strategy)
    return types.optimizer.OptimizerConfigBase(type=family, scaling_strategy=scaling)  # pyright: ignore[reportCallIssue]


def to_optim_step(optim_params: Any) -> trainer_pb2.OptimStepRequest:
    """Parameters of one step; every value is sent, zeros too. A dict holds the fields of AdamParams.

    Raises:
        TypeError: for what is no parameters, or a value of another type.
        ValidationError: for a dict, or an open type named as one of Tinker's, with fields that this one lacks.
        BadRequestError: for parameters of an optimiser that is not there.
    """
    if isinstance(optim_params, Mapping):
        optim_params = types.AdamParams(**optim_params)
    optim_params = _closed(optim_params)
    request = trainer_pb2.OptimStepRequest()
    if isinstance(optim_params, types.AdamParams):
        set_fields(request.adam, **{name: getattr(optim_params, name) for name in _ADAM})
        return request
    family = getattr(optim_params, "type", None)
    if not isinstance(family, str):
        raise TypeError("Expected AdamParams or OptimParamsBase")
    if family == "dimuon":
        set_fields(request.dimuon, **{name: getattr(optim_params, name) for name in _DIMUON})
        # Tinker's: "Nonpositive values disable gradient clipping."
        request.dimuon.grad_clip_norm = max(0.0, request.dimuon.grad_clip_norm)
    elif family == "muon":
        given = _extra(optim_params, (*_MUON, "adam"))
        adam = given.pop("adam", None)
        request.muon.SetInParent()
        set_fields(request.muon, **given)
        if adam is not None:
            inner = to_optim_step(adam).adam
            request.muon.adam.CopyFrom(inner)
    else:
        refuse(f"Optimiser parameters of type {family!r}: send 'adamw', 'dimuon' or 'muon'.")
    return request


def _closed(optim_params: Any) -> Any:
    """An open type that is named as one with a type of its own becomes that one, with its defaults and checks."""
    fields = getattr(optim_params, "model_extra", None)
    family = getattr(optim_params, "type", None)
    if fields is None or family not in ("adamw", "dimuon"):
        return optim_params
    dimuon = getattr(types, "DimuonParams", optimizer_types.DimuonParams)
    return (types.AdamParams if family == "adamw" else dimuon)(**fields)


def _extra(given: Any, known: Iterable[str]) -> dict[str, Any]:
    """The fields that an open type was given beside its name."""
    fields = dict(getattr(given, "model_extra", None) or {})
    unknown = sorted(fields.keys() - set(known))
    if unknown:
        accepted = ", ".join(known) or "none here: they come with each optim_step"
        refuse(f"{given.type} has no {', '.join(unknown)}: its parameters are {accepted}.")
    return fields


def _scaling(fields: Mapping[str, Any]) -> sessions_pb2.MuonScalingStrategy:
    name = fields.get("scaling_strategy", "match_adam")
    if name not in _SCALINGS:
        refuse(f"scaling_strategy={name!r}: it must be one of {', '.join(_SCALINGS)}.")
    return _SCALINGS[name]
