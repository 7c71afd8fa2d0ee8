"""The server that commands call: found, called and left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from google.protobuf.message import Message

from together_post_training.client.address import OWN_VARIABLE, resolve_address, resolve_key
from together_post_training.client.channel import Connection, FixedServer
from together_post_training.client.loop import background_loop
from together_post_training.client.retry import CONNECT_TIMEOUT_VARIABLE, RetryPolicy, policy_from
from together_post_training.errors import ConnectionLostError, PostTrainingError

T = TypeVar("T")

MAX_PAGE = 1000
# Somebody is looking at an empty line meanwhile.
_CONNECT_TIMEOUT_S = 5.0
_OUTAGE_TIMEOUT_S = 60.0
_NUM_AT_ONCE = 16
_EMBEDDED_HINT = ", or leave it out to start an embedded server"


class UsageError(Exception):
    """The command makes no sense as it was typed."""


class CommandError(Exception):
    """It makes sense and cannot be done."""


class Client:
    """Calls one server; every method waits for the answer.

    Raises:
        PostTrainingError: what the server said.
        ConnectionLostError: it could not be reached.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return background_loop().start(coroutine).result()

    def call(self, method: str, request: Message) -> Any:
        return self.run(self.connection.call(method, request))

    def run_all(
        self, calls: Sequence[Coroutine[Any, Any, T]]
    ) -> list[T | PostTrainingError | ConnectionLostError]:
        """Some at a time; the answers or errors in the order of the calls."""
        return self.run(_run_all(calls))

    def listed(
        self, method: str, request: Any, field: str, *, limit: int = 0
    ) -> tuple[list[Any], bool]:
        """(the first `limit` items of a listing, or all for 0; whether there are more), fetched page by page.

        Args:
            field: of the reply, that holds the items.
        """
        items: list[Any] = []
        while True:
            request.page_size = min(limit - len(items), MAX_PAGE) if limit else MAX_PAGE
            reply = self.call(method, request)
            items += getattr(reply, field)
            request.page_token = reply.next_page_token
            if not reply.next_page_token or (limit and len(items) >= limit):
                return items, bool(reply.next_page_token)


async def _run_all(
    calls: Sequence[Coroutine[Any, Any, T]],
) -> list[T | PostTrainingError | ConnectionLostError]:
    places = asyncio.Semaphore(_NUM_AT_ONCE)

    async def run(call: Coroutine[Any, Any, T]) -> T | PostTrainingError | ConnectionLostError:
        async with places:
            try:
                return await call
            except (PostTrainingError, ConnectionLostError) as error:
                return error

    return await asyncio.gather(*map(run, calls))


@contextmanager
def connected(address: str | None, environ: Mapping[str, str]) -> Iterator[Client]:
    """To the address, or to where ServiceClient would look.

    Raises:
        UsageError: for an address that is none, and where none is given.
    """
    try:
        found = resolve_address(address, environ)
        key, policy = resolve_key(None, environ), _policy(environ)
    except ValueError as error:
        # The words of ServiceClient, which has one more way.
        message = str(error).replace("base_url", "--address", 1)
        raise UsageError(message.replace(_EMBEDDED_HINT, "")) from None
    if found is None:
        raise UsageError(
            f"no server is named: give --address grpc://host:port, or set {OWN_VARIABLE}. For the checkpoints of "
            "scripts that started a server of their own, start one on the same store: "
            "together-post-training serve --load-on-demand"
        )
    client = Client(Connection(FixedServer(found), key=key, policy=policy))
    try:
        yield client
    finally:
        client.run(client.connection.close())


def _policy(environ: Mapping[str, str]) -> RetryPolicy:
    policy = replace(policy_from(environ), outage_timeout_s=_OUTAGE_TIMEOUT_S)
    if environ.get(CONNECT_TIMEOUT_VARIABLE):
        return policy
    return replace(policy, connect_timeout_s=_CONNECT_TIMEOUT_S)
