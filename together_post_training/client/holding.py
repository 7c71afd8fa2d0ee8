"""Tells the server which snapshots this process samples from, so that it keeps them.

A snapshot is held as long as the object that samples from it lives. All that a connection holds is said about every
half minute, and at once when there is more: what is not said any more, the server may drop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
import uuid
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from google.protobuf.message import Message

from together_post_training.client.loop import background_loop
from together_post_training.errors import ConnectionLostError, PostTrainingError, Reason
from together_post_training.names import is_base_snapshot
from together_post_training.v1 import generator_pb2

logger = logging.getLogger(__name__)

INTERVAL_S = 30.0
# For a copy that may be on its way to another process: pickled, or as a handle.
EXPORTED_S = 3600.0
_METHOD = "generator.HoldSnapshots"
_CALL_TIMEOUT_S = 15.0
_LAST_CALL_TIMEOUT_S = 1.0


class Caller(Protocol):
    """A connection."""

    @property
    def is_closed(self) -> bool: ...

    async def call_once(self, method: str, request: Message, *, timeout_s: float) -> Any: ...


class Holds:
    """What one connection holds. `hold` and `export` may be called from any thread, the others on the background loop.

    id: by which the server knows who holds. monotonic: seconds, never back.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self.id = str(uuid.uuid4())
        self._owner = os.getpid()
        self._numbers = itertools.count()
        # Changed and copied by single operations, which threads do not interrupt; a lock would not survive a fork.
        self._held: dict[int, tuple[str, weakref.ref[object]]] = {}
        self._exported: dict[str, float] = {}
        self._telling: asyncio.Task[None] | None = None
        self._more = asyncio.Event()
        self._is_heard = False
        self._is_unknown = False

    def hold(self, caller: Caller, owner: object, snapshot: str) -> None:
        """As long as `owner` lives."""
        if is_base_snapshot(snapshot):
            return
        number = next(self._numbers)
        gone = weakref.ref(owner, lambda _: self._held.pop(number, None))
        self._held[number] = (snapshot, gone)
        try:
            loop = background_loop().loop
        except RuntimeError:
            return  # Of a forked process, where nothing can be sampled either; its first call says so.
        loop.call_soon_threadsafe(self._nudge, caller)

    def export(self, snapshot: str) -> None:
        """For an hour from now, whatever becomes of its owner here."""
        self._exported[snapshot] = self._monotonic() + EXPORTED_S

    def names(self) -> set[str]:
        """Of all that is held now."""
        return {snapshot for snapshot, _ in self._held.copy().values()} | self._on_their_way()

    async def let_go(self, caller: Caller) -> None:
        """Of everything but what may be on its way elsewhere. The connection is about to close."""
        if self._telling is None:
            return
        self._telling.cancel()
        if not self._is_heard:
            return
        last = self._request(self._on_their_way())
        try:
            await caller.call_once(_METHOD, last, timeout_s=_LAST_CALL_TIMEOUT_S)
        except (PostTrainingError, ConnectionLostError) as error:
            logger.debug("snapshots are held until the server notices: %s", error)

    def _on_their_way(self) -> set[str]:
        now = self._monotonic()
        exported = self._exported.copy()
        for snapshot in [name for name, end in exported.items() if end <= now]:
            self._exported.pop(snapshot, None)
        return {name for name, end in exported.items() if end > now}

    def _nudge(self, caller: Caller) -> None:
        self._more.set()
        if self._telling is None and not (caller.is_closed or self._is_unknown):
            self._telling = background_loop().create_task(self._tell(caller))

    async def _tell(self, caller: Caller) -> None:
        """Until nothing is held any more, which is said as well."""
        interval_s = INTERVAL_S
        try:
            while True:
                names = self.names()
                lease_s = await self._say(caller, names)
                if lease_s:
                    interval_s = min(INTERVAL_S, lease_s / 4)
                if caller.is_closed or self._is_unknown or not (names or self.names()):
                    return
                await self._wait_for_more(names, interval_s)
        finally:
            self._telling = None

    async def _say(self, caller: Caller, names: set[str]) -> float | None:
        """Returns how long the server waits for the next time; None: it has not heard it."""
        self._is_heard = False
        try:
            answer = await caller.call_once(
                _METHOD, self._request(names), timeout_s=_CALL_TIMEOUT_S
            )
        except (PostTrainingError, ConnectionLostError) as error:
            # A server from before there was such a call keeps everything.
            self._is_unknown = getattr(error, "reason", None) is Reason.UNIMPLEMENTED
            logger.debug("the server was not told of the snapshots in use: %s", error)
            return None
        self._is_heard = True
        return answer.lease_s

    async def _wait_for_more(self, names: set[str], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while self.names() <= names:
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            pass

    def _request(self, names: set[str]) -> generator_pb2.HoldSnapshotsRequest:
        # A process that was forked before the first call holds for itself.
        holder = self.id if os.getpid() == self._owner else f"{self.id}:{os.getpid()}"
        return generator_pb2.HoldSnapshotsRequest(holder=holder, snapshots=sorted(names))
