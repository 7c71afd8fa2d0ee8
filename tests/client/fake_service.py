"""A small service over real gRPC, for faults that a real server cannot be asked to have.

It orders operations by their numbers, remembers every request and computes nothing: log-probabilities are -0.5 per
target. It can refuse calls, stall them, leave operations unfinished, go away and come back on the same port.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from together_post_training import tensors
from together_post_training.client.loop import ignore_spurious_wakeups
from together_post_training.errors import DOMAIN, PostTrainingError, Reason
from together_post_training.names import operation_name, parse_operation_name
from together_post_training.v1 import (
    catalog_pb2,
    catalog_pb2_grpc,
    checkpoints_pb2,
    checkpoints_pb2_grpc,
    generator_pb2,
    generator_pb2_grpc,
    operations_pb2,
    operations_pb2_grpc,
    sessions_pb2,
    sessions_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)

LOGPROB = -0.5
_ENDED = (
    operations_pb2.OPERATION_STATE_SUCCEEDED,
    operations_pb2.OPERATION_STATE_FAILED,
    operations_pb2.OPERATION_STATE_CANCELLED,
)


@dataclass
class Fault:
    """What a method does instead of answering, `times` times."""

    times: int
    code: grpc.StatusCode | None = None
    error: PostTrainingError | None = None
    # In place of the error's.
    reason: str | None = None
    retry_s: float | None = None
    stall_s: float = 0.0


@dataclass
class Session:
    id: str
    next_sequence: int = 1
    requests: dict[int, Any] = field(default_factory=dict)
    operations: dict[int, operations_pb2.Operation] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)


class FakeService:
    """Start, use from any thread, stop. `requests` holds (method, request) in the order of arrival."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.metadata: list[dict[str, str]] = []
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.sessions: dict[str, Session] = {}
        # Sequence numbers of operations that do not end until they are removed here and `nudge` is called.
        self.unfinished: set[int] = set()
        # What operations warn of, by sequence number.
        self.warnings: dict[int, list[str]] = {}
        # What samples and scores warn of, by their order.
        self.sample_warnings: list[list[str]] = []
        # Raises to fail an operation.
        self.behave: Callable[[Any], None] = lambda request: None
        self.lease_s = 600.0
        # By base model.
        self.tokenizers: dict[str, catalog_pb2.GetTokenizerResponse] = {}
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(ignore_spurious_wakeups)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: Any = None

    @property
    def address(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._run(self._start())

    def stop(self) -> None:
        self._run(self._server.stop(None))

    def nudge(self) -> None:
        """Looks again at what may end now."""
        for session in self.sessions.values():
            self._run(self._advance(session))

    def inject(self, method: str, **fault: Any) -> None:
        self.faults[method].append(Fault(**{"times": 1, **fault}))

    def received(self, method: str) -> list[Any]:
        return [request for name, request in self.requests if name == method]

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _start(self) -> None:
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 256 * 2**20)]
        self._server = grpc.aio.server(options=options, interceptors=[_Faulty(self)])
        catalog_pb2_grpc.add_CatalogServiceServicer_to_server(_Catalog(self), self._server)
        sessions_pb2_grpc.add_SessionServiceServicer_to_server(_Sessions(self), self._server)
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(_Trainer(self), self._server)
        operations_pb2_grpc.add_OperationServiceServicer_to_server(_Operations(self), self._server)
        generator_pb2_grpc.add_GeneratorServiceServicer_to_server(_Generator(self), self._server)
        checkpoints_pb2_grpc.add_CheckpointServiceServicer_to_server(_Checkpoints(), self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def submit(self, request: Any) -> operations_pb2.Operation:
        session = self.sessions[request.session]
        sequence = request.sequence
        if sequence not in session.operations:
            session.requests[sequence] = request
            session.operations[sequence] = operations_pb2.Operation(
                name=operation_name(session.id, sequence),
                state=operations_pb2.OPERATION_STATE_QUEUED,
            )
        await self._advance(session)
        return session.operations[sequence]

    async def wait(self, name: str, timeout_s: float) -> operations_pb2.Operation:
        session_id, sequence = parse_operation_name(name)
        session = self.sessions[session_id]

        def has_ended() -> bool:
            operation = session.operations.get(sequence)
            return operation is not None and operation.state in _ENDED

        async with session.changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.changed.wait_for(has_ended), timeout_s)
        return session.operations[sequence]

    async def cancel(self, name: str) -> operations_pb2.Operation:
        session_id, sequence = parse_operation_name(name)
        session = self.sessions[session_id]
        operation = session.operations.setdefault(sequence, operations_pb2.Operation(name=name))
        if operation.state not in _ENDED:
            operation.state = operations_pb2.OPERATION_STATE_CANCELLED
            operation.error.reason, operation.error.message = Reason.CANCELLED, "cancelled"
        await self._advance(session)
        return operation

    async def _advance(self, session: Session) -> None:
        """Runs what is in order."""
        while session.next_sequence in session.operations:
            operation = session.operations[session.next_sequence]
            if operation.state not in _ENDED:
                if session.next_sequence in self.unfinished:
                    break
                self._execute(operation, session.requests[session.next_sequence])
            session.next_sequence += 1
        async with session.changed:
            session.changed.notify_all()

    def _execute(self, operation: operations_pb2.Operation, request: Any) -> None:
        try:
            self.behave(request)
        except PostTrainingError as error:
            operation.state = operations_pb2.OPERATION_STATE_FAILED
            operation.error.reason, operation.error.message = error.reason, error.message
            operation.error.metadata.update(error.metadata)
            return
        _RESULTS[type(request)](operation, request)
        operation.warnings.extend(self.warnings.get(request.sequence, ()))
        operation.state = operations_pb2.OPERATION_STATE_SUCCEEDED


