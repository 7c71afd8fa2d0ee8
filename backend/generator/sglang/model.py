"""What of the base model the generator has to know to serve snapshots of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property

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

    def check_adapter(self, adapter: Adapter, max_rank: int | None) -> None:
        """Raises INCOMPATIBLE_CHECKPOINT for tensors that are not this model's, UNIMPLEMENTED for a rank too large."""
        model_type = self._base.module.config.model_type
        chosen = targets.select(self.layers, model_type, adapter.lora)
        checks.check_adapter(
            adapter, adapter.lora, targets.tensor_shapes(chosen, adapter.lora.rank)
        )
        if max_rank is not None and adapter.lora.rank > max_rank:
            raise fail(
                Reason.UNIMPLEMENTED,
                f"The adapter has rank {adapter.lora.rank}, and this SGLang server was started for ranks up to "
                f"{max_rank}: start it with --max-lora-rank {adapter.lora.rank} (--sglang-args).",
                rank=adapter.lora.rank,
                max_lora_rank=max_rank,
            )


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
