"""Tensors and configuration as PEFT reads them, and optimiser state beside them.

No torch: safetensors' numpy side writes the same bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from backend.trainer.base import Adapter, Array, LoraConfig, OptimizerState

_PREFIX = "base_model.model."
_SUFFIXES = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")


def encode_adapter(adapter: Adapter) -> bytes:
    """adapter_model.safetensors. PEFT writes the same metadata, and transformers wants it."""
    return save(_contiguous(adapter.tensors), metadata={"format": "pt"})


def decode_adapter(data: bytes, lora: LoraConfig) -> Adapter:
    """Raises ValueError for what is not a safetensors file of float32."""
    return Adapter(lora=lora, tensors=_load_float32(data))


def encode_optimizer(state: OptimizerState) -> bytes:
    """Keys `exp_avg.{tensor}` and `exp_avg_sq.{tensor}`; the number of steps as metadata."""
    tensors = {f"exp_avg.{name}": t for name, t in state.exp_avg.items()}
    tensors |= {f"exp_avg_sq.{name}": t for name, t in state.exp_avg_sq.items()}
    return save(_contiguous(tensors), metadata={"num_steps": str(state.num_steps)})


def decode_optimizer(data: bytes) -> OptimizerState:
    """Raises ValueError for what `encode_optimizer` did not write."""
    tensors = _load_float32(data)
    num_steps = _metadata(data).get("num_steps")
    if num_steps is None or not num_steps.isdecimal():
        raise ValueError("it lacks num_steps")
    return OptimizerState(
        num_steps=int(num_steps),
        exp_avg=_with_prefix(tensors, "exp_avg."),
        exp_avg_sq=_with_prefix(tensors, "exp_avg_sq."),
    )


def peft_config(adapter: Adapter, base_model: str) -> bytes:
    """adapter_config.json: what PEFT's LoraConfig.from_pretrained reads."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.lora.rank,
        "lora_alpha": _plain_number(adapter.lora.alpha),
        "lora_dropout": 0.0,
        "target_modules": target_modules(adapter.tensors),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def target_modules(tensors: Mapping[str, Array]) -> list[str]:
    """The last parts of the adapted modules' names, as PEFT and the samplers that read its files match them."""
    modules = set()
    for name in tensors:
        for suffix in _SUFFIXES:
            if name.endswith(suffix):
                modules.add(name.removeprefix(_PREFIX).removesuffix(suffix).rpartition(".")[2])
    return sorted(modules)


def _plain_number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


def _contiguous(tensors: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.ascontiguousarray(t, dtype=np.float32) for name, t in tensors.items()}


def _load_float32(data: bytes) -> dict[str, Array]:
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise ValueError(f"it is not a whole safetensors file ({error})") from None
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32:
            raise ValueError(f"{name} is {tensor.dtype}, must be float32")
    return tensors


def _metadata(data: bytes) -> dict[str, str]:
    """Of a file that `load` has accepted. (safetensors reads it only from paths.)"""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]).get("__metadata__", {})


def _with_prefix(tensors: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
