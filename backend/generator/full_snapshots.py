"""Snapshots of full weights: each is a model of its own, and is sampled from by an engine of its own.

An engine is made when a snapshot is first sampled from, and ends with the last sample after the snapshot was dropped.
Until then a snapshot takes the memory of its weights, in float32, which are not copied, and an engine the memory of
the keys and values that it holds. Whoever adds snapshots decides how many are here at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from backend.generator.engine import Engine
from backend.trainer.base import FullWeights
from backend.trainer.base_model import BaseModel
from backend.trainer.checks import check_full_weights
from backend.trainer.model_layout import ModelLayout, under


@dataclass(slots=True, kw_only=True, eq=False)
class _Snapshot:
    """engine: None until one is asked for."""

    weights: FullWeights
    engine: asyncio.Future[Engine] | None = None
    num_users: int = 0
    is_dropped: bool = False


class FullSnapshots:
    """Owned by the event loop.

    make_engine: starts an engine over a model of the base's architecture.
    """

    def __init__(self, base: BaseModel, make_engine: Callable[[BaseModel], Engine]) -> None:
        self._base = base
        self._make_engine = make_engine
        self._layout: ModelLayout | None = None
        self._snapshots: dict[str, _Snapshot] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._snapshots

    def add(self, name: str, weights: FullWeights) -> None:
        """Raises INCOMPATIBLE_CHECKPOINT, naming what is missing, unexpected or misshapen."""
        if self._layout is None:
            self._layout = ModelLayout(self._base.module)
        shapes = self._layout.tensors.shapes
        if {tensor: array.shape for tensor, array in weights.tensors.items()} != shapes:
            check_full_weights(weights, shapes)
        self._snapshots[name] = _Snapshot(weights=weights)

    def drop(self, name: str) -> None:
        snapshot = self._snapshots.pop(name)
        snapshot.is_dropped = True
        _end_unused(snapshot)

    @asynccontextmanager
    async def engine(self, name: str) -> AsyncIterator[Engine]:
        """It runs at least until the end, whether or not the snapshot is dropped meanwhile."""
        snapshot = self._snapshots[name]
        snapshot.num_users += 1
        try:
            if snapshot.engine is None:
                snapshot.engine = self._start(snapshot)
            # Whoever hangs up leaves the engine to the others who wait for it.
            yield await asyncio.shield(snapshot.engine)
        finally:
            snapshot.num_users -= 1
            _end_unused(snapshot)

    def close(self) -> None:
        """Blocks until the engines have ended, and fails what is unfinished."""
        snapshots = list(self._snapshots.values())
        self._snapshots.clear()
        for snapshot in snapshots:
            snapshot.is_dropped = True
            engine = _started(snapshot)
            if engine is not None:
                engine.close()

    def _start(self, snapshot: _Snapshot) -> asyncio.Future[Engine]:
        layout = self._layout
        assert layout is not None, "there is a snapshot"

        def start() -> Engine:
            return self._make_engine(under(self._base, layout, snapshot.weights))

        def started(future: asyncio.Future[Engine]) -> None:
            if future.cancelled() or future.exception() is not None:
                snapshot.engine = None  # The next one tries again.
            _end_unused(snapshot)

        future = asyncio.ensure_future(asyncio.to_thread(start))
        future.add_done_callback(started)
        return future


def _started(snapshot: _Snapshot) -> Engine | None:
    return snapshot.engine.result() if snapshot.engine and snapshot.engine.done() else None


def _end_unused(snapshot: _Snapshot) -> None:
    engine = _started(snapshot)
    if snapshot.is_dropped and not snapshot.num_users and engine is not None:
        engine.end()
        snapshot.engine = None
