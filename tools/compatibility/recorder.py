"""Stands where a client has its server: writes down what is sent, and answers."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import numpy as np
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp

from backend.services import wire
from together_post_training import losses, tensors
from together_post_training.client.channel import Connection
from together_post_training.errors import Reason
from together_post_training.v1 import data_pb2, operations_pb2

MODEL = "model"
_SERVICES = (
    "catalog",
    "checkpoints",
    "generator",
    "model_resources",
    "operations",
    "sessions",
    "trainer",
)
# Said in the background, at times of its own.
_UNASKED = ("generator.HoldSnapshots", "sessions.HeartbeatSession")
_RESULTS = {
    "Forward": "forward_backward",
    "ForwardBackward": "forward_backward",
    "CustomForwardBackward": "forward_backward",
    "OptimStep": "optim_step",
    "WeightsSync": "weights_sync",
    "SaveCheckpoint": "save_checkpoint",
    "LoadCheckpoint": "load_checkpoint",
}
_TEXTS = {
    "base_model": MODEL,
    "name": "name",
    "next_page_token": "",
    "path": "tinker://run/weights/name",
    "session": "run",
}
# Sessions have adapters, and nothing is warned of.
_UNSET = ("full_weights", "warnings")
_IDS = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|0x[0-9a-f]{6,}|datetime\([^()]*\)|https?://\S+")


class Recorder:
    """sent: each request, as text."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Until then no connection of this process calls anybody."""
        answers = {"call": self._call, "call_once": self._call_once, "stream": self._stream}
        kept = {name: getattr(Connection, name) for name in answers}
        for name, answering in answers.items():
            setattr(Connection, name, _of_any_connection(answering))
        try:
            yield
        finally:
            for name, genuine in kept.items():
                setattr(Connection, name, genuine)

    async def _call(
        self,
        method: str,
        request: Message,
        *,
        timeout_s: float | None = None,
        done: Reason | None = None,
    ) -> Any:
        if method not in _UNASKED:
            self.sent.append(without_ids(f"{method} {text_format.MessageToString(request)}"))
        _check(request)
        return answer(method, request)

    async def _call_once(self, method: str, request: Message, *, timeout_s: float) -> Any:
        return await self._call(method, request)

    async def _stream(self, method: str, request: Message) -> AsyncGenerator[Any, None]:
        yield await self._call(method, request)


def _of_any_connection(function: Callable[..., Any]) -> Callable[..., Any]:
    """As a method."""
    return lambda _, *arguments, **named: function(*arguments, **named)


def without_ids(text: str) -> str:
    """Without what is new at every call: ids, addresses and points in time."""
    return _IDS.sub("...", text)


def answer(method: str, request: Any) -> Any:
    """What a server might say: every field is set, lists have three elements, and all operations succeed."""
    service, _, name = method.partition(".")
    reply = _filled(_methods(service)[name].output_type)
    if isinstance(reply, operations_pb2.Operation):
        return _operation(name, request)
    for place, session in enumerate(getattr(reply, "sessions", ())):
        session.id = f"client-{place}:train:0"
        session.display_name = f"client {place}"
        session.user_metadata["place"] = str(place)
    for field in ("id", "base_model"):
        if getattr(request, field, "") and hasattr(reply, field):
            setattr(reply, field, getattr(request, field))
    return reply


def _check(request: Any) -> None:
    """What the server refuses of the data that it is sent."""
    if hasattr(request, "prompt"):
        wire.tokens(request.prompt, "The prompt")
    for i, sample in enumerate(getattr(request, "samples", ())):
        wire.tokens(sample.model_input, f"Sample {i}")
    if hasattr(request, "loss"):
        losses.contract(request.loss.type)


def _methods(service: str) -> dict[str, MethodDescriptor]:
    module = importlib.import_module(f"together_post_training.v1.{service}_pb2")
    (found,) = module.DESCRIPTOR.services_by_name.values()
    return found.methods_by_name


def _operation(method: str, request: Any) -> operations_pb2.Operation:
    operation = operations_pb2.Operation(
        name="sessions/run/operations/1", state=operations_pb2.OPERATION_STATE_SUCCEEDED
    )
    result = getattr(operation, _RESULTS.get(method, "optim_step"))
    result.CopyFrom(_filled(result.DESCRIPTOR))
    if hasattr(result, "loss_fn_outputs"):
        del result.loss_fn_outputs[:]
        for sample in request.samples:
            targets = tensors.decode(sample.loss_fn_inputs["target_tokens"])
            output = result.loss_fn_outputs.add().tensors["logprobs"]
            tensors.encode_into(output, np.full(targets.shape, -0.5, np.float32))
        result.metrics.clear()
        result.metrics["loss:sum"] = 1.0
    return operation


def _filled(descriptor: Any, depth: int = 0, place: int = 0) -> Any:
    """place: which element of a list this is; they differ in it."""
    message = GetMessageClass(descriptor)()
    if isinstance(message, Timestamp):
        message.seconds = 2_000_000_000 - place
        return message
    if isinstance(message, data_pb2.Tensor):
        tensors.encode_into(message, np.array([-0.5], np.float32))
        return message
    for field in _fields(descriptor, depth):
        values = (_value(field, depth, n) for n in range(3 if field.is_repeated else 1))
        if field.is_repeated:
            getattr(message, field.name).extend(values)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(next(values))
        elif place and field.name in ("id", "path", "name"):
            setattr(message, field.name, f"{next(values)}-{place}")
        else:
            setattr(message, field.name, next(values))
    return message


def _fields(descriptor: Any, depth: int) -> Iterator[FieldDescriptor]:
    taken = set()
    for field in descriptor.fields:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        is_deep = field.message_type is not None and depth > 3
        family = field.containing_oneof
        if (
            field.name in _UNSET
            or is_map
            or is_deep
            or (family is not None and family.name in taken)
        ):
            continue
        if family is not None:
            taken.add(family.name)
        yield field


def _value(field: FieldDescriptor, depth: int, place: int) -> Any:
    if field.message_type is not None:
        return _filled(field.message_type, depth + 1, place)
    if field.enum_type is not None:
        return field.enum_type.values[1].number
    return {
        FieldDescriptor.CPPTYPE_STRING: b"x"
        if field.type == FieldDescriptor.TYPE_BYTES
        else _TEXTS.get(field.name, "text"),
        FieldDescriptor.CPPTYPE_BOOL: True,
        FieldDescriptor.CPPTYPE_DOUBLE: 0.5,
        FieldDescriptor.CPPTYPE_FLOAT: 0.5,
    }.get(field.cpp_type, 1)
