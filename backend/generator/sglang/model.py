"""What of the base model the generator has to know to serve snapshots of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cached_property

from backend.generator.sglang.facts import Facts
from backend.generator.sglang.replies import Experts
from backend.trainer import checks, targets
from backend.trainer.base import Adapter, ModelInfo
from backend.trainer.base_model import BaseModel
from backend.trainer.flat_layout import Shape
from backend.trainer.model_layout import ModelLayout
from backend.trainer.targets import Layer
from together_post_training.errors import Reason, fail


class ServedModel:
    """layers: that an adapter may have, by path. experts: None where the model has none."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self.layers: Mapping[str, Layer] = targets.layers_of(base.module)
        self.experts = _experts(base)

    @property
    def info(self) -> ModelInfo:
        return self._base.info

    @property
    def has_experts(self) -> bool:
        return self.experts is not None

    @cached_property
    def tensor_shapes(self) -> Mapping[str, Shape]:
        """Of full weights, by name. Raises UNIMPLEMENTED for a model whose files hold what cannot be trained."""
        return ModelLayout(self._base.module).tensors.shapes

    def check_adapter(self, adapter: Adapter, facts: Facts) -> None:
        """Raises INCOMPATIBLE_CHECKPOINT for tensors that are not this model's, UNIMPLEMENTED for what the server
        cannot serve."""
        model_type, rank = self._base.module.config.model_type, adapter.lora.rank
        chosen = targets.select(self.layers, model_type, adapter.lora)
        checks.check_adapter(adapter, adapter.lora, targets.tensor_shapes(chosen, rank))
        foreign = {layer.path for layer in chosen if not _is_served(layer, facts)}
        if foreign and facts.enable_lora:
            raise fail(
                Reason.UNIMPLEMENTED,
                f"This adapter trains {_some(foreign)}, and this SGLang server takes adapters of "
                f"{', '.join(sorted(facts.lora_modules))} alone: train those (train_mlp=False leaves experts out), or "
                "use --generator embedded.",
                layers=",".join(sorted(foreign)),
            )
        if facts.max_lora_rank is not None and rank > facts.max_lora_rank:
            raise fail(
                Reason.UNIMPLEMENTED,
                f"The adapter has rank {rank}, and this SGLang server was started for ranks up to "
                f"{facts.max_lora_rank}: start it with --max-lora-rank {rank} (--sglang-args).",
                rank=rank,
                max_lora_rank=facts.max_lora_rank,
            )


def _is_served(layer: Layer, facts: Facts) -> bool:
    return not layer.as_parameter and layer.path.rpartition(".")[2] in facts.lora_modules


def _some(paths: Collection[str], most: int = 3) -> str:
    first = sorted(paths)[:most]
    rest = len(paths) - len(first)
    return ", ".join(first) + (f" and {rest} more" if rest else "")


def _experts(base: BaseModel) -> Experts | None:
    paths = targets.expert_modules(base.module)
    if not paths:
        return None
    config = base.module.config
    numbers = [int(re.findall(r"\.layers\.(\d+)\.", f".{path}")[0]) for path in paths]
    return Experts(
        num_layers=config.num_hidden_layers,
        layers=tuple(numbers),
        per_token=config.num_experts_per_tok,
    )
