"""A server in a thread of the test's process, and a caller with the generated stubs."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from backend.config import ServerConfig
from backend.generator.base import SampleCall, SampleResult
from backend.generator.bigram import BigramGenerator
from backend.resources.catalog import ModelSpec
from backend.resources.engines import Engines, OpenEngines, open_engines
from backend.server import Server
from backend.trainer import bigram
from tests.operations.bench import WatchedTrainer
from together_post_training.client.loop import ignore_spurious_wakeups
from together_post_training.errors import DOMAIN
from together_post_training.v1 import (
    catalog_pb2_grpc,
    checkpoints_pb2_grpc,
    data_pb2,
    generator_pb2,
    generator_pb2_grpc,
    model_resources_pb2_grpc,
    operations_pb2,
    operations_pb2_grpc,
    sessions_pb2,
    sessions_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)

T = TypeVar("T")

MODEL = "builtin:bigram16"
HIT, MISS = -0.242738, -4.242738
_OPTIONS = [
    ("grpc.max_receive_message_length", 256 * 1024 * 1024),
    ("grpc.max_send_message_length", 256 * 1024 * 1024),
]


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    """All servers of a test process share it: grpc.aio complains where several loops run at once."""
    made = asyncio.new_event_loop()
    made.set_exception_handler(ignore_spurious_wakeups)
    threading.Thread(target=made.run_forever, name="servers", daemon=True).start()
    return made


def on_loop(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, loop()).result(60)


async def start(
    config: ServerConfig, open_engines: OpenEngines, clocks: dict[str, Clock]
) -> tuple[Server, str]:
    server = Server(config, open_engines=open_engines, **clocks)
    address = await server.start()
    await server.load_models()
    return server, address


@dataclass(slots=True, kw_only=True)
class Running:
    """A server that runs, and its trainer where a test watches it."""

    server: Server
    address: str
    caller: Caller
    watched: WatchedTrainer | None = None
    generator: WatchedGenerator | None = None
    is_stopped: bool = False

    def stop(self, grace_s: float = 5.0) -> bool:
        """Whether everything that ran has ended."""
        self.is_stopped = True
        return on_loop(self.server.stop(grace_s))


class WatchedGenerator(BigramGenerator):
    """Counts the samples that run and those that were cancelled; `hold` keeps one running until it is."""

    num_running = 0
    num_cancelled = 0
    hold = False

    async def sample(self, call: SampleCall) -> SampleResult:
        self.num_running += 1
        try:
            if self.hold:
                await asyncio.sleep(600)
            return await super().sample(call)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1


class Caller:
    """All stubs over one channel."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, options=_OPTIONS)
        self.catalog = catalog_pb2_grpc.CatalogServiceStub(self.channel)
        self.checkpoints = checkpoints_pb2_grpc.CheckpointServiceStub(self.channel)
        self.generator = generator_pb2_grpc.GeneratorServiceStub(self.channel)
        self.resources = model_resources_pb2_grpc.ModelResourceServiceStub(self.channel)
        self.operations = operations_pb2_grpc.OperationServiceStub(self.channel)
        self.sessions = sessions_pb2_grpc.SessionServiceStub(self.channel)
        self.trainer = trainer_pb2_grpc.TrainerServiceStub(self.channel)

    def session(self, **fields: Any) -> Run:
        lora = None if "resume_from" in fields else sessions_pb2.LoraConfig(rank=4, seed=7)
        request = {"base_model": MODEL, "lora": lora} | fields
        shown = self.sessions.CreateSession(sessions_pb2.CreateSessionRequest(**request))
        return Run(caller=self, shown=shown)

    def wait(self, operation: operations_pb2.Operation, timeout_s: float = 30.0):
        return self.operations.WaitOperation(
            operations_pb2.WaitOperationRequest(name=operation.name, timeout_s=timeout_s)
        )

    def score(self, snapshot: str, tokens: Sequence[int]) -> np.ndarray:
        """float32 (num tokens,); NaN first."""
        response = self.generator.ComputeLogprobs(
            generator_pb2.ComputeLogprobsRequest(snapshot=snapshot, prompt=prompt(tokens))
        )
        return np.frombuffer(response.logprobs.raw, np.float32)

    def open(self, **source: str) -> str:
        return self.generator.OpenSnapshot(generator_pb2.OpenSnapshotRequest(**source)).name


