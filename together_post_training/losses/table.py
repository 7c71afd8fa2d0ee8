"""The losses by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from together_post_training.errors import Reason, fail
from together_post_training.losses.base import LossContract
from together_post_training.losses.cispo import CONTRACT as CISPO
from together_post_training.losses.cross_entropy import CONTRACT as CROSS_ENTROPY
from together_post_training.losses.dppo import CONTRACT as DPPO
from together_post_training.losses.dro import CONTRACT as DRO
from together_post_training.losses.grpo import CONTRACT as GRPO
from together_post_training.losses.gspo import CONTRACT as GSPO
from together_post_training.losses.importance_sampling import CONTRACT as IMPORTANCE_SAMPLING
from together_post_training.losses.ppo import CONTRACT as PPO
from together_post_training.losses.stable_reinforce import CONTRACT as STABLE_REINFORCE

CONTRACTS: Mapping[str, LossContract] = MappingProxyType(
    {
        "cross_entropy": CROSS_ENTROPY,
        "importance_sampling": IMPORTANCE_SAMPLING,
        "ppo": PPO,
        "cispo": CISPO,
        "dro": DRO,
        "gspo": GSPO,
        "grpo": GRPO,
        "dppo": DPPO,
        "stable_reinforce": STABLE_REINFORCE,
    }
)


def contract(name: str) -> LossContract:
    """Raises UNKNOWN_LOSS with the list of known ones."""
    if name in CONTRACTS:
        return CONTRACTS[name]
    known = ", ".join(sorted(CONTRACTS))
    raise fail(Reason.UNKNOWN_LOSS, f"Unknown loss {name!r}: this server knows {known}.", loss=name)
