"""Independent answers for full weights: plain transformers in float64, autograd and torch.optim.AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import PreTrainedModel

from backend.trainer.base import AdamParams
from together_post_training.samples import Sample

Array = np.ndarray


@dataclass(slots=True, kw_only=True)
class FullOracle:
    """Owned by one test."""

    module: PreTrainedModel
    optimizer: torch.optim.AdamW | None = None

    def logprobs(self, samples: Sequence[Sample]) -> list[Array]:
        with torch.no_grad():
            return [self._logprobs(sample).numpy() for sample in samples]

    def backward(self, samples: Sequence[Sample]) -> None:
        """Of cross_entropy."""
        total = torch.zeros((), dtype=torch.float64)
        for sample in samples:
            weights = torch.from_numpy(np.asarray(sample.inputs.get("weights", 1.0), np.float64))
            total = total - (weights * self._logprobs(sample)).sum()
        total.backward()

    def gradient(self) -> dict[str, Array]:
        """By the names of the files; a parameter that nothing reached has zeros."""
        return self._by_file_names(
            {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self._named()}
        )

    def weights(self) -> dict[str, Array]:
        return self._by_file_names({n: p.detach() for n, p in self._named()})

    def step(self, params: AdamParams) -> None:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.module.parameters())
        for group in self.optimizer.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        for parameter in self.module.parameters():
            if parameter.grad is None:  # An expert that nothing reached decays all the same.
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.module.zero_grad()

    def _named(self):
        return self.module.named_parameters()

    def _by_file_names(self, tensors: dict[str, Tensor]) -> dict[str, Array]:
        files = revert_weight_conversion(self.module, tensors)
        return {name: tensor.numpy().copy() for name, tensor in files.items()}

    def _logprobs(self, sample: Sample) -> Tensor:
        tokens = torch.from_numpy(np.array(sample.tokens))[None]
        logprobs = self.module(tokens, use_cache=False).logits[0].log_softmax(-1)
        targets = torch.from_numpy(np.array(sample.inputs["target_tokens"]))
        return logprobs.gather(1, targets[:, None])[:, 0]


def load(directory: Path) -> FullOracle:
    # The grouped product of experts has no float64 kernel.
    module = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, experts_implementation="eager"
    )
    return FullOracle(module=module)
