"""What a session is made from."""

from __future__ import annotations

from dataclasses import dataclass

from backend.trainer.base import (
    FullConfig,
    LoraConfig,
    OptimizerConfig,
    WeightsConfig,
)
from together_post_training.names import CheckpointPath
from together_post_training.v1 import checkpoints_pb2
from together_post_training.v1 import sessions_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSession:
    """A checked CreateSession request.

    id: empty: to be made. weights: None: those of `resume_from`. optimizer: None: the default, or that of `resume_from`
        where its state is loaded.
    """

    id: str
    base_model: str
    weights: WeightsConfig | None
    optimizer: OptimizerConfig | None
    resume_from: CheckpointPath | None
    load_optimizer: bool
    user_metadata: dict[str, str]
    display_name: str


def lora_message(lora: LoraConfig) -> pb.LoraConfig:
    """As a request for the same adapter says it."""
    flags = (
        {} if lora.target_modules else {"train_attn": lora.train_attn, "train_mlp": lora.train_mlp}
    )
    return pb.LoraConfig(
        rank=lora.rank,
        alpha=lora.alpha,
        seed=lora.seed,
        **flags,
        train_unembed=lora.train_unembed,
        dropout=lora.dropout,
        target_modules=lora.target_modules,
    )


def fill_configuration(
    shown: pb.Session | checkpoints_pb2.Checkpoint,
    weights: WeightsConfig,
    optimizer: OptimizerConfig,
) -> None:
    """Shows what is trained, and by which optimiser."""
    if isinstance(weights, FullConfig):
        shown.full_weights.SetInParent()
    else:
        shown.lora.CopyFrom(lora_message(weights))
    shown.optimizer.CopyFrom(optimizer_message(optimizer))


def optimizer_message(optimizer: OptimizerConfig) -> pb.OptimizerConfig:
    message = pb.OptimizerConfig()
    getattr(message, optimizer.family).SetInParent()
    if optimizer.family == "muon":
        message.muon.scaling_strategy = _SCALINGS[optimizer.muon_scaling]
    return message


_SCALINGS = {
    "match_adam": pb.MUON_SCALING_STRATEGY_MATCH_ADAM,
    "original": pb.MUON_SCALING_STRATEGY_ORIGINAL,
}
