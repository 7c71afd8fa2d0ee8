"""The connection to a server: one gRPC channel, one way to call."""

from __future__ import annotations

import asyncio
import logging
import operator
import random
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from together_post_training.client.address import Address
from together_post_training.client.holding import Holds
from together_post_training.client.retry import RetryPolicy
from together_post_training.client.status import Failure, read_failure
from together_post_training.client.window import Window
from together_post_training.errors import ConnectionLostError, Reason, fail
from together_post_training.v1 import (
    catalog_pb2,
    catalog_pb2_grpc,
    checkpoints_pb2_grpc,
    generator_pb2_grpc,
    operations_pb2_grpc,
    sessions_pb2_grpc,
    trainer_pb2_grpc,
)

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 256 * 2**20
_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished without a word is noticed within a minute, also during a call that runs for hours.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Retries are ours; the channel only has to notice soon that the server is back.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]

# An outage that lasts longer is told of: a script that waits in silence looks as if it hung.
_SILENCE_S = 1.0
# A full server is spoken of again after this long.
_FULL_AGAIN_S = 60.0
# An attempt that fails after this long was being worked on until then: without a peer, keepalive had ended it sooner.
_ALIVE_S = 60.0
# Not the module's own generator, whose seed and state are the caller's.
_random = random.Random()

# Of these, any number is called at once.
_SAMPLING = frozenset({"generator.Sample", "generator.ComputeLogprobs"})


class Server(Protocol):
    """Where a server is."""

    async def locate(self) -> Address:
        """Its address; starts it first if it is ours to start."""
        ...

    def check(self) -> None:
        """Raises ConnectionLostError if it is known that the server will never answer again."""
        ...


@dataclass(frozen=True, slots=True)
class FixedServer:
    """A server that somebody else runs."""

    address: Address

    async def locate(self) -> Address:
        return self.address

    def check(self) -> None:
        pass


