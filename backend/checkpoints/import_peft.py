"""Adapters that PEFT saved, as this service keeps them: the same numbers, or a refusal that says why.

No torch, and no pickles: the tensors must be a safetensors file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backend.checkpoints.manifest import ADAPTER_WEIGHTS, PEFT_CONFIG
from backend.checkpoints.peft_files import PREFIX, SUFFIXES, module_paths
from backend.checkpoints.tensor_file import TensorFile, find_base_tensor
from backend.trainer.base import Adapter, Array, LoraConfig, PeftTargets
from backend.trainer.families import matches
from together_post_training.errors import PostTrainingError, Reason, fail

# Settings that say how an adapter came about, or what a reader may do, but not what it computes.
_INFORMATION = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",
        "inference_mode",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
    )
)
# Those that `_settings` and `_lora` read. Any other setting must be off.
_READ = frozenset(
    (
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "fan_in_fan_out",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "task_type",
        "use_rslora",
    )
)
# Other ways to begin change the base model's weights too, and the adapter means nothing without that change.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
# What PEFT adds to the adapter of an embedding or an output head: the layer's own weight.
_BASE_WEIGHT = re.compile(r"(.*?)(\.base_layer)?\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedAdapter:
    """base_model: what the adapter's files call it; empty if they do not say."""

    adapter: Adapter
    base_model: str


def read_adapter(directory: Path, base: Path | None = None) -> ImportedAdapter:
    """Reads the files that PEFT's `save_pretrained` wrote.

    Whether they fit the base model shows when they are loaded.

    Args:
        base: the base model's directory. With an adapter of the output head, PEFT saves the head itself too, which must
            be the base model's.

    Raises:
        PostTrainingError: INCOMPATIBLE_CHECKPOINT, naming the file, setting or tensor that cannot be taken over.
    """
    config = _config(directory)
    _check_settings(config)
    tensors = _tensors(directory, base)
    lora = _lora(config, _modules(config, tensors))
    _check_shapes(tensors, lora, config)
    adapter = Adapter(lora=lora, tensors=tensors, targets=_targets(config, tensors))
    return ImportedAdapter(
        adapter=adapter, base_model=str(config.get("base_model_name_or_path") or "")
    )


def _config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / PEFT_CONFIG).read_bytes())
    except FileNotFoundError:
        raise _refused(
            f"{directory} has no {PEFT_CONFIG}: is it a directory that PEFT saved?"
        ) from None
    except ValueError as error:
        raise _refused(f"{directory / PEFT_CONFIG} is no JSON ({error}).") from None
    if not isinstance(config, dict):
        raise _refused(f"{directory / PEFT_CONFIG} holds no settings.")
    return config


def _check_settings(config: Mapping[str, Any]) -> None:
    accepted: dict[str, tuple[object, ...]] = {
        "peft_type": ("LORA",),
        "task_type": ("CAUSAL_LM", None),
        "bias": ("none", None),
        "init_lora_weights": _INITS,
        "rank_pattern": _uniform(config, "rank_pattern", "r"),
        "alpha_pattern": _uniform(config, "alpha_pattern", "lora_alpha"),
    }
    for name, values in accepted.items():
        if name in config and config[name] not in values:
            raise _setting(name, config[name], "only " + " or ".join(repr(v) for v in values))
    if "peft_type" not in config:
        raise _refused(f"{PEFT_CONFIG} has no peft_type: it must be 'LORA'.")
    for name in sorted(config.keys() - _READ - _INFORMATION):
        if config[name]:
            raise _setting(name, config[name], "this setting must be off")


def _uniform(config: Mapping[str, Any], pattern: str, setting: str) -> tuple[object, ...]:
    """A pattern that gives every module the value that it has anyway is as good as none."""
    found = config.get(pattern)
    is_uniform = isinstance(found, dict) and all(v == config.get(setting) for v in found.values())
    return ({}, None, found) if is_uniform else ({}, None)


def _lora(config: Mapping[str, Any], names: tuple[str, ...]) -> LoraConfig:
    rank, alpha, dropout = (config.get(key) for key in ("r", "lora_alpha", "lora_dropout"))
    if not (isinstance(rank, int) and rank > 0):
        raise _setting("r", rank, "a whole number above 0 is needed")
    if not (isinstance(alpha, int | float) and math.isfinite(alpha) and alpha > 0):
        raise _setting("lora_alpha", alpha, "a number above 0 is needed")
    # PEFT then scales by alpha / sqrt(r) (Kalajdzievski 2023, arXiv:2312.03732), this service by alpha / r always.
    factor = math.sqrt(rank) if config.get("use_rslora") else 1
    return LoraConfig(
        rank=rank,
        alpha=float(alpha) * factor,
        seed=0,
        target_modules=names,
        dropout=float(dropout or 0),
    )


