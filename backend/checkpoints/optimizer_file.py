"""An optimiser's state as a file: tensors by moment and name, with its family and number of steps. No torch."""

from __future__ import annotations

from pathlib import Path

from backend.checkpoints.tensor_file import read_float32, write_float32
from backend.trainer.base import Array, OptimizerState


def write_optimizer(path: Path, state: OptimizerState) -> None:
    """Keys are `{moment}.{tensor}`, such as `exp_avg.lm_head.weight`."""
    tensors = {
        f"{moment}.{name}": tensor
        for moment, by_name in state.moments.items()
        for name, tensor in by_name.items()
    }
    write_float32(path, tensors, {"num_steps": str(state.num_steps), "family": state.family})


def read_optimizer(path: Path) -> OptimizerState:
    """Raises ValueError for what `write_optimizer` did not write."""
    tensors, metadata = read_float32(path)
    num_steps = metadata.get("num_steps")
    if num_steps is None or not num_steps.isdecimal():
        raise ValueError("it lacks num_steps")
    moments: dict[str, dict[str, Array]] = {}
    for key, tensor in tensors.items():
        moment, _, name = key.partition(".")
        moments.setdefault(moment, {})[name] = tensor
    return OptimizerState(
        family=metadata.get("family", "adamw"), num_steps=int(num_steps), moments=moments
    )
