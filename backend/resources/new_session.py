"""What a session is made from."""

from __future__ import annotations

from dataclasses import dataclass

from backend.trainer.base import LoraConfig
from together_post_training.names import CheckpointPath
from together_post_training.v1 import sessions_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSession:
    """A checked CreateSession request. `id` empty: to be made; `lora` None: that of `resume_from`."""

    id: str
    base_model: str
    lora: LoraConfig | None
    resume_from: CheckpointPath | None
    load_optimizer: bool
    user_metadata: dict[str, str]
    display_name: str


def lora_message(lora: LoraConfig) -> pb.LoraConfig:
    return pb.LoraConfig(
        rank=lora.rank,
        alpha=lora.alpha,
        seed=lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
        dropout=0.0,
    )
