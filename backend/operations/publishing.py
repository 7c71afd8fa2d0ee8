"""What weights_sync asks of whoever keeps snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from backend.operations.session import Session
from backend.operations.work import SyncType
from backend.trainer.base import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """snapshot: its name. is_pending: the generator does not have it yet. notices: what the caller should know."""

    snapshot: str
    is_pending: bool = False
    notices: Mapping[str, str] = field(default_factory=dict)


class Publisher(Protocol):
    """Called for one operation of a session at a time."""

    async def settle(self, session: Session) -> None:
        """Returns when nothing that the session published is on its way any more: there is one copy at a time."""
        ...

    async def publish(
        self, session: Session, sequence: int, weights: Weights, sync: SyncType
    ) -> Published:
        """Makes weights sampleable, and the session's live policy."""
        ...
