"""What an operation is to do, decoded and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from backend.trainer.base import OptimParams, Pass
from together_post_training.names import CheckpointPath

CheckpointKind = Literal["training", "inference", "external"]
SyncType = Literal["synchronous", "background", "pipeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """forward, forward_backward or custom_forward_backward."""

    work: Pass

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.work.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepWork:
    params: OptimParams


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSyncWork:
    """Publishes the session's weights as they are at its turn.

    "synchronous": ends when they can be sampled. "background": when they are copied. "pipeline": as the first, and what
    is being sampled from the session's live policy goes on under them.
    """

    type: SyncType = "synchronous"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpointWork:
    """ttl_s None: kept until deleted. age_recipients: who can read it; empty: everybody."""

    kind: CheckpointKind
    name: str
    ttl_s: float | None
    overwrite: bool
    user_metadata: Mapping[str, str]
    age_recipients: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCheckpointWork:
    path: CheckpointPath
    optimizer: bool


Work = PassWork | OptimStepWork | WeightsSyncWork | SaveCheckpointWork | LoadCheckpointWork
