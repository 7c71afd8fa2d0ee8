"""What the service asks of a trainer, and the values that cross the seam: numpy in, numpy out.

A trainer is owned by one thread: no method is called while another runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from together_post_training.errors import PostTrainingError
from together_post_training.samples import Limits, Sample

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """`num_layers` layers have `num_experts` experts each, and a token goes through `per_token` of them."""

    num_layers: int
    num_experts: int
    per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The base model. `eos_tokens` end a sample that asks for no other stop.

    location: the directory that transformers loads it from; empty where it is no transformers model.
    experts: None for a dense model; "unknown" for an architecture whose routers the engines cannot follow.
    """

    name: str
    location: str = ""
    architecture: str
    limits: Limits
    eos_tokens: tuple[int, ...] = ()
    max_lora_rank: int = 256
    experts: Experts | Literal["unknown"] | None = None


# Words that stand for modules in LoraConfig.target_modules.
ALL_LINEAR = "all-linear"
FAMILY_DEFAULT = "default"
_WORDS = ((ALL_LINEAR,), (FAMILY_DEFAULT,))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """W' = W + (alpha / rank) * B * A. `seed` fixes A; B starts as 0.

    target_modules: which linear layers are trained. Empty: those of train_attn, train_mlp and train_unembed. Otherwise
        train_attn and train_mlp say nothing, and it holds one of the words "all-linear" (every linear layer of the
        body) and "default" (what is usual for the model's family), to which train_unembed adds the output head, or
        names of modules, matched as PEFT does: a whole path or its last parts.
    dropout: the probability with which an input of A is dropped while training, in [0, 1).
    """

    rank: int
    alpha: float
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    target_modules: tuple[str, ...] = ()
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def module_names(self) -> tuple[str, ...]:
        """Those in target_modules; none where it is empty or holds a word."""
        return () if self.target_modules in _WORDS else self.target_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class FullConfig:
    """Every parameter of the model is trained, in a copy of the session's own."""


WeightsConfig = LoraConfig | FullConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftTargets:
    """How PEFT finds an adapter's layers in the base model: by names of modules and of parameters.

    fan_in_fan_out: some of them keep their weights as (in, out).
    """

    modules: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    fan_in_fan_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A copy of an adapter's weights, float32, by the name that PEFT's file format gives them.

    `{prefix}.lora_A.weight` has shape (rank, in), `{prefix}.lora_B.weight` (out, rank); E experts have theirs in one
    pair, (rank * E, in) and (out, rank * E). Never written to.

    targets: None: linear layers alone, at the paths that the names give.
    """

    lora: LoraConfig
    tensors: Mapping[str, Array]
    targets: PeftTargets | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FullWeights:
    """A copy of a whole model's weights, float32, by the names that its model.safetensors gives them. Never written to.

    A tensor that two modules share is there once, under the first name; of experts each has its own.
    """

    tensors: Mapping[str, Array]


Weights = Adapter | FullWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """What a session's optimiser is, for as long as the session lives; its parameters come with each step.

    muon_scaling: the factor of a Muon update. "match_adam": 0.2 * sqrt(max(rows, columns)), so that AdamW's learning
        rates fit; "original": sqrt(max(1, rows / columns)).
    """

    family: Literal["adamw", "muon", "dimuon"] = "adamw"
    muon_scaling: Literal["match_adam", "original"] = "match_adam"


ADAMW = OptimizerConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """An optimiser's number of steps and moments, float32.

    moments: by the moment's name ("exp_avg" and "exp_avg_sq" of AdamW, "momentum_buffer" of Muon), then by the name of
        the tensor that it belongs to, of that tensor's shape.
    """

    family: str = "adamw"
    num_steps: int
    moments: Mapping[str, Mapping[str, Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """AdamW for one step; `grad_clip_norm` 0 clips nothing. The defaults are Tinker's."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonParams:
    """Muon for one step. `adam`: for tensors that are no matrices, embeddings and the output head of full weights; its
    grad_clip_norm says nothing. The defaults are Together's."""

    learning_rate: float = 0.02
    momentum: float = 0.95
    newton_schulz_steps: int = 5
    weight_decay: float = 0.0
    grad_clip_norm: float = 1.0
    adam: AdamParams = AdamParams(eps=1e-8)


