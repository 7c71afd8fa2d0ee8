"""Tensors and configuration as PEFT reads them.

No torch: safetensors' numpy side writes the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from safetensors import SafetensorError
from safetensors.numpy import load, save

from backend.checkpoints.tensor_file import contiguous, require_float32
from backend.trainer.base import Adapter, Array, LoraConfig, PeftTargets

PREFIX = "base_model.model."
SUFFIXES = (".lora_A.weight", ".lora_B.weight")


def encode_adapter(adapter: Adapter) -> bytes:
    """adapter_model.safetensors. PEFT writes the same metadata, and transformers wants it."""
    return save(contiguous(adapter.tensors), metadata={"format": "pt"})


def decode_adapter(data: bytes, lora: LoraConfig) -> Adapter:
    """Raises ValueError for what is not a safetensors file of float32."""
    return Adapter(lora=lora, tensors=_load_float32(data))


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


def _load_float32(data: bytes) -> dict[str, Array]:
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise ValueError(f"it is not a whole safetensors file ({error})") from None
    require_float32(tensors)
    return tensors