class Stubs:
    """The services, over one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.catalog = catalog_pb2_grpc.CatalogServiceStub(channel)
        self.checkpoints = checkpoints_pb2_grpc.CheckpointServiceStub(channel)
        self.sessions = sessions_pb2_grpc.SessionServiceStub(channel)
        self.trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        self.operations = operations_pb2_grpc.OperationServiceStub(channel)
        self.generator = generator_pb2_grpc.GeneratorServiceStub(channel)


class Connection:
    """Calls a server, trying again where that may help. All coroutines run on the background loop.

    Owned by whoever made it; `close` ends it for good.
    """

    def __init__(
        self,
        server: Server,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        policy: RetryPolicy | None = None,
    ) -> None:
        self.server = server
        self.key = key
        self.headers = dict(headers or {})
        self.policy = policy or RetryPolicy()
        self.holds = Holds()
        # None until the server has answered.
        self.address: Address | None = None
        self._metadata = _metadata(key, self.headers)
        self._connecting = asyncio.Lock()
        self._channel: grpc.aio.Channel | None = None
        self._stubs: Stubs | None = None
        self._is_closed = False
        self._told_of_outage = False
        self._told_of_full_s = -_FULL_AGAIN_S
        self._sampling = Window()

    async def call(
        self,
        method: str,
        request: Message,
        *,
        timeout_s: float | None = None,
        done: Reason | None = None,
    ) -> Any:
        """Calls e.g. "trainer.Forward" until it is answered.

        Args:
            timeout_s: for one attempt; then it counts as unanswered and is tried again.
            done: what the server refuses to do again. After an unanswered attempt, that is the answer: None.

        Raises:
            PostTrainingError: what the server said, unless it is full: then the call waits for as long as that takes.
            ConnectionLostError: the server could not be reached for as long as the policy allows.
        """
        rpc = operator.attrgetter(method)(self._stubs or await self._connect())
        window = self._sampling if method in _SAMPLING else None
        number = window.number() if window else 0
        outage: Outage | None = None
        was_lost = False
        while True:
            async with window.place(number) if window else nullcontext():
                start_s = time.monotonic()
                outcome = await self._attempt(rpc, request, timeout_s)
                if window:
                    _note(window, outcome)
            if not isinstance(outcome, Failure):
                return outcome
            if not outcome.is_transient:
                if was_lost and outcome.error.reason is done:
                    return None
                raise outcome.error
            was_lost = was_lost or outcome.is_connection
            if outcome.is_full:
                await self._wait_for_room(outcome)
                outage = None
                continue
            if outage is None or time.monotonic() - start_s > _ALIVE_S:
                outage = Outage(self.policy)
            await self._wait_out(outcome, outage)

    async def call_once(self, method: str, request: Message, *, timeout_s: float) -> Any:
        """The same in one attempt, which nobody hears of: for what is said again anyway.

        Raises:
            PostTrainingError: also UNAVAILABLE, when the server did not answer.
            ConnectionLostError: it never did.
        """
        rpc = operator.attrgetter(method)(self._stubs or await self._connect())
        outcome = await self._attempt(rpc, request, timeout_s)
        if isinstance(outcome, Failure):
            raise outcome.error
        return outcome

    async def stream(self, method: str, request: Message) -> AsyncGenerator[Any, None]:
        """The messages of one attempt, e.g. of "checkpoints.DownloadCheckpoint"; closing it hangs up.

        Raises:
            PostTrainingError: what the server said.
            ConnectionLostError: the server could not be reached, or the stream broke off: ask for the rest of it.
        """
        rpc = operator.attrgetter(method)(self._stubs or await self._connect())
        call = rpc(request, metadata=self._metadata)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            failure = read_failure(error)
            if failure.is_connection:
                raise ConnectionLostError(
                    f"Lost the connection to {self.address} ({failure.error.message})."
                ) from None
            raise failure.error from None
        finally:
            call.cancel()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    async def close(self) -> None:
        """Lets its snapshots go, and cancels what is being called."""
        self._is_closed = True
        await self.holds.let_go(self)
        if self._channel is not None:
            await self._channel.close()

    async def _attempt(self, rpc: Any, request: Message, timeout_s: float | None) -> Any:
        """The response, or a Failure."""
        try:
            response = await rpc(request, metadata=self._metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return read_failure(error)
        except grpc.aio.UsageError:
            raise fail(Reason.UNAVAILABLE, "The client is closed.") from None
        self._tell_of_answer()
        return response

    async def _connect(self) -> Stubs:
        """Opens the channel and waits for a first answer, whatever it is."""
        async with self._connecting:
            if self._is_closed:
                raise fail(Reason.UNAVAILABLE, "The client is closed.")
            if self._stubs is None:
                address = await self.server.locate()
                self._channel = open_channel(address)
                try:
                    await self._probe(Stubs(self._channel), address)
                except BaseException:
                    await self._channel.close()
                    raise
                self.address, self._stubs = address, Stubs(self._channel)
            return self._stubs

    async def _probe(self, stubs: Stubs, address: Address) -> None:
        outage = Outage(self.policy)
        limit_s = self.policy.connect_timeout_s
        while True:
            try:
                await stubs.catalog.GetServerInfo(
                    catalog_pb2.GetServerInfoRequest(),
                    metadata=self._metadata,
                    timeout=limit_s - outage.elapsed_s(),
                )
                return
            except grpc.aio.AioRpcError as error:
                failure = read_failure(error)
            if not failure.is_connection:
                return
            self.server.check()
            delay_s = outage.next_delay_s(failure)
            if outage.elapsed_s() + delay_s >= limit_s:
                raise ConnectionLostError(
                    f"Cannot reach {address}: no answer within {limit_s:g} s ({failure.error.message}). "
                    "Check that the server is running there and that the address is right."
                )
            self._tell_of_outage(address, failure, outage, limit_s)
            await asyncio.sleep(delay_s)

    async def _wait_for_room(self, failure: Failure) -> None:
        """Sleeps for as long as the server asks for. Told of once for all calls that wait."""
        now = time.monotonic()
        if now - self._told_of_full_s >= _FULL_AGAIN_S:
            self._told_of_full_s = now
            logger.warning("%s (Calls wait until there is room.)", failure.error.message)
        await asyncio.sleep(self.policy.delay_s(0, _random.random(), told_s=failure.told_s))

    async def _wait_out(self, failure: Failure, outage: Outage) -> None:
        """Sleeps before the next attempt, or raises when there is none."""
        if failure.is_connection:
            self.server.check()
        delay_s = outage.next_delay_s(failure)
        if outage.elapsed_s() + delay_s <= self.policy.outage_timeout_s:
            if failure.is_connection:
                self._tell_of_outage(self.address, failure, outage, self.policy.outage_timeout_s)
            else:
                outage.tell_of_refusal(failure)
            await asyncio.sleep(delay_s)
        elif failure.is_connection:
            raise ConnectionLostError(
                f"Lost the connection to {self.address}: no answer for "
                f"{outage.elapsed_s():.0f} s ({failure.error.message})."
            )
        else:
            raise failure.error

    def _tell_of_outage(
        self, address: Address | None, failure: Failure, outage: Outage, limit_s: float
    ) -> None:
        """Once for all calls that wait."""
        if self._told_of_outage or outage.elapsed_s() < _SILENCE_S:
            return
        self._told_of_outage = True
        logger.warning(
            "No answer from %s (%s); trying again for up to %g s.",
            address,
            failure.error.message,
            limit_s,
        )

    def _tell_of_answer(self) -> None:
        if self._told_of_outage:
            self._told_of_outage = False
            logger.warning("%s answers.", self.address)


class Outage:
    """How long, and how often, one call has failed in a row."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._start_s = time.monotonic()
        self._attempt = 0
        self._told_of_refusal = False

    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def next_delay_s(self, failure: Failure) -> float:
        delay_s = self._policy.delay_s(self._attempt, _random.random(), told_s=failure.told_s)
        self._attempt += 1
        return delay_s

    def tell_of_refusal(self, failure: Failure) -> None:
        """Once, of a server that answers, but has no room for the call yet."""
        if self._told_of_refusal or self.elapsed_s() < _SILENCE_S:
            return
        self._told_of_refusal = True
        limit_s = self._policy.outage_timeout_s
        logger.warning("%s Trying again for up to %g s.", failure.error.message, limit_s)


def _note(window: Window, outcome: Any) -> None:
    if not isinstance(outcome, Failure):
        window.note_answer()
    elif outcome.is_full:
        window.note_refusal()


def open_channel(address: Address) -> grpc.aio.Channel:
    """To be called on the loop that will use it."""
    options = list(_OPTIONS)
    if address.is_loopback:
        # What http_proxy names has no way back to this machine.
        options.append(("grpc.enable_http_proxy", 0))
    if address.secure:
        credentials = grpc.ssl_channel_credentials()
        return grpc.aio.secure_channel(address.target, credentials, options=options)
    return grpc.aio.insecure_channel(address.target, options=options)


def _metadata(key: str | None, headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    given = tuple((name.lower(), value) for name, value in headers.items())
    return given + ((("authorization", f"Bearer {key}"),) if key else ())
