"""What the service asks of a trainer, and the values that cross the seam: numpy in, numpy out.

A trainer is owned by one thread: no method is called while another runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from together_post_training.samples import Limits, Sample

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The base model. `eos_tokens` end a sample that asks for no other stop.

    location: the directory that transformers loads it from; empty where it is no transformers model.
    """

    name: str
    location: str = ""
    architecture: str
    limits: Limits
    eos_tokens: tuple[int, ...] = ()
    max_lora_rank: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """W' = W + (alpha / rank) * B * A. `seed` fixes A; B starts as 0."""

    rank: int
    alpha: float
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A copy of an adapter's weights, float32, by the name that PEFT's file format gives them.

    `{prefix}.lora_A.weight` has shape (rank, in), `{prefix}.lora_B.weight` (out, rank). Never written to.
    """

    lora: LoraConfig
    tensors: Mapping[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """AdamW's number of steps and moments, float32, by the adapter's tensor names."""

    num_steps: int
    exp_avg: Mapping[str, Array]
    exp_avg_sq: Mapping[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """AdamW for one step; `grad_clip_norm` 0 clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward or forward-and-backward over samples of a session.

    The samples were checked (`samples.check`). With `gradients`, d objective / d logprob for each sample, the
    objective is the caller's and `loss` is not evaluated.
    """

    session: str
    samples: Sequence[Sample]
    loss: str = "cross_entropy"
    params: Mapping[str, float] = field(default_factory=dict)
    backward: bool = False
    gradients: Sequence[Array] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """logprobs: for each sample, float32 of the shape of its target_tokens. metrics: "name:reduction"."""

    logprobs: Sequence[Array]
    metrics: Mapping[str, float]


class Trainer(Protocol):
    """Trains many adapters on one frozen base model.

    Methods raise PostTrainingError for what a caller did and leave the session as it was then.
    """

    @property
    def model(self) -> ModelInfo: ...

    def create_session(self, session: str, lora: LoraConfig) -> None:
        """Makes a fresh adapter: A from the seed, the same for the same seed and configuration; B = 0."""
        ...

    def delete_session(self, session: str) -> None: ...

    def run(self, work: Pass) -> PassResult:
        """Runs the pass. With `backward`, adds its gradient to the session's; on failure adds nothing.

        Raises:
            PostTrainingError: NON_FINITE_LOSS when the loss or its gradient is not finite.
        """
        ...

    def has_gradients(self, session: str) -> bool:
        """Whether a backward pass has run since the last optim_step, load or clear_gradients."""
        ...

    def clear_gradients(self, session: str) -> None: ...

    def optim_step(self, session: str, params: AdamParams) -> dict[str, float]:
        """One AdamW step from the accumulated gradient, which is then cleared. Metrics: "name:reduction".

        "unclipped_grad_l2:mean" is the norm before clipping. Called only with gradients.

        Raises:
            PostTrainingError: NON_FINITE_LOSS when the gradient's norm is not finite; nothing is changed but that
                the gradient is cleared.
        """
        ...

    def adapter(self, session: str) -> Adapter:
        """A copy of the session's weights."""
        ...

    def optimizer_state(self, session: str) -> OptimizerState:
        """A copy of the session's moments."""
        ...

    def load(self, session: str, adapter: Adapter, optimizer: OptimizerState | None) -> None:
        """Replaces weights; the optimiser's state too, which is fresh if None; clears gradients.

        Raises:
            PostTrainingError: INCOMPATIBLE_CHECKPOINT, naming missing, unexpected or misshapen tensors.
        """
        ...
