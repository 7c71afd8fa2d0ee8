"""An adapter as a directory that SGLang reads. Pure but for the writing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from backend.checkpoints import peft_files
from backend.checkpoints.manifest import ADAPTER_WEIGHTS, PEFT_CONFIG
from backend.store import write_whole
from backend.trainer.base import Adapter
from backend.trainer.targets import Layer, tensor_names

# SGLang computes these as one layer, and takes an adapter of one of them to have all: it refuses some that do not, and
# ends at the first sample of others (0.5.23, lora/lora.py).
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def write(directory: Path, adapter: Adapter, base_model: str) -> None:
    directory.mkdir(parents=True)
    weights = peft_files.encode_adapter(adapter)
    write_whole(directory / ADAPTER_WEIGHTS, weights, sync=False)
    config = peft_files.peft_config(adapter, base_model)
    write_whole(directory / PEFT_CONFIG, config, sync=False)


def completed(adapter: Adapter, layers: Mapping[str, Layer]) -> Adapter:
    """The same adapter, with pairs of zeros for those layers that SGLang expects beside the ones that it has."""
    tensors = dict(adapter.tensors)
    for path in peft_files.module_paths(adapter.tensors):
        for other in _fused_with(path):
            if other in layers and tensor_names(other)[0] not in tensors:
                shapes = layers[other].shapes(adapter.lora.rank)
                zeros = (np.zeros(shape, np.float32) for shape in shapes)
                tensors |= dict(zip(tensor_names(other), zeros, strict=True))
    return Adapter(lora=adapter.lora, tensors=tensors)


def _fused_with(path: str) -> Sequence[str]:
    parent, _, name = path.rpartition(".")
    for names in _FUSED:
        if name in names:
            return [f"{parent}.{other}" for other in names if other != name]
    return ()
