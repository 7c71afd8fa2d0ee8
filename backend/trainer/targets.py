"""Which linear layers an adapter may train, by architecture.

The architecture is what the config says (`model_type`), whatever the model is called or wherever it lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from backend.trainer.base import FAMILY_DEFAULT, LoraConfig
from together_post_training.errors import Reason, fail

# PEFT's name for a tensor of the module at {path}: its model wraps ours twice.
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Names of linear layers, within a layer's attention, within its MLP, and of the output head."""

    attn: tuple[str, ...]
    mlp: tuple[str, ...]
    unembed: tuple[str, ...] = ("lm_head",)


_SEPARATE_PROJECTIONS = Family(
    attn=("q_proj", "k_proj", "v_proj", "o_proj"),
    mlp=("gate_proj", "up_proj", "down_proj"),
)

# Those that the tests compare with plain transformers and PEFT.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    dict.fromkeys(
        ("gemma3_text", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3"),
        _SEPARATE_PROJECTIONS,
    )
)


def family(model_type: str) -> Family:
    """Raises UNIMPLEMENTED with the list of known architectures."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    raise fail(
        Reason.UNIMPLEMENTED,
        f"Model type {model_type!r} cannot be trained yet: this server knows the layers of "
        f"{', '.join(sorted(FAMILIES))}.",
        model_type=model_type,
    )


def linear_layers(module: PreTrainedModel) -> dict[str, nn.Linear]:
    """Every layer that some adapter may train, by path, in the model's order."""
    known = family(module.config.model_type)
    names = {*known.attn, *known.mlp, *known.unembed}
    return {
        path: layer
        for path, layer in module.named_modules()
        if path.rsplit(".", 1)[-1] in names and isinstance(layer, nn.Linear)
    }


def trained_names(model_type: str, lora: LoraConfig) -> frozenset[str]:
    """Names of the layers that an adapter of this configuration trains."""
    known = family(model_type)
    if lora.target_modules not in ((), (FAMILY_DEFAULT,)):
        raise fail(
            Reason.UNIMPLEMENTED,
            f"target_modules {list(lora.target_modules)}: use train_attn, train_mlp and train_unembed.",
        )
    by_family = bool(lora.target_modules)
    return frozenset(
        (
            *known.attn * (lora.train_attn or by_family),
            *known.mlp * (lora.train_mlp or by_family),
            *known.unembed * lora.train_unembed,
        )
    )


def tensor_names(path: str) -> tuple[str, str]:
    """(A's name, B's name), as PEFT's file format gives them."""
    return f"{PEFT_PREFIX}{path}.lora_A.weight", f"{PEFT_PREFIX}{path}.lora_B.weight"