@dataclass(frozen=True, slots=True, kw_only=True)
class DimuonParams:
    """Tinker's Dimuon for one step."""

    learning_rate: float
    beta1: float = 0.9
    grad_clip_norm: float = 0.0


OptimParams = AdamParams | MuonParams | DimuonParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward or forward-and-backward over samples of a session.

    The samples were checked (`samples.check`). With `gradients`, d objective / d logprob for each sample, the
    objective is the caller's and `loss` is not evaluated.

    routed_experts: for each sample, which experts its tokens go through, as a generator recorded it: integers, (its
        tokens or all but the last; layers with experts; experts of a token), as the model's `experts` says. The router
        chooses for tokens and samples that have none; it always weighs.
    """

    session: str
    samples: Sequence[Sample]
    loss: str = "cross_entropy"
    params: Mapping[str, float | str] = field(default_factory=dict)
    backward: bool = False
    gradients: Sequence[Array] | None = None
    routed_experts: Sequence[Array | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """logprobs: for each sample, float32 of the shape of its target_tokens. metrics: "name:reduction"."""

    logprobs: Sequence[Array]
    metrics: Mapping[str, float]


class Trainer(Protocol):
    """Trains many adapters on one frozen base model, or its full weights.

    Methods raise PostTrainingError for what a caller did and leave the session as it was then.
    """

    @property
    def model(self) -> ModelInfo: ...

    @property
    def merge_tokens(self) -> int:
        """Passes that have at most this many tokens together run faster in one `run_batch` than one by one; 0: none."""
        ...

    def create_session(
        self, session: str, weights: WeightsConfig, optimizer: OptimizerConfig = ADAMW
    ) -> None:
        """Makes a fresh adapter: A from the seed, the same for the same seed and configuration; B = 0. Or a copy of
        the whole model."""
        ...

    def delete_session(self, session: str) -> None: ...

    def run(self, work: Pass) -> PassResult:
        """Runs the pass. With `backward`, adds its gradient to the session's; on failure adds nothing.

        LoRA dropout applies with `backward` alone, and the logprobs and metrics are then those under it.

        Raises:
            PostTrainingError: NON_FINITE_LOSS when the loss or its gradient is not finite.
        """
        ...

    def run_batch(self, works: Sequence[Pass]) -> list[PassResult | PostTrainingError]:
        """Runs passes of different sessions together, all with `backward` or all without.

        Each gets what it would get alone, up to rounding, or fails alone.
        """
        ...

    def has_gradients(self, session: str) -> bool:
        """Whether a backward pass has run since the last optim_step, load or clear_gradients."""
        ...

    def clear_gradients(self, session: str) -> None: ...

    def optim_step(self, session: str, params: OptimParams) -> dict[str, float]:
        """One step from the accumulated gradient, which is then cleared. Called only with gradients.

        Metrics, as "name:reduction": see `backend.trainer.stepping.step_metrics`.

        Raises:
            PostTrainingError: NON_FINITE_LOSS when the gradient's norm is not finite; nothing is changed but that
                the gradient is cleared. INVALID_ARGUMENT for parameters outside their range or of another family
                than the session's optimiser; nothing is changed.
        """
        ...

    def weights(self, session: str) -> Weights:
        """A copy of the session's weights."""
        ...

    def optimizer_state(self, session: str) -> OptimizerState:
        """A copy of the session's moments."""
        ...

    def load(self, session: str, weights: Weights, optimizer: OptimizerState | None) -> None:
        """Replaces weights; the optimiser's state too, which is fresh if None; clears gradients.

        Raises:
            PostTrainingError: INCOMPATIBLE_CHECKPOINT, naming missing, unexpected or misshapen tensors.
        """
        ...