def _tensors(directory: Path, base: Path | None) -> dict[str, Array]:
    path = directory / ADAPTER_WEIGHTS
    if not path.is_file():
        pickled = (directory / "adapter_model.bin").is_file()
        hint = (
            "only adapter_model.bin, a pickle, which is not opened: save it again with safe_serialization=True"
            if pickled
            else "is it a directory that PEFT saved?"
        )
        raise _refused(f"{directory} has no {ADAPTER_WEIGHTS}: {hint}.")
    try:
        file = TensorFile(path)
        found = {name: file.read(name) for name in sorted(file.names)}
    except ValueError as error:
        raise _refused(f"{path}: {error}.") from None
    tensors = {n: t for n, t in found.items() if n.startswith(PREFIX) and n.endswith(SUFFIXES)}
    for name in sorted(found.keys() - tensors.keys()):
        _check_copy(name, found[name], base)
    _check_pairs(tensors)
    return tensors


def _check_copy(name: str, tensor: Array, base: Path | None) -> None:
    """PEFT saves embeddings and output heads along with their adapters. Raises unless it is just that."""
    match = _BASE_WEIGHT.fullmatch(name.removeprefix(PREFIX))
    if not match or ".lora_" in name:
        raise _refused(
            f"Tensor {name!r} is no part of an adapter of linear layers: only lora_A and lora_B are taken over.",
            tensor=name,
        )
    if base is None:
        raise _refused(
            f"Tensor {name!r} belongs to the base model and cannot be compared with it: say where that lies.",
            tensor=name,
        )
    own = find_base_tensor(base, f"{match[1]}.weight")
    if own is None or not np.array_equal(own, tensor):
        raise _refused(
            f"Tensor {name!r} is not the base model's: a trained or resized embedding is not taken over.",
            tensor=name,
        )


def _check_pairs(tensors: Mapping[str, Array]) -> None:
    if not tensors:
        raise _refused(f"{ADAPTER_WEIGHTS} has no tensors of an adapter of linear layers.")
    for path in module_paths(tensors):
        for suffix in SUFFIXES:
            if f"{PREFIX}{path}{suffix}" not in tensors:
                raise _refused(f"Tensor {f'{PREFIX}{path}{suffix}'!r} is missing.", tensor=path)


def _check_shapes(
    tensors: Mapping[str, Array], lora: LoraConfig, config: Mapping[str, Any]
) -> None:
    """Of a linear layer's, the rank; of experts', a multiple of it."""
    of_modules = _module_paths(config, tensors)
    for path in module_paths(tensors):
        a, b = (tensors[f"{PREFIX}{path}{suffix}"] for suffix in SUFFIXES)
        fits = a.ndim == b.ndim == 2 and a.shape[0] == b.shape[1]
        if not fits or (a.shape[0] != lora.rank if path in of_modules else a.shape[0] % lora.rank):
            raise _refused(
                f"The adapter of {path} has shapes {list(a.shape)} and {list(b.shape)}, which are not those of rank "
                f"{lora.rank}.",
                tensor=path,
            )


def _modules(config: Mapping[str, Any], tensors: Mapping[str, Array]) -> tuple[str, ...]:
    """What LoraConfig.target_modules must say: the names that PEFT was given, or, if they say more than what there are
    tensors for, the path of each layer."""
    targets = _targets(config, tensors)
    return (*targets.modules, *(name.removesuffix(".weight") for name in targets.parameters))


def _targets(config: Mapping[str, Any], tensors: Mapping[str, Array]) -> PeftTargets:
    modules, of_modules = _names(config, "target_modules"), _module_paths(config, tensors)
    is_whole = not config.get("layers_to_transform") and not config.get("exclude_modules")
    if not (is_whole and all(matches(path, modules) for path in of_modules)):
        modules = of_modules
    return PeftTargets(
        modules=tuple(n for n in modules if any(matches(path, [n]) for path in of_modules)),
        parameters=_names(config, "target_parameters"),
        fan_in_fan_out=bool(config.get("fan_in_fan_out")),
    )


def _module_paths(config: Mapping[str, Any], tensors: Mapping[str, Array]) -> tuple[str, ...]:
    """Those of linear layers. The others have parameters of PEFT's target_parameters, whose names may or may not say
    which module they are of."""
    parameters = _names(config, "target_parameters")
    owners = {name.rpartition(".")[0] for name in parameters}
    modules = _names(config, "target_modules")
    return tuple(
        path
        for path in module_paths(tensors)
        if not path.endswith(".base_layer")
        and not matches(path, owners)
        and ("" not in owners or matches(path, modules))
    )


def _names(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Sorted; none for a pattern, which stands for whatever it matched."""
    names = config.get(key) or ()
    return () if isinstance(names, str) else tuple(sorted(names))


def _setting(name: str, value: object, accepted: str) -> PostTrainingError:
    return _refused(
        f"{PEFT_CONFIG} says {name}={value!r}, which cannot be taken over: {accepted}.",
        setting=name,
    )


def _refused(message: str, **where: object) -> PostTrainingError:
    return fail(Reason.INCOMPATIBLE_CHECKPOINT, message, **where)
