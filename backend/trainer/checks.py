"""What every trainer refuses, in one place: adapter configurations, step parameters, foreign weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from backend.trainer.base import (
    AdamParams,
    Adapter,
    Array,
    FullWeights,
    LoraConfig,
    ModelInfo,
    OptimizerConfig,
    OptimizerState,
    OptimParams,
    Weights,
)
from together_post_training.errors import Reason, fail

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Of:
    """What tensors are to fit, and what to do where they do not: for messages."""

    whole: str
    advice: str


_ADAPTER = _Of(
    whole="this session's adapter",
    advice="Rank, trained modules and base model must be those it was saved with.",
)
_MODEL = _Of(whole="this model", advice="The base model must be the one it was saved with.")


def check_lora(lora: LoraConfig, model: ModelInfo) -> None:
    """Raises INVALID_ARGUMENT for a rank, alpha or choice of modules that cannot be trained."""
    if not 1 <= lora.rank <= model.max_lora_rank:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"LoRA rank {lora.rank}: this model takes 1 to {model.max_lora_rank}.",
            rank=lora.rank,
            max_lora_rank=model.max_lora_rank,
        )
    if not (math.isfinite(lora.alpha) and lora.alpha > 0):
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"LoRA alpha {lora.alpha}: it must be a finite number above 0 (the adapter is scaled by alpha / rank).",
            alpha=lora.alpha,
        )
    if not 0 <= lora.dropout < 1:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"LoRA dropout {lora.dropout}: it must be at least 0 and below 1.",
            dropout=lora.dropout,
        )
    if not lora.target_modules and not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise fail(
            Reason.INVALID_ARGUMENT,
            "Nothing to train: set at least one of train_attn, train_mlp, train_unembed.",
        )


def check_optim(params: OptimParams, optimizer: OptimizerConfig) -> None:
    """Raises INVALID_ARGUMENT for parameters outside their range, or of another family than the optimiser."""
    if not isinstance(params, AdamParams) or optimizer.family != "adamw":
        raise fail(
            Reason.UNIMPLEMENTED, f"Optimiser {optimizer.family!r} is not there yet: use AdamW."
        )
    check_adam(params)


def check_adam(params: AdamParams) -> None:
    """Raises INVALID_ARGUMENT for the first parameter outside its range, with the value."""
    for name, low, accepted in (
        ("learning_rate", 0.0, "a finite number, 0 or above"),
        ("weight_decay", 0.0, "a finite number, 0 or above"),
        ("grad_clip_norm", 0.0, "a finite number, 0 (no clipping) or above"),
        ("eps", math.ulp(0.0), "a finite number above 0"),
    ):
        value = getattr(params, name)
        if not (math.isfinite(value) and value >= low):
            raise _bad_adam(name, value, accepted)
    for name in ("beta1", "beta2"):
        value = getattr(params, name)
        if not 0 <= value < 1:
            raise _bad_adam(name, value, "at least 0 and below 1")


def check_adapter(
    adapter: Adapter,
    optimizer: OptimizerState | None,
    lora: LoraConfig,
    shapes: Mapping[str, Shape],
) -> None:
    """Raises INCOMPATIBLE_CHECKPOINT unless every tensor fits a session of this configuration.

    `shapes`: those of the session's own tensors, by name.
    """
    _check_tensors("weights", adapter.tensors, shapes, _ADAPTER)
    if not math.isclose(adapter.lora.scale, lora.scale):
        raise fail(
            Reason.INCOMPATIBLE_CHECKPOINT,
            f"The checkpoint scales its adapter by {adapter.lora.scale:g} (alpha / rank), this session by "
            f"{lora.scale:g}: the same weights would be another model. Load it into a session of the same alpha.",
            expected=lora.scale,
            got=adapter.lora.scale,
        )
    if optimizer is not None:
        for moment, tensors in optimizer.moments.items():
            _check_tensors(moment, tensors, shapes, _ADAPTER)


def check_full_weights(weights: Weights, shapes: Mapping[str, Shape]) -> FullWeights:
    """The weights, if every tensor fits the model, whose own are of these shapes, by name.

    Raises:
        PostTrainingError: INCOMPATIBLE_CHECKPOINT, naming what is missing, unexpected, misshapen or not finite.
    """
    if not isinstance(weights, FullWeights):
        raise fail(
            Reason.INCOMPATIBLE_CHECKPOINT,
            "The checkpoint holds a LoRA adapter, this session trains full weights: load it into a LoRA session.",
        )
    _check_tensors("weights", weights.tensors, shapes, _MODEL)
    return weights


def _bad_adam(name: str, value: float, accepted: str):
    return fail(
        Reason.INVALID_ARGUMENT,
        f"AdamW {name} is {value}: it must be {accepted}.",
        parameter=name,
        value=value,
    )


def _check_tensors(
    what: str, tensors: Mapping[str, Array], shapes: Mapping[str, Shape], of: _Of
) -> None:
    missing = sorted(shapes.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - shapes.keys())
    misshapen = [
        f"{name} is {list(tensors[name].shape)}, must be {list(shape)}"
        for name, shape in sorted(shapes.items())
        if name in tensors and tensors[name].shape != shape
    ]
    non_finite = sorted(name for name, array in tensors.items() if not np.isfinite(array).all())
    faults = [
        f"{kind}: {_some(names)}"
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("misshapen", misshapen),
            ("not finite", non_finite),
        )
        if names
    ]
    if faults:
        raise fail(
            Reason.INCOMPATIBLE_CHECKPOINT,
            f"The checkpoint's {what} do not fit {of.whole}: {'; '.join(faults)}. {of.advice}",
            what=what,
        )


def _some(names: list[str], most: int = 3) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