@dataclass(slots=True, kw_only=True)
class Run:
    """A session and the number of its next operation."""

    caller: Caller
    shown: sessions_pb2.Session
    sequence: int = field(default=0)

    @property
    def id(self) -> str:
        return self.shown.id

    def submit(self, method: str, **fields: Any) -> operations_pb2.Operation:
        """Sends the next operation."""
        self.sequence += 1
        request = getattr(trainer_pb2, f"{method}Request")(
            session=self.id, sequence=self.sequence, **fields
        )
        return getattr(self.caller.trainer, method)(request)

    def do(self, method: str, **fields: Any) -> operations_pb2.Operation:
        """Sends the next operation and waits for its end."""
        return self.caller.wait(self.submit(method, **fields))

    def train(self, *sequences: list[int], learning_rate: float = 0.1) -> None:
        for tokens in sequences:
            done = self.do("ForwardBackward", loss=cross_entropy(), samples=[sample(tokens)])
            assert done.state == operations_pb2.OPERATION_STATE_SUCCEEDED, done.error
        done = self.do("OptimStep", adam=trainer_pb2.AdamParams(learning_rate=learning_rate))
        assert done.state == operations_pb2.OPERATION_STATE_SUCCEEDED, done.error

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        done = self.do("Forward", loss=cross_entropy(), samples=[sample(tokens)])
        return np.frombuffer(
            done.forward_backward.loss_fn_outputs[0].tensors["logprobs"].raw, np.float32
        )

    def publish(self) -> str:
        return self.do("WeightsSync").weights_sync.snapshot

    def save(self, name: str, kind: str = "TRAINING", **fields: Any) -> operations_pb2.Operation:
        return self.do(
            "SaveCheckpoint",
            kind=trainer_pb2.CheckpointKind.Value(f"CHECKPOINT_KIND_{kind}"),
            name=name,
            **fields,
        )

    def path(self, name: str, folder: str = "weights") -> str:
        return f"tinker://{self.id}/{folder}/{name}"


@contextmanager
def serving(
    store: Path,
    *,
    engines: OpenEngines = open_engines,
    clocks: dict[str, Clock] | None = None,
    **config: Any,
) -> Iterator[Running]:
    settings = {"port": 0, "store": store, "models": (ModelSpec(name=MODEL, path=MODEL),)}
    made = ServerConfig(**settings | config)
    server, address = on_loop(start(made, engines, clocks or {}))
    running = Running(server=server, address=address, caller=Caller(address))
    try:
        yield running
    finally:
        running.caller.channel.close()
        if not running.is_stopped:
            running.stop()


@contextmanager
def serving_watched(store: Path, *, merge_tokens: int = 0, **config: Any) -> Iterator[Running]:
    """With a trainer that waits and fails where the test says so."""
    trainer = WatchedTrainer(merge_tokens)
    generator = WatchedGenerator(bigram.load(MODEL))

    def engines(name: str, path: str) -> Engines:
        return Engines(trainer=trainer, generator=generator, tokenizer_dir=None)

    with serving(store, engines=engines, **config) as running:
        running.watched, running.generator = trainer, generator
        try:
            yield running
        finally:
            trainer.gate.set()


def wait_until(is_so: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.005)


def prompt(tokens: Sequence[int]) -> data_pb2.ModelInput:
    text = data_pb2.EncodedText(raw=np.asarray(tokens, "<i4").tobytes())
    return data_pb2.ModelInput(chunks=[data_pb2.Chunk(encoded_text=text)])


def cross_entropy() -> data_pb2.LossConfig:
    return data_pb2.LossConfig(type="cross_entropy")


def sample(tokens: Sequence[int], **floats: Sequence[float]) -> data_pb2.Sample:
    """Of a whole sequence; `floats` have a value for each target."""
    inputs = {"target_tokens": data_pb2.Tensor(ints=data_pb2.Ints(values=tokens[1:]))}
    for key, values in floats.items():
        inputs[key] = data_pb2.Tensor(floats=data_pb2.Floats(values=values))
    return data_pb2.Sample(model_input=prompt(tokens[:-1]), loss_fn_inputs=inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    code: grpc.StatusCode
    reason: str
    message: str
    metadata: dict[str, str]


def refusal(call: Callable[..., Any], request: Message, **kwargs: Any) -> Refusal:
    """How a call fails: its status and its one ErrorInfo, which must agree."""
    with pytest.raises(grpc.RpcError) as caught:
        call(request, **kwargs)
    error: Any = caught.value
    status = rpc_status.from_call(error)
    assert status is not None, f"{error.code()}: {error.details()} has no details"
    assert status.message == error.details()
    info = error_details_pb2.ErrorInfo()
    (detail,) = status.details
    assert detail.Unpack(info)
    assert info.domain == DOMAIN
    assert "Traceback" not in status.message
    return Refusal(
        code=error.code(),
        reason=info.reason,
        message=status.message,
        metadata=dict(info.metadata),
    )
