"""The border where exceptions become gRPC statuses."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from backend.operations.database import as_failure
from together_post_training.errors import DOMAIN, PostTrainingError, Reason, fail

log = logging.getLogger(__name__)

# Trailers travel in HTTP/2 headers, whose whole size clients limit to 8 KiB, and the message is in them twice.
_MAX_MESSAGE_BYTES = 1500
_MAX_VALUE_BYTES = 200
_OURS = "/together_post_training."

request_bytes: ContextVar[bytes] = ContextVar("request_bytes")
"""Within a call: its request as it arrived, which spares encoding it again."""


@dataclass(frozen=True, slots=True)
class _Received:
    """message: the request, or why its bytes are none."""

    message: Any
    data: bytes


def to_status(error: PostTrainingError) -> status_pb2.Status:
    """With a google.rpc.ErrorInfo, and a RetryInfo if it says when to try again. Overlong texts end in an ellipsis."""
    message = shorten(error.message, _MAX_MESSAGE_BYTES)
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=DOMAIN,
        metadata={k: shorten(v, _MAX_VALUE_BYTES) for k, v in error.metadata.items()},
    )
    details = [_packed(info)]
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMicroseconds(math.ceil(error.retry_after_s * 1e6))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(code=error.code.value[0], message=message, details=details)


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def shorten(text: str, max_bytes: int) -> str:
    data = text.encode()
    if len(data) <= max_bytes:
        return text
    return data[: max_bytes - 3].decode(errors="ignore") + "…"


class ErrorBorder(grpc.aio.ServerInterceptor):
    """Around every method of this project's services; health and reflection look after themselves."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_OURS):
            return handler
        wrap, make = (
            (_stream, grpc.unary_stream_rpc_method_handler)
            if handler.response_streaming
            else (_unary, grpc.unary_unary_rpc_method_handler)
        )
        behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary
        return make(
            wrap(behavior, method, handler.response_serializer),  # pyright: ignore[reportAttributeAccessIssue]
            request_deserializer=_parser(handler.request_deserializer),
        )


def _unary(
    behavior: Callable[..., Awaitable[Any]], method: str, serialize: Callable[[Any], bytes]
) -> Callable[..., Awaitable[bytes]]:
    """Serialises here: gRPC would keep the message beside its bytes until the caller has read them."""

    @functools.wraps(behavior)
    async def call(received: _Received, context: grpc.aio.ServicerContext) -> Any:
        try:
            return serialize(await behavior(_unpack(received), context))
        except Exception as error:
            await _abort(context, method, error)

    return call


def _stream(
    behavior: Callable[..., AsyncIterator[Any]], method: str, serialize: Callable[[Any], bytes]
) -> Callable[..., AsyncIterator[bytes]]:
    @functools.wraps(behavior)
    async def call(received: _Received, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async for response in behavior(_unpack(received), context):
                yield serialize(response)
        except Exception as error:
            await _abort(context, method, error)

    return call


def _parser(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], _Received]:
    """Keeps the error instead of raising it, where gRPC would answer UNKNOWN and log a traceback."""

    def parse(data: bytes) -> _Received:
        try:
            return _Received(deserialize(data), data)
        except DecodeError as error:
            return _Received(error, data)

    return parse


def _unpack(received: _Received) -> Any:
    if isinstance(received.message, DecodeError):
        raise fail(
            Reason.INVALID_ARGUMENT,
            "The request's bytes are not a protobuf message of this method's type. Was the client generated from this "
            "server's .proto files?",
        )
    request_bytes.set(received.data)
    return received.message


async def _abort(context: grpc.aio.ServicerContext, method: str, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    error = as_failure(error)
    if not isinstance(error, PostTrainingError):
        log.error("%s failed inside the server", method, exc_info=error)
        error = fail(
            Reason.INTERNAL,
            f"The server failed ({type(error).__name__}); its log has the details under {method}.",
            method=method,
        )
    # The stubs know the method only of the synchronous context.
    await context.abort_with_status(  # pyright: ignore[reportAttributeAccessIssue]
        rpc_status.to_status(to_status(error))
    )