class _Faulty(grpc.aio.ServerInterceptor):
    """Records requests and plays the faults."""

    def __init__(self, fake: FakeService) -> None:
        self._fake = fake

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.rsplit("/", 1)[-1]
        fake = self._fake

        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            fake.requests.append((method, request))
            fake.metadata.append(dict(handler_call_details.invocation_metadata))
            while fake.faults[method] and fake.faults[method][0].times <= 0:
                fake.faults[method].pop(0)
            if fake.faults[method]:
                fake.faults[method][0].times -= 1
                await _play(fake.faults[method][0], context)
            return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(
            call,  # pyright: ignore[reportArgumentType]
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


async def _play(fault: Fault, context: Any) -> None:
    await asyncio.sleep(fault.stall_s)
    if fault.error is not None:
        info = error_details_pb2.ErrorInfo(
            reason=fault.reason or fault.error.reason,
            domain=DOMAIN,
            metadata=dict(fault.error.metadata),
        )
        details = [_packed(info)]
        if fault.retry_s is not None:
            delay = duration_pb2.Duration(nanos=int(fault.retry_s * 1e9))
            details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
        status = status_pb2.Status(
            code=fault.error.code.value[0], message=fault.error.message, details=details
        )
        await context.abort_with_status(rpc_status.to_status(status))
    if fault.code is not None:
        await context.abort(fault.code, "injected")


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


class _Catalog(catalog_pb2_grpc.CatalogServiceServicer):
    def __init__(self, fake: FakeService) -> None:
        self._fake = fake

    async def GetTokenizer(self, request: Any, context: Any) -> catalog_pb2.GetTokenizerResponse:
        return self._fake.tokenizers[request.base_model]

    async def GetServerInfo(self, request: Any, context: Any) -> catalog_pb2.ServerInfo:
        return catalog_pb2.ServerInfo(version="fake")

    async def ListModels(self, request: Any, context: Any) -> catalog_pb2.ListModelsResponse:
        fake = catalog_pb2.Model(name="fake", architecture="Fake", max_context_length=64)
        return catalog_pb2.ListModelsResponse(models=[fake, catalog_pb2.Model(name="unloaded")])


class _Sessions(sessions_pb2_grpc.SessionServiceServicer):
    def __init__(self, fake: FakeService) -> None:
        self._fake = fake

    async def CreateSession(self, request: Any, context: Any) -> sessions_pb2.Session:
        self._fake.sessions.setdefault(request.id, Session(request.id))
        return sessions_pb2.Session(
            id=request.id, base_model=request.base_model or "fake", lora=request.lora
        )

    async def HeartbeatSession(self, request: Any, context: Any) -> Any:
        return sessions_pb2.HeartbeatSessionResponse()

    async def StopSession(self, request: Any, context: Any) -> sessions_pb2.Session:
        return sessions_pb2.Session(id=request.id)


class _Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    def __init__(self, fake: FakeService) -> None:
        for method in (
            "Forward",
            "ForwardBackward",
            "CustomForwardBackward",
            "OptimStep",
            "WeightsSync",
            "SaveCheckpoint",
            "LoadCheckpoint",
        ):
            setattr(self, method, self._submit)
        self._fake = fake

    async def _submit(self, request: Any, context: Any) -> operations_pb2.Operation:
        return await self._fake.submit(request)


class _Operations(operations_pb2_grpc.OperationServiceServicer):
    def __init__(self, fake: FakeService) -> None:
        self._fake = fake

    async def WaitOperation(self, request: Any, context: Any) -> operations_pb2.Operation:
        return await self._fake.wait(request.name, request.timeout_s)

    async def CancelOperation(self, request: Any, context: Any) -> operations_pb2.Operation:
        return await self._fake.cancel(request.name)


class _Checkpoints(checkpoints_pb2_grpc.CheckpointServiceServicer):
    async def GetCheckpoint(self, request: Any, context: Any) -> checkpoints_pb2.Checkpoint:
        return checkpoints_pb2.Checkpoint(path=request.path)


class _Generator(generator_pb2_grpc.GeneratorServiceServicer):
    def __init__(self, fake: FakeService) -> None:
        self._fake = fake

    def _warnings(self) -> list[str]:
        return self._fake.sample_warnings.pop(0) if self._fake.sample_warnings else []

    async def OpenSnapshot(self, request: Any, context: Any) -> generator_pb2.Snapshot:
        return generator_pb2.Snapshot(
            name="snapshots/fake", base_model=request.base_model or "fake"
        )

    async def HoldSnapshots(
        self, request: Any, context: Any
    ) -> generator_pb2.HoldSnapshotsResponse:
        return generator_pb2.HoldSnapshotsResponse(lease_s=self._fake.lease_s)

    async def Sample(self, request: Any, context: Any) -> generator_pb2.SampleResponse:
        sequence = generator_pb2.SampledSequence(
            id="q",
            stop_reason=generator_pb2.STOP_REASON_LENGTH,
            tokens=np.arange(2, dtype="<i4").tobytes(),
            logprobs=np.zeros(2, dtype="<f4").tobytes(),
        )
        return generator_pb2.SampleResponse(
            sequences=[sequence] * request.num_samples, warnings=self._warnings()
        )

    async def ComputeLogprobs(
        self, request: Any, context: Any
    ) -> generator_pb2.ComputeLogprobsResponse:
        values = np.array([np.nan, LOGPROB], dtype="<f4")
        return generator_pb2.ComputeLogprobsResponse(
            logprobs=tensors.encode(values), warnings=self._warnings()
        )


def _passed(operation: operations_pb2.Operation, request: Any) -> None:
    result = operation.forward_backward
    for sample in request.samples:
        shape = tensors.decode(sample.loss_fn_inputs["target_tokens"]).shape
        logprobs = tensors.encode(np.full(shape, LOGPROB, dtype="<f4"))
        result.loss_fn_outputs.add().tensors["logprobs"].CopyFrom(logprobs)
    result.metrics["loss:sum"] = float(len(request.samples))


def _saved(operation: operations_pb2.Operation, request: Any) -> None:
    folder = (
        "weights" if request.kind == trainer_pb2.CHECKPOINT_KIND_TRAINING else "sampler_weights"
    )
    operation.save_checkpoint.path = f"tinker://{request.session}/{folder}/{request.name}"


def _loaded(operation: operations_pb2.Operation, request: Any) -> None:
    operation.load_checkpoint.path = request.path


def _stepped(operation: operations_pb2.Operation, request: Any) -> None:
    operation.optim_step.policy_version = 1


def _published(operation: operations_pb2.Operation, request: Any) -> None:
    operation.weights_sync.snapshot = "snapshots/fake"


_RESULTS: dict[type, Callable[[operations_pb2.Operation, Any], None]] = {
    trainer_pb2.ForwardRequest: _passed,
    trainer_pb2.ForwardBackwardRequest: _passed,
    trainer_pb2.CustomForwardBackwardRequest: _passed,
    trainer_pb2.OptimStepRequest: _stepped,
    trainer_pb2.WeightsSyncRequest: _published,
    trainer_pb2.SaveCheckpointRequest: _saved,
    trainer_pb2.LoadCheckpointRequest: _loaded,
}
