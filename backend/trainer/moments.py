"""Which moments an optimiser keeps, and of which tensors: the same for every engine, and in checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from backend.trainer.base import OptimizerConfig

Shape = tuple[int, ...]

_OF_ADAMW = ("exp_avg", "exp_avg_sq")
_OF_MUON = "momentum_buffer"


def moment_shapes(
    optimizer: OptimizerConfig, shapes: Mapping[str, Shape], matrices: Collection[str]
) -> dict[str, dict[str, Shape]]:
    """By moment, then by tensor. `matrices`: the tensors that Muon steps; AdamW steps the others."""
    if optimizer.family == "adamw":
        return {moment: dict(shapes) for moment in _OF_ADAMW}
    of_muon = {name: shape for name, shape in shapes.items() if name in matrices}
    others = {name: shape for name, shape in shapes.items() if name not in matrices}
    by_moment = {_OF_MUON: of_muon} if of_muon else {}
    return by_moment | {moment: others for moment in _OF_ADAMW if others}
