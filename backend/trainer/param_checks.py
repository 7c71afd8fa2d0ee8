"""What every trainer refuses of an optimiser step's parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

from backend.trainer.base import (
    AdamParams,
    DimuonParams,
    MuonParams,
    OptimizerConfig,
    OptimParams,
)
from together_post_training.errors import PostTrainingError, Reason, fail

_FAMILIES = {AdamParams: "adamw", MuonParams: "muon", DimuonParams: "dimuon"}
_MAX_NEWTON_SCHULZ_STEPS = 20


def check_optim(params: OptimParams, optimizer: OptimizerConfig) -> None:
    """Raises INVALID_ARGUMENT for parameters of another family than the session's optimiser, and for the first one
    outside its range, with the value and the range."""
    _check_family(params, optimizer)
    _check_params(params)


def _check_family(params: OptimParams, optimizer: OptimizerConfig) -> None:
    family = _FAMILIES[type(params)]
    if family != optimizer.family:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"This session's optimiser is {optimizer.family}, and the parameters are for {family}: send those of "
            f"{optimizer.family}. A session keeps the optimiser it was made with.",
            optimizer=optimizer.family,
            parameters=family,
        )


def _check_params(params: OptimParams) -> None:
    match params:
        case AdamParams():
            _check_adam(params, "AdamW")
        case MuonParams():
            _check_numbers("Muon", params, ("learning_rate", "weight_decay", "grad_clip_norm"))
            _check_fraction("Muon", params, "momentum")
            if not 1 <= params.newton_schulz_steps <= _MAX_NEWTON_SCHULZ_STEPS:
                raise _bad_parameter(
                    "Muon",
                    "newton_schulz_steps",
                    params.newton_schulz_steps,
                    f"1 to {_MAX_NEWTON_SCHULZ_STEPS}",
                )
            _check_adam(params.adam, "Muon's adam")
        case DimuonParams():
            _check_numbers("Dimuon", params, ("learning_rate", "grad_clip_norm"))
            _check_fraction("Dimuon", params, "beta1")


def _check_adam(params: AdamParams, what: str) -> None:
    _check_numbers(what, params, ("learning_rate", "weight_decay", "grad_clip_norm"))
    if not (math.isfinite(params.eps) and params.eps > 0):
        raise _bad_parameter(what, "eps", params.eps, "a finite number above 0")
    _check_fraction(what, params, "beta1")
    _check_fraction(what, params, "beta2")


def _check_numbers(what: str, params: OptimParams, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(params, name)
        if not (math.isfinite(value) and value >= 0):
            none = " (no clipping)" if name == "grad_clip_norm" else ""
            raise _bad_parameter(what, name, value, f"a finite number, 0{none} or above")


def _check_fraction(what: str, params: OptimParams, name: str) -> None:
    value = getattr(params, name)
    if not 0 <= value < 1:
        raise _bad_parameter(what, name, value, "at least 0 and below 1")


def _bad_parameter(what: str, name: str, value: float, accepted: str) -> PostTrainingError:
    return fail(
        Reason.INVALID_ARGUMENT,
        f"{what} {name} is {value}: it must be {accepted}.",
        parameter=name,
        value=value,
    )
