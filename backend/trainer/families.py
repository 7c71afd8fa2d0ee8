"""The architectures whose layers are known, and what these are called.

An architecture is what the config says (`model_type`), whatever the model is called or wherever it lies. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from together_post_training.errors import Reason, fail

# What a router makes of its logits, to choose and weigh experts by.
Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Names of layers, matched as PEFT does: a whole path, or its last parts.

    attn, mlp: linear layers of the attention and of MLPs outside the experts.
    experts: matrices of all experts of an MLP, each a parameter of shape (E, out, in).
    router: how experts are scored, where there are any.
    """

    attn: tuple[str, ...]
    mlp: tuple[str, ...]
    experts: tuple[str, ...] = ()
    router: Scores = "softmax"
    unembed: tuple[str, ...] = ("lm_head",)

    @property
    def default(self) -> tuple[str, ...]:
        """What fine-tuning services train unless told otherwise: of a mixture of experts, its attention alone."""
        return self.attn if self.experts else self.attn + self.mlp


_SEPARATE_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SEPARATE_MLP = ("gate_proj", "up_proj", "down_proj")
_DENSE = Family(attn=_SEPARATE_ATTENTION, mlp=SEPARATE_MLP)
_FUSED_MLP = Family(attn=_SEPARATE_ATTENTION, mlp=("gate_up_proj", "down_proj"))
_EXPERTS = Family(
    attn=_SEPARATE_ATTENTION,
    mlp=SEPARATE_MLP,
    experts=("experts.gate_up_proj", "experts.down_proj"),
)

# Those that the tests compare with plain transformers and PEFT.
_DENSE_TYPES = (
    *("gemma", "gemma3_text", "llama", "mistral", "olmo", "olmo2", "olmo3"),
    *("qwen2", "qwen3", "seed_oss", "smollm3"),
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    dict.fromkeys(_DENSE_TYPES, _DENSE)
    | dict.fromkeys(("mixtral", "olmoe", "qwen2_moe", "qwen3_moe"), _EXPERTS)
    | dict.fromkeys(("glm", "glm4"), _FUSED_MLP)
    | {
        "glm4_moe": replace(_EXPERTS, router="sigmoid"),
        "gpt2": Family(attn=("attn.c_attn", "attn.c_proj"), mlp=("mlp.c_fc", "mlp.c_proj")),
        "phi": Family(attn=("q_proj", "k_proj", "v_proj", "dense"), mlp=("fc1", "fc2")),
        "phi3": Family(attn=("qkv_proj", "o_proj"), mlp=("gate_up_proj", "down_proj")),
        "starcoder2": Family(attn=_SEPARATE_ATTENTION, mlp=("c_fc", "c_proj")),
    }
)


def family(model_type: str) -> Family:
    """Raises UNIMPLEMENTED with the list of known architectures."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    raise fail(
        Reason.UNIMPLEMENTED,
        f"Model type {model_type!r} cannot be trained: this server knows the layers of "
        f"{', '.join(sorted(FAMILIES))}.",
        model_type=model_type,
    )


def matches(path: str, names: Iterable[str]) -> bool:
    """Whether one of the names is the path, or its last parts."""
    return any(path == name or path.endswith(f".{name}") for name in names)
