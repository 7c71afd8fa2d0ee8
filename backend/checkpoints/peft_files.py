"""Tensors and configuration as PEFT reads them, and optimiser state beside them.

No torch: safetensors' numpy side writes the same bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from backend.trainer.base import Adapter, Array, LoraConfig, OptimizerState, PeftTargets

PREFIX = "base_model.model."
SUFFIXES = (".lora_A.weight", ".lora_B.weight")


def encode_adapter(adapter: Adapter) -> bytes:
    """adapter_model.safetensors. PEFT writes the same metadata, and transformers wants it."""
    return save(_contiguous(adapter.tensors), metadata={"format": "pt"})


def decode_adapter(data: bytes, lora: LoraConfig) -> Adapter:
    """Raises ValueError for what is not a safetensors file of float32."""
    return Adapter(lora=lora, tensors=_load_float32(data))


def encode_optimizer(state: OptimizerState) -> bytes:
    """optimizer.safetensors; see `optimizer_tensors`."""
    tensors, metadata = optimizer_tensors(state)
    return save(_contiguous(tensors), metadata=metadata)


def decode_optimizer(data: bytes) -> OptimizerState:
    """Raises ValueError for what `encode_optimizer` did not write."""
    return optimizer_from(_load_float32(data), _metadata(data))


def optimizer_tensors(state: OptimizerState) -> tuple[dict[str, Array], dict[str, str]]:
    """(tensors, metadata): keys `{moment}.{tensor}`, such as `exp_avg.lm_head.weight`; family and number of steps."""
    tensors = {
        f"{moment}.{name}": tensor
        for moment, by_name in state.moments.items()
        for name, tensor in by_name.items()
    }
    return tensors, {"num_steps": str(state.num_steps), "family": state.family}


def optimizer_from(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> OptimizerState:
    """The other way. Raises ValueError."""
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


def peft_config(adapter: Adapter, base_model: str) -> bytes:
    """adapter_config.json: what PEFT's LoraConfig.from_pretrained reads."""
    targets = adapter.targets or PeftTargets(modules=module_paths(adapter.tensors))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.lora.rank,
        "lora_alpha": _plain_number(adapter.lora.alpha),
        "lora_dropout": adapter.lora.dropout,
        "target_modules": list(targets.modules),
        "target_parameters": list(targets.parameters) or None,
        "bias": "none",
        "fan_in_fan_out": targets.fan_in_fan_out,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def module_paths(names: Iterable[str]) -> tuple[str, ...]:
    """The modules that tensors of these names belong to, each once, in order."""
    return tuple(
        dict.fromkeys(
            name.removeprefix(PREFIX).removesuffix(suffix)
            for name in names
            for suffix in SUFFIXES
            if name.endswith(suffix)
        )
    )


def _plain_number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


def _contiguous(tensors: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.ascontiguousarray(t, dtype=np.float32) for name, t in tensors.items()}


def _load_float32(data: bytes) -> dict[str, Array]:
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise ValueError(f"it is not a whole safetensors file ({error})") from None
    require_float32(tensors)
    return tensors


def require_float32(tensors: Mapping[str, Array]) -> None:
    """Raises ValueError, naming a tensor that is not."""
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32:
            raise ValueError(f"{name} is {tensor.dtype}, must be float32")


def _metadata(data: bytes) -> dict[str, str]:
    """Of a file that `load` has accepted. (safetensors reads it only from paths.)"""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]).get("__metadata__", {})
