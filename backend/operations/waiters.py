"""Who waits for the end of which operation. Woken by events; the event loop owns it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from together_post_training.errors import PostTrainingError
from together_post_training.v1 import operations_pb2 as pb

Key = tuple[str, int]


class Waiters:
    def __init__(self) -> None:
        self._waiting: defaultdict[Key, set[asyncio.Future[pb.Operation]]] = defaultdict(set)
        self._closed: PostTrainingError | None = None

    @contextmanager
    def waiting(self, key: Key) -> Iterator[asyncio.Future[pb.Operation]]:
        """A future of the ended operation. Enter before looking whether it has ended: no end is missed then."""
        future: asyncio.Future[pb.Operation] = asyncio.get_running_loop().create_future()
        if self._closed is not None:
            raise self._closed
        self._waiting[key].add(future)
        try:
            yield future
        finally:
            self._waiting[key].discard(future)
            if not self._waiting[key]:
                del self._waiting[key]

    def announce(self, key: Key, operation: pb.Operation) -> None:
        for future in self._waiting.get(key, ()):
            if not future.done():
                future.set_result(operation)

    def close(self, error: PostTrainingError) -> None:
        """Everyone who waits gets the error, and so does whoever comes later."""
        self._closed = error
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(error)
