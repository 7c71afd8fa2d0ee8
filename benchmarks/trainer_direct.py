"""The reference of the training benchmarks: the same work written directly with torch, transformers and peft.

Good ordinary practice, in the caller's own process: SDPA attention, right padding that causal attention needs no mask
for, one fused AdamW over the adapter, gradients accumulated over micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

Sequences = Sequence[Sequence[int]]

_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
_IGNORED = -100


class DirectTrainer:
    """LoRA adapters on every linear layer and the output head, trained one after the other with PEFT's set_adapter."""

    def __init__(
        self, directory: Path, *, rank: int, alpha: int = 32, num_adapters: int = 1
    ) -> None:
        base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        config = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=_TARGETS, task_type="CAUSAL_LM"
        )
        self._adapters = ["default", *(f"adapter{i}" for i in range(1, num_adapters))]
        self._model = get_peft_model(base, config).train()
        for name in self._adapters[1:]:
            self._model.add_adapter(name, config)
        self._optimizers = [self._optimizer(name) for name in self._adapters]

    def padded_step(self, sequences: Sequences) -> Callable[[], None]:
        """forward_backward and optim_step on one batch, padded to its longest sequence."""
        return self._step([_pad(sequences)])

    def sorted_step(self, sequences: Sequences, *, micro_batch: int) -> Callable[[], None]:
        """The same, sorted by length into micro-batches of `micro_batch` sequences, each padded to its own longest."""
        ordered = sorted(sequences, key=len)
        starts = range(0, len(ordered), micro_batch)
        return self._step([_pad(ordered[start : start + micro_batch]) for start in starts])

    def _step(self, batches: list[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Of every adapter."""

        def step() -> None:
            for name, optimizer in zip(self._adapters, self._optimizers, strict=True):
                if len(self._adapters) > 1:
                    self._model.set_adapter(name)
                for input_ids, targets in batches:
                    self._backward(input_ids, targets)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return step

    def _backward(self, input_ids: Tensor, targets: Tensor) -> None:
        logits = self._model(input_ids=input_ids, use_cache=False).logits
        F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="sum"
        ).backward()

    def _optimizer(self, adapter: str) -> torch.optim.AdamW:
        self._model.set_adapter(adapter)
        trained = [p for p in self._model.parameters() if p.requires_grad]
        return torch.optim.AdamW(
            trained, lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, fused=True
        )


def _pad(sequences: Sequences) -> tuple[Tensor, Tensor]:
    """(input_ids, targets), both (B, T): each sequence gives all but its last token, and all but its first."""
    width = max(len(s) for s in sequences) - 1
    input_ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    targets = torch.full_like(input_ids, _IGNORED)
    for i, sequence in enumerate(sequences):
        input_ids[i, : len(sequence) - 1] = torch.tensor(sequence[:-1])
        targets[i, : len(sequence) - 1] = torch.tensor(sequence[1:])
    return input_ids, targets
