"""What the clients of one ServiceClient share."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import tinker

from tinker_compat.futures import OperationFuture, completed, start
from together_post_training.client.address import (
    Address,
    check_headers,
    resolve_address,
    resolve_key,
)
from together_post_training.client.channel import Connection, FixedServer
from together_post_training.client.embedded import EmbeddedServer, embedded_server
from together_post_training.client.retry import policy_from
from together_post_training.client.session import TrainingSession

T = TypeVar("T")


# How long a script's end waits for operations that nobody waited for: a server elsewhere finishes what it has been
# sent, our own ends with us.
_EXIT_WAIT_S = 10.0
_EXIT_SILENCE_S = 1.0
_EXIT_STOP_S = 5.0
_STOP_TIMEOUT_S = 10.0


class Holder:
    """The connection, this client's session id and whether it was closed.

    Tinker's SDK has an object of this kind, and scripts reach for its session id and `close`.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        # The server knows the snapshots that this client holds by the same id.
        self._session_id = connection.holds.id
        self._training_client_ids = itertools.count()
        self._is_closed = False
        self._sessions: weakref.WeakSet[TrainingSession] = weakref.WeakSet()
        self._kept: list[TrainingSession] = []
        self._operations: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        self._owner = os.getpid()
        self.tokenizers: dict[str, Any] = {}
        _holders.add(self)
        # Exit functions run last registered first: this one before that of an embedded server, which came before.
        atexit.unregister(_finish_at_exit)
        atexit.register(_finish_at_exit)

    def get_session_id(self) -> str:
        return self._session_id

    def new_training_id(self) -> str:
        """What Tinker calls a model id: <session>:train:<n>."""
        return f"{self._session_id}:train:{next(self._training_client_ids)}"

    def console_url(self, name: str) -> str:
        """Says which server it is on. There is no page behind it."""
        server = self.connection.server
        address = server.address if isinstance(server, FixedServer) else self.connection.address
        return f"{address or 'grpc://embedded'}/{name}"

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("ServiceClient is closed")

    def start(
        self, coroutine: Coroutine[Any, Any, T], on_result: Callable[[], None] | None = None
    ) -> OperationFuture[T]:
        """Runs it on the background loop, unless the client is closed."""
        if self._is_closed:
            coroutine.close()
        self.check_open()
        return start(coroutine, on_result=on_result)

    def start_operation(
        self,
        coroutine: Coroutine[Any, Any, T],
        on_failure: Callable[[], None],
        on_result: Callable[[], None],
    ) -> OperationFuture[T]:
        """The same for an operation that was numbered, so that `close` can wait for it."""
        future = start(coroutine, on_failure, on_result)
        self._operations.add(future)
        return future

    def add_session(self, session: TrainingSession) -> None:
        self._sessions.add(session)
        if session.info.HasField("full_weights"):
            # It keeps others out, so it is to end with this client, or with the script, even if both were let go of.
            self._kept.append(session)
            _keeping.add(self)

    def close(self, *, finish: bool = True) -> OperationFuture[None]:
        """Ends the training sessions on the server, after their operations if `finish`, and the connection."""
        was_closed, self._is_closed = self._is_closed, True
        _keeping.discard(self)
        return completed(None) if was_closed else start(self._close(finish))

    async def _close(self, finish: bool) -> None:
        if finish:
            running = [asyncio.wrap_future(future) for future in list(self._operations)]
            await asyncio.gather(*running, return_exceptions=True)
        stops = [session.stop() for session in list(self._sessions)]
        # A server that is away has ended them by the time it is back.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await asyncio.gather(*stops, return_exceptions=True)
        await self.connection.close()

    def finish_at_exit(self) -> None:
        """Waits for operations that were dropped, as in a script whose last line saves, unless the script failed. Then
        full weights make room for others."""
        if os.getpid() != self._owner:
            return
        if hasattr(sys, "last_type") or self._finish():
            self._stop_kept()

    def _finish(self) -> bool:
        """Whether all operations have ended."""
        running = [future for future in list(self._operations) if not future.done()]
        _, running = wait(running, timeout=_EXIT_SILENCE_S)
        if running:
            print(
                f"together-post-training: operations that nobody waited for are being finished ({len(running)}); "
                "Ctrl-C drops them",
                file=sys.stderr,
            )
            _, running = wait(running, timeout=None if self._is_server_ours else _EXIT_WAIT_S)
        return not running

    def _stop_kept(self) -> None:
        if self._kept and not self._is_closed and not self._is_server_ours:
            wait([start(session.stop()) for session in self._kept], timeout=_EXIT_STOP_S)

    @property
    def _is_server_ours(self) -> bool:
        return isinstance(self.connection.server, EmbeddedServer)


def new_holder(
    base_url: str | None, api_key: str | None, headers: Mapping[str, str] | None = None
) -> Holder:
    """Of a connection that is made at its first call.

    Raises:
        ValueError, TypeError: for an address or headers that cannot be used.
        TinkerError: for a key that cannot be sent.
    """
    return _holder_of(*_resolve(base_url, api_key), check_headers(headers or {}))


def shared_holder(base_url: str | None, api_key: str | None) -> Holder:
    """The same one for the same server and key, for as long as the process lives. Raises as `new_holder`."""
    address, key = _resolve(base_url, api_key)
    name = (os.getpid(), address, key)
    holder = _shared.get(name)
    if holder is None or holder.is_closed:
        holder = _shared[name] = _holder_of(address, key, {})
    return holder


def _resolve(base_url: str | None, api_key: str | None) -> tuple[Address | None, str | None]:
    address = resolve_address(base_url, os.environ)
    try:
        return address, resolve_key(api_key, os.environ)
    except (TypeError, ValueError) as error:
        raise tinker.TinkerError(str(error)) from error


def _holder_of(address: Address | None, key: str | None, headers: Mapping[str, str]) -> Holder:
    server = embedded_server() if address is None else FixedServer(address)
    return Holder(Connection(server, key=key, headers=headers, policy=policy_from(os.environ)))


_shared: dict[tuple[int, Address | None, str | None], Holder] = {}
_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
# Those of full weights that are not closed.
_keeping: set[Holder] = set()


def _finish_at_exit() -> None:
    for holder in list(_holders):
        holder.finish_at_exit()
