"""What client-creating calls return: a future of the client that can be used as the client.

client = service.create_lora_training_client(...)             used as it is: the first call waits for it
client = service.create_lora_training_client(...).result()
client = await service.create_lora_training_client(...)
"""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import tinker

from tinker_compat.futures import OperationFuture

C = TypeVar("C")


class ClientFuture(tinker.APIFuture[C], Generic[C]):
    """The future half. The client half is the client's class, whose methods work on `_core`."""

    def __init__(self, future: OperationFuture[C]) -> None:
        self._future = future

    @property
    def _core(self) -> Any:
        return self._future.result()._core  # pyright: ignore[reportAttributeAccessIssue]

    async def _ready(self) -> None:
        if not self._future.done():
            await self._future

    def result(self, timeout: float | None = None) -> C:
        return self._future.result(timeout)

    async def result_async(self, timeout: float | None = None) -> C:
        return await self._future.result_async(timeout)

    def future(self) -> Future[C]:
        return self._future

    async def coroutine(self) -> C:
        return await self._future.result_async()

    def __await__(self) -> Generator[Any, None, C]:
        return self._future.__await__()

    def __repr__(self) -> str:
        if not self._future.done():
            state = "pending"
        elif self._future.cancelled():
            state = "cancelled"
        elif (error := self._future.exception()) is not None:
            state = f"failed: {error!r}"
        else:
            state = repr(self._future.result())
        return f"<{type(self).__name__}: {state}>"
