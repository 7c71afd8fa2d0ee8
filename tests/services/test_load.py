"""Many callers, little room: every call is answered once, with its own answer, and others do not notice."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from backend.generator.bigram import BigramGenerator
from backend.resources.engines import Engines
from backend.trainer import bigram, bigram_trainer
from tests.generator.calls import call as sample_call
from tests.services.harness import (
    MODEL,
    Running,
    prompt,
    serving,
    serving_watched,
    wait_until,
)
from together_post_training.client.address import parse_address
from together_post_training.client.channel import Connection, FixedServer
from together_post_training.client.loop import background_loop
from together_post_training.client.retry import RetryPolicy
from together_post_training.client.sampler import Sampler, open_base_model
from together_post_training.v1 import generator_pb2 as pb
from together_post_training.v1 import sessions_pb2

NUM_TOKENS = 4


def request(number: int, *, num_prompt_tokens: int = 8) -> pb.SampleRequest:
    """A prompt and a seed of its own, hot enough for every answer to be another."""
    digest = hashlib.sha256(str(number).encode()).digest()
    tokens = (np.frombuffer(digest, np.uint8) % 16).tolist() * (num_prompt_tokens // 32 + 1)
    params = pb.SamplingParams(max_tokens=NUM_TOKENS, seed=number, temperature=5.0)
    return pb.SampleRequest(prompt=prompt(tokens[:num_prompt_tokens]), params=params, num_samples=1)


async def expected(numbers: Sequence[int]) -> list[bytes]:
    """Tokens as a generator without any service gives them."""
    generator = BigramGenerator(bigram.load(MODEL))
    answers = []
    for number in numbers:
        asked = request(number)
        tokens = np.frombuffer(asked.prompt.chunks[0].encoded_text.raw, "<i4")
        made = await generator.sample(
            sample_call(tokens, max_tokens=NUM_TOKENS, seed=number, temperature=5.0)
        )
        answers.append(made.sequences[0].tokens.astype("<i4").tobytes())
    return answers


def connect(running: Running) -> Connection:
    server = FixedServer(parse_address(running.address, what="address"))
    # Of back-pressure it must not tire, whatever it thinks of outages.
    return Connection(server, policy=RetryPolicy(outage_timeout_s=0.5))


async def sample_all(
    connection: Connection, requests: Sequence[pb.SampleRequest], num_waiters: int
) -> list[pb.SampleResponse]:
    sampler: Sampler = await open_base_model(connection, MODEL)
    answers: list[pb.SampleResponse | None] = [None] * len(requests)
    left = iter(enumerate(requests))

    async def waiter() -> None:
        for i, asked in left:
            answers[i] = await sampler.sample(asked)

    await asyncio.gather(*(waiter() for _ in range(num_waiters)))
    return [answer for answer in answers if answer is not None]


def test_no_call_is_lost_or_answered_twice_where_there_is_room_for_few(tmp_path: Path):
    """512 waiters before 64 places, of which they may have half. What comes back is each one's own."""
    numbers = range(2000)
    with serving(tmp_path / "store", max_sampling_calls=64) as running:
        admission = running.server._admission
        connection = connect(running)
        loop = background_loop()
        answers = loop.start(
            sample_all(connection, [request(n) for n in numbers], num_waiters=512)
        ).result(60)
        assert admission.num_refused > 512 - 64
        wait_until(lambda: admission.num_calls == admission.num_bytes == 0)
        loop.start(connection.close()).result(10)
    sequences = [answer.sequences[0] for answer in answers]
    assert [s.tokens for s in sequences] == asyncio.run(expected(numbers))
    assert len({s.id for s in sequences}) == len(numbers)


def test_heartbeats_are_answered_while_thousands_wait(tmp_path: Path):
    """The median, so that other work on the machine does not decide; alone it is about a millisecond. Goal: 20 ms."""
    with serving_watched(tmp_path / "store") as running:
        assert running.generator is not None
        running.generator.hold = True
        caller = running.caller
        run = caller.session()
        base = caller.open(base_model=MODEL)
        waiting = []
        for number in range(2048):
            asked = request(number)
            asked.snapshot = base
            waiting.append(caller.generator.Sample.future(asked))
        wait_until(lambda: running.server._admission.num_calls == 2048, 60)
        times = []
        for _ in range(50):
            start = time.perf_counter()
            caller.sessions.HeartbeatSession(sessions_pb2.HeartbeatSessionRequest(id=run.id))
            times.append(time.perf_counter() - start)
        assert np.median(times) < 0.02
        for call in waiting:
            call.cancel()
        wait_until(lambda: running.server._admission.num_calls == 0, 60)
        assert running.generator.num_running == 0


def test_callers_who_hang_up_while_they_wait_leave_at_once(tmp_path: Path):
    with serving_watched(tmp_path / "store", max_sampling_calls=64) as running:
        assert running.generator is not None
        running.generator.hold = True
        base = running.caller.open(base_model=MODEL)
        admission = running.server._admission

        def start(number: int) -> grpc.Future:
            asked = request(number)
            asked.snapshot = base
            return running.caller.generator.Sample.future(asked)

        waiting = [start(n) for n in range(32)]
        wait_until(lambda: admission.num_calls == 32)
        with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
            start(32).result(10)
        for call in waiting[1:]:
            call.cancel()
        wait_until(lambda: admission.num_calls == 1)
        assert running.generator.num_running == 1
        waiting[0].cancel()
        wait_until(lambda: admission.num_calls == 0)


def long_engines(name: str, path: str) -> Engines:
    model = replace(bigram.load(MODEL), max_seq_length=32_768)
    return Engines(
        trainer=bigram_trainer.BigramTrainer(model),
        generator=BigramGenerator(model),
        tokenizer_dir=None,
        max_sampling=2,
    )


def test_large_prompts_wait_outside_when_there_is_no_room_for_their_bytes(tmp_path: Path):
    """60 prompts of 120 kB before 1 MiB: four at a time."""
    requests = [request(n, num_prompt_tokens=30_000) for n in range(60)]
    most = 0
    with serving(tmp_path, engines=long_engines, max_sampling_bytes=2**20) as running:
        admission = running.server._admission
        is_over = threading.Event()

        def watch() -> None:
            nonlocal most
            while not is_over.wait(0.001):
                most = max(most, admission.num_bytes)

        watcher = threading.Thread(target=watch)
        watcher.start()
        connection = connect(running)
        loop = background_loop()
        answers = loop.start(sample_all(connection, requests, num_waiters=60)).result(60)
        is_over.set()
        watcher.join()
        loop.start(connection.close()).result(10)
        assert admission.num_refused > 0
    assert len(answers) == 60
    assert 120_000 < most <= 2**20


def test_refusal_carries_a_delay_and_its_numbers(tmp_path: Path):
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status

    with serving_watched(tmp_path / "store", max_sampling_calls=1) as running:
        assert running.generator is not None
        running.generator.hold = True
        asked = request(0)
        asked.snapshot = running.caller.open(base_model=MODEL)
        held = running.caller.generator.Sample.future(asked)
        wait_until(lambda: running.server._admission.num_calls == 1)
        with pytest.raises(grpc.RpcError) as refused:
            running.caller.generator.Sample(asked)
        status = rpc_status.from_call(refused.value)  # pyright: ignore[reportArgumentType]
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        assert status is not None
        assert status.details[0].Unpack(info)
        assert status.details[1].Unpack(retry)
        assert info.reason == "RESOURCE_EXHAUSTED"
        assert info.metadata["max_calls"] == "1"
        assert 0.1 <= retry.retry_delay.ToTimedelta().total_seconds() <= 30
        held.cancel()
