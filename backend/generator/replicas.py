"""Several generators of one base model as one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from backend.generator.base import Generator, SampleCall, SampleResult
from backend.generator.routing import Router
from backend.trainer.base import ModelInfo, Weights
from together_post_training.errors import PostTrainingError, Reason, fail

log = logging.getLogger(__name__)

# A replica that was unavailable is not asked again before.
OUT_S = 10.0


class Replicas:
    """See `backend.generator.base.Generator`, whose methods go to all replicas, but for `sample`: see `Router`.

    A replica that is unavailable is left out for a while, and the call that found out tries one other: nothing was
    answered yet, and sampling changes nothing. When all are out, the one whose time comes first is asked.

    Owned by the event loop. Owns the replicas.

    Args:
        replicas: at least one.
        monotonic: seconds, never back.
    """

    def __init__(
        self,
        replicas: Sequence[Generator],
        *,
        out_s: float = OUT_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        assert replicas, "there is nobody to ask"
        self._replicas = tuple(replicas)
        self._out_s = out_s
        self._monotonic = monotonic
        self._router = Router(len(replicas))
        self._back_s = [monotonic()] * len(replicas)
        self._is_closed = False

    @property
    def model(self) -> ModelInfo:
        return self._replicas[0].model

    async def add_snapshot(self, snapshot: str, weights: Weights) -> None:
        """On all replicas, or on none."""
        adding = [asyncio.ensure_future(r.add_snapshot(snapshot, weights)) for r in self._replicas]
        try:
            await asyncio.wait(adding)
            for added in adding:
                added.result()
        except BaseException:
            for replica, added in zip(self._replicas, adding, strict=True):
                if added.cancel():  # the caller hung up
                    added.add_done_callback(lambda added, on=replica: _undo(on, snapshot, added))
                else:
                    _undo(replica, snapshot, added)
            raise

    def drop_snapshot(self, snapshot: str) -> None:
        for replica in self._replicas:
            replica.drop_snapshot(snapshot)

    def move(self, old: str, new: str) -> None:
        for replica in self._replicas:
            replica.move(old, new)

    async def sample(self, call: SampleCall) -> SampleResult:
        if self._is_closed:
            raise fail(Reason.UNAVAILABLE, "The generator was closed.")
        first = self._router.choose(call, self._in_service())
        try:
            return await self._sample_on(first, call)
        except PostTrainingError as error:
            others = [r for r in self._in_service() if r != first]
            if error.reason is not Reason.UNAVAILABLE or self._is_closed or not others:
                raise
        return await self._sample_on(self._router.choose(call, others), call)

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    async def _sample_on(self, replica: int, call: SampleCall) -> SampleResult:
        self._router.begin(replica, call)
        try:
            return await self._replicas[replica].sample(call)
        except PostTrainingError as error:
            if error.reason is Reason.UNAVAILABLE and not self._is_closed:
                self._take_out(replica, error)
            raise
        finally:
            self._router.end(replica, call)

    def _take_out(self, replica: int, error: PostTrainingError) -> None:
        now = self._monotonic()
        if self._back_s[replica] <= now:
            log.warning("generator replica %d is out for %g s: %s", replica, self._out_s, error)
            self._router.forget(replica)
        self._back_s[replica] = now + self._out_s

    def _in_service(self) -> list[int]:
        now = self._monotonic()
        in_service = [r for r, back_s in enumerate(self._back_s) if back_s <= now]
        return in_service or [min(range(len(self._back_s)), key=lambda r: self._back_s[r])]


def _undo(replica: Generator, snapshot: str, added: asyncio.Future[None]) -> None:
    if not added.cancelled() and added.exception() is None:
        replica.drop_snapshot(snapshot)
