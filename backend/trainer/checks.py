"""What every trainer refuses, in one place: adapter configurations, foreign weights and optimiser state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from backend.trainer.base import (
    Adapter,
    Array,
    FullWeights,
    LoraConfig,
    ModelInfo,
    OptimizerConfig,
    OptimizerState,
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
_STATE = _Of(
    whole="this session's weights",
    advice="What is trained and the base model must be those it was saved with.",
)


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


def check_optimizer_state(
    state: OptimizerState,
    optimizer: OptimizerConfig,
    shapes: Mapping[str, Mapping[str, Shape]],
) -> None:
    """Raises INCOMPATIBLE_CHECKPOINT unless the state is of this optimiser and every moment fits.

    `shapes`: of the session's own moments, by moment and tensor.
    """
    if state.family != optimizer.family:
        raise fail(
            Reason.INCOMPATIBLE_CHECKPOINT,
            f"The checkpoint's optimiser state is {state.family}'s, this session's optimiser is {optimizer.family}. "
            f"Load the weights alone, or load it into a session whose optimiser is {state.family}.",
            expected=optimizer.family,
            got=state.family,
        )
    if state.moments.keys() != shapes.keys():
        raise fail(
            Reason.INCOMPATIBLE_CHECKPOINT,
            f"The checkpoint's optimiser state holds {sorted(state.moments)}, this session's {sorted(shapes)}.",
            expected=sorted(shapes),
            got=sorted(state.moments),
        )
    for moment, tensors in state.moments.items():
        _check_tensors(f"moments {moment}", tensors, shapes[moment], _STATE)


def check_room_for_full_weights(running: Sequence[str], model: str) -> None:
    """Raises RESOURCE_EXHAUSTED while a session trains full weights; `running`: those that do."""
    if running:
        raise fail(
            Reason.RESOURCE_EXHAUSTED,
            f"Session {running[0]!r} trains the full weights of {model!r}, and one can at a time: close its client or "
            "stop it (SessionService.StopSession) first, or train with LoRA, which any number of sessions can.",
            session=running[0],
            base_model=model,
        )


def require_adapter(weights: Weights) -> Adapter:
    """Raises INCOMPATIBLE_CHECKPOINT for full weights."""
    if isinstance(weights, Adapter):
        return weights
    raise fail(
        Reason.INCOMPATIBLE_CHECKPOINT,
        "The checkpoint holds full weights, this session trains a LoRA adapter: load it into one of full weights.",
    )


def check_adapter(adapter: Adapter, lora: LoraConfig, shapes: Mapping[str, Shape]) -> None:
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
