"""Others on the same server while it is under load, each in a process of its own: one that trains and says that it is
alive, and one that does not fetch its answers."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess

import numpy as np

import tinker_compat as tinker
from benchmarks.spine import data
from together_post_training.client.address import parse_address
from together_post_training.client.channel import Connection, FixedServer
from together_post_training.client.loop import background_loop
from together_post_training.client.sampler import open_base_model
from together_post_training.v1 import data_pb2, sessions_pb2
from together_post_training.v1 import generator_pb2 as pb

_HEARTBEAT_INTERVAL_S = 0.02
_TRAINING_INTERVAL_S = 0.1
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(slots=True)
class Times:
    """Seconds that each call took; filled in at the end. Calls that wait for their turn to be made count from then."""

    heartbeats: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)


@contextmanager
def bystander(address: str, model: str) -> Iterator[Times]:
    """Heartbeats every 20 ms, whether or not the one before was answered, and forward_backward every 100 ms."""
    times = Times()
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_stand_by, args=(theirs, address, model), daemon=True)
    process.start()
    try:
        assert ours.recv() == "ready"
        yield times
        ours.send("end")
        times.heartbeats, times.passes = ours.recv()
    finally:
        process.kill()
        process.join()


@contextmanager
def slow_reader(address: str, model: str, *, num_calls: int) -> Iterator[None]:
    """Has sent calls with answers of almost a megabyte each, and is stopped before it has read any."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(
        target=_do_not_read, args=(theirs, address, model, num_calls), daemon=True
    )
    process.start()
    try:
        assert ours.recv() == "sending"
        _wait_stopped(process)
        yield
    finally:
        process.kill()
        process.join()


def connect(address: str) -> Connection:
    return Connection(FixedServer(parse_address(address, what="address")))


def prompt(tokens: np.ndarray) -> data_pb2.ModelInput:
    text = data_pb2.EncodedText(raw=tokens.astype("<i4").tobytes())
    return data_pb2.ModelInput(chunks=[data_pb2.Chunk(encoded_text=text)])


def _stand_by(pipe: Pipe, address: str, model: str) -> None:
    background_loop().start(_call_regularly(pipe, address, model)).result()


async def _call_regularly(pipe: Pipe, address: str, model: str) -> None:
    service = tinker.ServiceClient(base_url=address)
    training = await service.create_lora_training_client(model, rank=4)
    sequences = data([list(range(16))])
    connection = connect(address)
    session = await connection.call(
        "sessions.CreateSession",
        sessions_pb2.CreateSessionRequest(base_model=model, lora=sessions_pb2.LoraConfig(rank=4)),
    )
    is_alive = sessions_pb2.HeartbeatSessionRequest(id=session.id)

    async def say_alive() -> None:
        await connection.call("sessions.HeartbeatSession", is_alive)

    async def train() -> None:
        await training.forward_backward(sequences, "cross_entropy")

    await train()
    pipe.send("ready")
    end = asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    heartbeats, passes = await asyncio.gather(
        _repeat(say_alive, _HEARTBEAT_INTERVAL_S, end), _repeat(train, _TRAINING_INTERVAL_S, end)
    )
    pipe.send((heartbeats, passes))


async def _repeat(
    call: Callable[[], Awaitable[None]], interval_s: float, end: asyncio.Future
) -> list[float]:
    """Seconds from when each was due until it was answered."""
    times: list[float] = []

    async def timed(due_s: float) -> None:
        await call()
        times.append(time.perf_counter() - due_s)

    start_s = time.perf_counter()
    calls: list[asyncio.Task[None]] = []
    while not end.done():
        due_s = start_s + len(calls) * interval_s
        await asyncio.sleep(max(due_s - time.perf_counter(), 0))
        calls.append(asyncio.create_task(timed(due_s)))
    await asyncio.gather(*calls)
    return times


def _do_not_read(pipe: Pipe, address: str, model: str, num_calls: int) -> None:
    async def main() -> None:
        sampler = await open_base_model(connect(address), model)
        request = pb.SampleRequest(
            prompt=prompt(np.arange(1000) % 16),
            num_samples=1,
            params=pb.SamplingParams(max_tokens=1),
            prompt_logprobs=True,
            topk_prompt_logprobs=100,
        )
        calls = [asyncio.create_task(sampler.sample(request)) for _ in range(num_calls)]
        await asyncio.sleep(0.2)  # They are on their way.
        pipe.send("sending")
        os.kill(os.getpid(), signal.SIGSTOP)
        await asyncio.gather(*calls)

    background_loop().start(main()).result()


def _wait_stopped(process: BaseProcess) -> None:
    with open(f"/proc/{process.pid}/stat") as stat:
        while stat.read().rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(0.01)
            stat.seek(0)
