"""What a server says about itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Of its context length, SGLang 0.5.23 keeps 6 tokens from prompts, and 2 from prompts with what follows them.
WINDOW_RESERVE = 8
_INPUT_RESERVE = 6
_SINCE = (0, 5, 9)

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "lm_head")
DENSE_MODULES = (*ATTENTION_MODULES, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """window: the longest prompt with its continuation; None: it does not say.

    lora_modules: the last parts of the names of layers that adapters may have; what has others, it ends at.
    max_loaded_loras: how many adapters it may have; None: any number.
    is_seeded: whether it has a use for seeds. weight_version: the name of the base weights it has now.
    """

    version: str
    has_tokenizer: bool
    window: int | None
    enable_lora: bool
    lora_modules: frozenset[str]
    max_lora_rank: int | None
    max_loaded_loras: int | None
    is_seeded: bool
    returns_experts: bool
    attention: str
    weight_version: str


def facts(server_info: Mapping[str, object]) -> Facts:
    """From the reply to GET /server_info.

    Raises:
        ValueError: it is no such reply, or a version is too old; says which.
    """
    version = server_info.get("version")
    if not isinstance(version, str):
        raise ValueError("it does not say which version of SGLang it is")
    if _parts(version) < _SINCE:
        raise ValueError(f"it runs SGLang {version}, and 0.5.9 or later is needed")
    input_limit = _count(server_info, "max_req_input_len")
    return Facts(
        version=version,
        has_tokenizer=not server_info.get("skip_tokenizer_init"),
        window=None if input_limit is None else input_limit + _INPUT_RESERVE - WINDOW_RESERVE,
        enable_lora=bool(server_info.get("enable_lora")),
        lora_modules=_lora_modules(server_info.get("lora_target_modules")),
        max_lora_rank=_count(server_info, "max_lora_rank"),
        max_loaded_loras=_count(server_info, "max_loaded_loras"),
        is_seeded=bool(server_info.get("enable_deterministic_inference")),
        returns_experts=bool(server_info.get("enable_return_routed_experts")),
        attention=str(server_info.get("attention_backend") or ""),
        weight_version=str(server_info.get("weight_version") or "default"),
    )


def _lora_modules(value: object) -> frozenset[str]:
    names = [str(name) for name in value] if isinstance(value, list) else []
    return frozenset(DENSE_MODULES if "all" in names else names)


def _count(info: Mapping[str, object], name: str) -> int | None:
    value = info.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _parts(version: str) -> tuple[int, ...]:
    leading = version.split("+")[0].split(".")[:3]
    digits = ["".join(c for c in part if c.isdigit()) for part in leading]
    return tuple(int(d) if d else 0 for d in digits)
