"""The ends of the latest operations, so that reading a fresh result reads no disk."""

from __future__ import annotations

from collections import OrderedDict

from backend.operations.waiters import Key
from together_post_training.v1 import operations_pb2 as pb


class Recent:
    """At most `max_bytes` of messages, the latest ones."""

    def __init__(self, max_bytes: int = 64 * 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[Key, tuple[pb.Operation, int]] = OrderedDict()

    def put(self, key: Key, operation: pb.Operation) -> None:
        _, replaced = self._kept.pop(key, (None, 0))
        self._num_bytes -= replaced
        size = operation.ByteSize()
        self._kept[key] = (operation, size)
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._num_bytes -= dropped

    def get(self, key: Key) -> pb.Operation | None:
        kept = self._kept.get(key)
        return None if kept is None else kept[0]
