"""A stand-in for SGLang's server: HTTP in front of `StandInEngine`, in a thread of its own.

It can be ended and started again at the same address, as a server that crashes.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from typing import Any

from tests.generator.sglang.stand_in_engine import StandInEngine


class StandIn:
    """`crash`, `restart`, `drop_next` and `call` may be called from any thread.

    num_to_drop: so many of the next requests to /generate get no answer: the connection ends.
    """

    def __init__(self, engine: StandInEngine) -> None:
        self.engine = engine
        self.num_to_drop = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._serving: set[asyncio.Task] = set()
        self._port = 0
        self._wait(self._listen())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def crash(self) -> None:
        """Every connection ends; nobody listens."""
        self._wait(self._end())

    def restart(self) -> None:
        self.engine.restart()
        self._wait(self._listen())

    def go_on(self) -> None:
        self._loop.call_soon_threadsafe(self.engine.go_on.set)

    def close(self) -> None:
        self._wait(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self._port, backlog=4096
        )
        self._port = self._server.sockets[0].getsockname()[1]

    async def _end(self) -> None:
        self._server.close()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            while True:
                path, body = await _request(reader)
                if path == "/generate" and self.num_to_drop:
                    self.num_to_drop -= 1
                    return
                status, answer = await self.engine.answer(path, body)
                payload = json.dumps(answer).encode()
                head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
                writer.write(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._serving.discard(task)
            writer.transport.abort()


async def _request(reader: asyncio.StreamReader) -> tuple[str, dict]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    length = int(headers.get("content-length", 0))
    body = json.loads(await reader.readexactly(length)) if length else {}
    return first.split(" ")[1], body
