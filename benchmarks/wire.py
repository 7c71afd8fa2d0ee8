"""A million tokens in four arrays: across the wire alone, and through the whole service with an engine that costs
nothing.

    python -m benchmarks.wire
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np

import tinker_compat as tinker
from backend.config import ServerConfig
from backend.resources.catalog import ModelSpec
from backend.resources.engines import Engines
from backend.server import Server
from backend.services import wire
from backend.trainer import bigram, bigram_trainer
from backend.trainer.base import Pass, PassResult
from benchmarks import report
from together_post_training import tensors
from together_post_training.client.loop import background_loop
from together_post_training.v1 import data_pb2, operations_pb2, trainer_pb2, trainer_pb2_grpc

NUM_SAMPLES = 1000
NUM_TOKENS = 1000
MODEL = "builtin:bigram16"
_PER_REQUEST = 250
_OPTIONS = [(f"grpc.max_{way}_message_length", 256 * 1024 * 1024) for way in ("send", "receive")]


def seconds_across_the_wire(rounds: int) -> float:
    """From numpy to another process's numpy, and a float32 for each token back."""
    tokens, floats = _arrays()

    async def measure(address: str) -> float:
        async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
            stub = trainer_pb2_grpc.TrainerServiceStub(channel)

            async def cross() -> None:
                starts = range(0, NUM_SAMPLES, _PER_REQUEST)
                requests = (
                    _request(tokens[i : i + _PER_REQUEST], floats[i : i + _PER_REQUEST])
                    for i in starts
                )
                replies = await asyncio.gather(*(stub.Forward(request) for request in requests))
                outputs = [o for r in replies for o in r.forward_backward.loss_fn_outputs]
                arrived = [tensors.decode(o.tensors["logprobs"]) for o in outputs]
                assert sum(a.size for a in arrived) == tokens.size

            times = [await _timed(cross) for _ in range(rounds + 1)]
            return float(np.median(times[1:]))

    seconds: Future[float] = Future()
    with _process(_decoder) as address:
        background_loop().start(measure(address), seconds)
        return seconds.result()


def seconds_through_the_service(rounds: int) -> float:
    """From SDK types through the client, checks, journal and executor, and back into SDK types."""
    with _process(_service) as address:
        service = tinker.ServiceClient(base_url=address)
        client = service.create_lora_training_client(MODEL, rank=1).result()
        data = _data()

        def cross() -> None:
            outputs = client.forward(data, "importance_sampling").result().loss_fn_outputs
            assert sum(o["logprobs"].to_numpy().size for o in outputs) == NUM_SAMPLES * NUM_TOKENS

        seconds = report.median_seconds(cross, rounds=rounds)
        service.close("success").result()
    return seconds


def _arrays() -> tuple[np.ndarray, np.ndarray]:
    """Tokens below 16, int32, and float32, both (NUM_SAMPLES, NUM_TOKENS)."""
    rng = np.random.default_rng(0)
    shape = (NUM_SAMPLES, NUM_TOKENS)
    return rng.integers(0, 16, shape).astype("<i4"), rng.standard_normal(shape).astype("<f4")


def _request(tokens: np.ndarray, floats: np.ndarray) -> trainer_pb2.ForwardRequest:
    request = trainer_pb2.ForwardRequest()
    for row, values in zip(tokens, floats, strict=True):
        sample = request.samples.add()
        sample.model_input.chunks.add().encoded_text.raw = row.tobytes()
        for key, array in (("target_tokens", row), ("logprobs", values), ("advantages", values)):
            tensors.encode_into(sample.loss_fn_inputs[key], array)
    return request


def _data() -> list[tinker.Datum]:
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(row.tolist()),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_numpy(row),
                "logprobs": tinker.TensorData.from_numpy(values),
                "advantages": tinker.TensorData.from_numpy(values),
            },
        )
        for row, values in zip(*_arrays(), strict=True)
    ]


async def _timed(run: Callable[[], Coroutine[Any, Any, None]]) -> float:
    loop = asyncio.get_running_loop()
    start = loop.time()
    await run()
    return loop.time() - start


Serve = Callable[[Connection], Coroutine[Any, Any, None]]


@contextmanager
def _process(serve: Serve) -> Iterator[str]:
    """A child process that sends its address, and ends when it is sent something."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(serve, theirs), daemon=True)
    process.start()
    yield ours.recv()
    ours.send("stop")
    process.join()


def _run(serve: Serve, pipe: Connection) -> None:
    asyncio.run(serve(pipe))


class _Decoder(trainer_pb2_grpc.TrainerServiceServicer):
    async def Forward(
        self, request: trainer_pb2.ForwardRequest, context: grpc.aio.ServicerContext
    ) -> operations_pb2.Operation:
        reply = operations_pb2.Operation()
        for i, message in enumerate(request.samples):
            sample = wire.sample(message, i)
            _answer(reply, sample.inputs["logprobs"])
        return reply


def _answer(reply: operations_pb2.Operation, logprobs: np.ndarray) -> None:
    output: data_pb2.Tensor = reply.forward_backward.loss_fn_outputs.add().tensors["logprobs"]
    tensors.encode_into(output, logprobs)


async def _decoder(pipe: Connection) -> None:
    server = grpc.aio.server(options=_OPTIONS)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(_Decoder(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send(f"127.0.0.1:{port}")
    await asyncio.to_thread(pipe.recv)
    await server.stop(None)


class _NoTrainer(bigram_trainer.BigramTrainer):
    """Answers every pass with logprobs 0."""

    def run(self, work: Pass) -> PassResult:
        shapes = [sample.inputs["target_tokens"].shape for sample in work.samples]
        logprobs = [np.zeros(shape, np.float32) for shape in shapes]
        return PassResult(logprobs=logprobs, metrics={"loss:sum": 0.0})


async def _service(pipe: Connection) -> None:
    def open_engines(name: str, path: str) -> Engines:
        model = bigram.load(name)
        return Engines(trainer=_NoTrainer(model), generator=model.generator(), tokenizer_dir=None)

    with tempfile.TemporaryDirectory() as scratch:
        models = (ModelSpec(name=MODEL, path=MODEL),)
        config = ServerConfig(port=0, store=Path(scratch) / "store", models=models)
        server = Server(config, open_engines=open_engines)
        address = await server.start()
        await server.load_models()
        pipe.send(address)
        await asyncio.to_thread(pipe.recv)
        await server.stop(grace_s=1.0)


if __name__ == "__main__":
    print(f"across the wire      {seconds_across_the_wire(9):.3f} s")
    print(f"through the service  {seconds_through_the_service(9):.3f} s")
