"""SGLang's HTTP interface, from the event loop. Connections are a loop's own, and made when it first asks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import suppress

import httpx

from together_post_training.errors import PostTrainingError, Reason, fail

Json = Mapping[str, object]

# Servers close connections that were idle for 5 s; one that is about to be closed must not be used again.
_KEEPALIVE_S = 2.0
# httpx looks at all that are idle for each request: many cost more than they save.
_KEPT_ALIVE = 8
_CONNECT_S = 10.0
# Loading weights from a slow disk takes a while; that they are loaded at all is for the server's own watchdog to see.
_CONTROL_S = 1800.0
_FIRST_ABORT_DELAY_S, _LONGEST_ABORT_DELAY_S = 0.02, 1.0
# A sample may take hours: what notices a machine that is gone is TCP, after a minute.
_SOCKET = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
]


class ServerLost(Exception):
    """The connection failed, or ended before the answer did."""


class AdapterMissing(Exception):
    """The server does not know the adapter: it was started again, or somebody unloaded it."""


class Client:
    """Owned by the event loop.

    generate: a request that is cancelled is aborted on the server, too; SGLang does not notice that nobody listens any
    more before it has computed the answer.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        # Apart, so that an abort never waits behind what it is to abort.
        self._data: httpx.AsyncClient | None = None
        self._control: httpx.AsyncClient | None = None
        self._running: dict[str, tuple[str, asyncio.Task[Json]]] = {}
        self._aborting: set[asyncio.Task[None]] = set()

    async def generate(self, url: str, body: Json, rid: str) -> Json:
        """POST /generate with a request id that no other running request has.

        Raises:
            ServerLost, AdapterMissing, and PostTrainingError for what the server refuses.
        """
        assert rid not in self._running, "request ids are unique"
        self._open()
        request = asyncio.create_task(self._generate(url, {**body, "rid": rid}))
        self._running[rid] = (url, request)
        request.add_done_callback(lambda _: self._running.pop(rid, None))
        try:
            return await asyncio.shield(request)
        except asyncio.CancelledError:
            self.abort(rid)
            raise

    def abort(self, rid: str) -> None:
        """Makes a running request end with the tokens that it has so far."""
        if rid not in self._running:
            return
        url, request = self._running[rid]
        task = asyncio.create_task(self._abort(url, rid, request))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def post(self, url: str, path: str, body: Json) -> tuple[int, Json]:
        """(status, answer) of a request that changes the server. Raises ServerLost."""
        self._open()
        assert self._control is not None
        return await _sent(self._control, "POST", url + path, body)

    async def get(self, url: str, path: str) -> tuple[int, Json]:
        self._open()
        assert self._control is not None
        return await _sent(self._control, "GET", url + path, None)

    async def abort_all(self, timeout_s: float) -> None:
        """Comes back when none is left, or after a while."""
        for rid in list(self._running):
            self.abort(rid)
        if self._aborting:
            await asyncio.wait(self._aborting, timeout=timeout_s)

    async def close(self) -> None:
        """Requests that still run fail with ServerLost."""
        for task in self._aborting:
            task.cancel()
        for client in (self._data, self._control):
            if client is not None and self._loop is asyncio.get_running_loop():
                await client.aclose()
        self._data = self._control = None

    async def _generate(self, url: str, body: Json) -> Json:
        assert self._data is not None
        status, answer = await _sent(self._data, "POST", url + "/generate", body)
        if status != 200:
            raise refusal(status, answer)
        return answer

    async def _abort(self, url: str, rid: str, request: asyncio.Task[Json]) -> None:
        """Again and again until the request has ended: one that has only just been sent is not known there yet."""
        delay_s = _FIRST_ABORT_DELAY_S
        while not request.done():
            with suppress(ServerLost):
                await self.post(url, "/abort_request", {"rid": rid})
            await asyncio.wait([request], timeout=delay_s)
            delay_s = min(2 * delay_s, _LONGEST_ABORT_DELAY_S)
        if not request.cancelled():
            request.exception()  # Nobody else may be there to look at it.

    def _open(self) -> None:
        loop = asyncio.get_running_loop()
        if self._data is None or self._loop is not loop:
            self._loop = loop
            self._data, self._control = _http(None), _http(_CONTROL_S)


def refusal(status: int, answer: Json) -> Exception:
    """What a status other than 200 means, in our words where we know better, else in the server's."""
    message = message_of(answer)
    if "has never been loaded" in message or "Failed to implicitly load" in message:
        return AdapterMissing(message)
    if "maximum allowed length" in message or "context length" in message:
        return fail(Reason.SEQUENCE_TOO_LONG, f"SGLang refuses the call: {message}")
    reasons = {400: Reason.INVALID_ARGUMENT, 404: Reason.UNIMPLEMENTED}
    if "queue is full" in message or status == 429:
        reason = Reason.RESOURCE_EXHAUSTED
    elif status == 503:
        reason = Reason.UNAVAILABLE
    else:
        reason = reasons.get(status, Reason.INTERNAL)
    return fail(reason, f"SGLang refuses the call (status {status}): {message}", status=status)


def message_of(answer: Json) -> str:
    """SGLang says it in one of several places."""
    error = answer.get("error", answer.get("error_message", answer.get("message")))
    if isinstance(error, Mapping):
        error = error.get("message")
    return str(error or answer or "it does not say why")


def _http(timeout_s: float | None) -> httpx.AsyncClient:
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=_KEPT_ALIVE, keepalive_expiry=_KEEPALIVE_S
    )
    return httpx.AsyncClient(
        timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S),
        transport=httpx.AsyncHTTPTransport(limits=limits, socket_options=_SOCKET),
        trust_env=False,
    )


async def _sent(
    client: httpx.AsyncClient, method: str, url: str, body: Json | None
) -> tuple[int, Json]:
    try:
        response = await client.request(method, url, json=body)
    except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: closed meanwhile
        raise ServerLost(f"{type(error).__name__} {error}".strip()) from None
    try:
        answer = response.json()
    except ValueError:
        answer = {"message": response.text[:500]}
    return response.status_code, answer if isinstance(answer, dict) else {"message": answer}


def unreadable(what: str) -> PostTrainingError:
    """A reply that is not what the server promises."""
    return fail(
        Reason.INTERNAL,
        f"SGLang's reply does not fit the call: {what}. This server was tested with SGLang 0.5.23.",
    )
