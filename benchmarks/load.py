"""Thousands of calls at once: none is lost, none is answered twice or with another's answer, and others go on.

make bench BENCH=load
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import tinker_compat as tinker
from backend.generator.base import SampleCall, Stop
from backend.generator.bigram import BigramGenerator
from backend.trainer import bigram
from benchmarks import memory, report
from benchmarks.load_others import bystander, connect, prompt, slow_reader
from benchmarks.report import Row
from benchmarks.server import Served, serve
from together_post_training.client.loop import background_loop
from together_post_training.client.sampler import open_base_model
from together_post_training.v1 import generator_pb2 as pb

BIGRAM, TINY = "builtin:bigram16", "builtin:tiny"
NUM_WAITERS = 2048
NUM_REQUESTS = 20_000
NUM_TORCH_REQUESTS = 1000
NUM_TOKENS = 8
# Hot enough for every answer to be another.
TEMPERATURE = 5.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its number is its seed, its prompt is of its own."""

    number: int
    prompt: np.ndarray

    def request(self) -> pb.SampleRequest:
        params = pb.SamplingParams(max_tokens=NUM_TOKENS, seed=self.number, temperature=TEMPERATURE)
        return pb.SampleRequest(prompt=prompt(self.prompt), params=params, num_samples=1)

    def call(self) -> SampleCall:
        return SampleCall(
            snapshot=None,
            prompt=self.prompt,
            num_samples=1,
            max_tokens=NUM_TOKENS,
            seed=self.number,
            temperature=TEMPERATURE,
            top_p=1.0,
            top_k=0,
            stop=Stop(),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    id: str
    tokens: bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--waiters", type=int, default=NUM_WAITERS)
    parser.add_argument("--only", default="", help="run the parts whose name contains this")
    args = parser.parse_args()
    rows: list[Row] = []
    for part in (many_small, few_places, sdk_at_once, large_prompts, unread_answers, torch_engine):
        if args.only not in part.__name__:
            continue
        print(f"{part.__name__} ...", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            rows += part(Path(scratch), args.requests, args.waiters)
    return report.finish("load", rows)


def many_small(store: Path, num_requests: int, num_waiters: int) -> list[Row]:
    """Through the native client; another process trains and says that it is alive meanwhile."""
    asked = requests(num_requests)
    with serve(BIGRAM, store=store) as served, bystander(served.address, BIGRAM) as times:
        answers, seconds, server_mb = sampled(served, asked, num_waiters)
    name = f"{num_waiters} waiters"
    return [
        *checked(name, asked, answers),
        _shown(f"{name}: requests", "1/s", num_requests / seconds),
        _at_most(f"{name}: heartbeat p50", "ms", percentile_ms(times.heartbeats, 50), 20),
        _shown(f"{name}: heartbeat p99", "ms", percentile_ms(times.heartbeats, 99)),
        _at_most(f"{name}: forward_backward p50", "ms", percentile_ms(times.passes, 50), 100),
        _shown(f"{name}: forward_backward p99", "ms", percentile_ms(times.passes, 99)),
        _at_most(f"{name}: server's memory, at the highest", "MB", server_mb, 500),
    ]


def few_places(store: Path, num_requests: int, num_waiters: int) -> list[Row]:
    """A server that takes a few calls at a time, and tells most of them to come again."""
    asked = requests(num_requests // 4)
    places = ["--max-sampling-calls", "256"]
    with (
        serve(BIGRAM, store=store, arguments=places) as served,
        bystander(served.address, BIGRAM) as times,
    ):
        answers, seconds, server_mb = sampled(served, asked, num_waiters)
    name = f"{num_waiters} waiters, 256 places"
    return [
        *checked(name, asked, answers),
        _shown(f"{name}: requests", "1/s", len(asked) / seconds),
        _at_most(f"{name}: heartbeat p50", "ms", percentile_ms(times.heartbeats, 50), 20),
        _shown(f"{name}: server's memory, at the highest", "MB", server_mb),
    ]


def sdk_at_once(store: Path, num_requests: int, num_waiters: int) -> list[Row]:
    """Tinker's client: one asyncio.gather."""
    asked = requests(num_waiters)
    with serve(BIGRAM, store=store) as served:
        client = tinker.ServiceClient(base_url=served.address).create_sampling_client(
            base_model=BIGRAM
        )
        answers: list[Answer] = []
        seconds = 0.0

        def run() -> None:
            nonlocal answers, seconds
            start = time.perf_counter()
            answers = asyncio.run(_gathered(client.result(), asked))
            seconds = time.perf_counter() - start

        client_mb = memory.peak_mb(os.getpid(), run)
    name = f"SDK, gather of {num_waiters}"
    return [
        *checked(name, asked, answers),
        _shown(f"{name}: requests", "1/s", len(asked) / seconds),
        _at_most(f"{name}: client's memory, added", "MB", client_mb, 200),
    ]


async def _gathered(client: tinker.SamplingClient, asked: Sequence[Asked]) -> list[Answer]:
    def params(number: int) -> tinker.SamplingParams:
        return tinker.SamplingParams(max_tokens=NUM_TOKENS, seed=number, temperature=TEMPERATURE)

    responses = await asyncio.gather(
        *(
            client.sample_async(tinker.ModelInput.from_ints(a.prompt.tolist()), 1, params(a.number))
            for a in asked
        )
    )
    sequences = [response.sequences[0] for response in responses]
    return [Answer(s.sequence_id, np.array(s.tokens, "<i4").tobytes()) for s in sequences]


def large_prompts(store: Path, num_requests: int, num_waiters: int) -> list[Row]:
    """As long as the model's window allows."""
    asked = requests(num_requests // 10, num_prompt_tokens=1000)
    with serve(BIGRAM, store=store) as served, bystander(served.address, BIGRAM) as times:
        answers, seconds, server_mb = sampled(served, asked, num_waiters)
    name = f"{len(asked)} prompts of 1,000 tokens"
    return [
        *checked(name, asked, answers),
        _shown(f"{name}: requests", "1/s", len(asked) / seconds),
        _at_most(f"{name}: heartbeat p50", "ms", percentile_ms(times.heartbeats, 50), 20),
        _shown(f"{name}: server's memory, at the highest", "MB", server_mb),
    ]


def unread_answers(store: Path, num_requests: int, num_waiters: int) -> list[Row]:
    """400 answers of 0.8 MB that their caller does not fetch; others are served as before."""
    asked = requests(num_requests // 20)
    with (
        serve(BIGRAM, store=store) as served,
        slow_reader(served.address, BIGRAM, num_calls=400),
        bystander(served.address, BIGRAM) as times,
    ):
        answers, seconds, server_mb = sampled(served, asked, num_waiters // 8)
    name = "beside 320 MB of unread answers"
    return [
        *checked(name, asked, answers),
        _shown(f"{name}: requests", "1/s", len(asked) / seconds),
        _at_most(f"{name}: heartbeat p50", "ms", percentile_ms(times.heartbeats, 50), 20),
        _at_most(f"{name}: server's memory, at the highest", "MB", server_mb, 1000),
    ]


def torch_engine(store: Path, num_requests: int, num_waiters: int) -> list[Row]:
    """The embedded generator; all at once, and what a caller alone gets is what each gets here."""
    asked = requests(NUM_TORCH_REQUESTS, vocab_size=250)
    with serve(TINY, store=store) as served, bystander(served.address, TINY) as times:
        answers, seconds, server_mb = sampled(served, asked, len(asked), TINY)
        again, _, _ = sampled(served, asked[::20], 1, TINY)
    name = f"torch, {len(asked)} at once"
    same = [
        alone.tokens == answer.tokens for alone, answer in zip(again, answers[::20], strict=True)
    ]
    return [
        _at_most(f"{name}: not answered", "requests", len(asked) - len(answers), 0),
        _at_most(f"{name}: other tokens than alone", "requests", same.count(False), 0),
        _shown(f"{name}: wall time", "s", seconds),
        _shown(f"{name}: sampled", "tokens/s", len(asked) * NUM_TOKENS / seconds),
        _at_most(f"{name}: heartbeat p50", "ms", percentile_ms(times.heartbeats, 50), 20),
        _shown(f"{name}: forward_backward p50", "ms", percentile_ms(times.passes, 50)),
        _shown(f"{name}: server's memory, at the highest", "MB", server_mb),
    ]


def requests(count: int, *, num_prompt_tokens: int = 32, vocab_size: int = 16) -> list[Asked]:
    rng = np.random.default_rng(0)
    return [Asked(i, rng.integers(0, vocab_size, num_prompt_tokens)) for i in range(count)]


def sampled(
    served: Served, asked: Sequence[Asked], num_waiters: int, model: str = BIGRAM
) -> tuple[list[Answer], float, float]:
    """(answers in the order of the requests, seconds, MB that the server had at the highest)."""
    connection = connect(served.address)
    answers: list[Answer | None] = [None] * len(asked)
    left = iter(enumerate(asked))

    async def run() -> float:
        sampler = await open_base_model(connection, model)

        async def waiter() -> None:
            for i, one in left:
                (sequence,) = (await sampler.sample(one.request())).sequences
                answers[i] = Answer(sequence.id, sequence.tokens)

        start = time.perf_counter()
        await asyncio.gather(*(waiter() for _ in range(num_waiters)))
        return time.perf_counter() - start

    with Highest(served.pid) as highest:
        seconds = background_loop().start(run()).result()
    background_loop().start(connection.close()).result()
    return [answer for answer in answers if answer is not None], seconds, highest.mb


class Highest:
    """The most memory that a process has within the block."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.mb = 0.0

    def __enter__(self) -> Highest:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(0.05)
            self.mb = max(self.mb, memory.resident_mb(self._pid))


def checked(name: str, asked: Sequence[Asked], answers: Sequence[Answer]) -> list[Row]:
    """Lost, duplicated, and not the request's own, by what a generator without a service gives."""
    ids = Counter(answer.id for answer in answers)
    own = asyncio.run(_expected(asked))
    wrong = sum(answer.tokens != tokens for answer, tokens in zip(answers, own, strict=False))
    return [
        _at_most(f"{name}: lost", "requests", len(asked) - len(answers), 0),
        _at_most(f"{name}: duplicated", "requests", len(answers) - len(ids), 0),
        _at_most(f"{name}: with another's answer", "requests", wrong, 0),
    ]


async def _expected(asked: Sequence[Asked]) -> list[bytes]:
    generator = BigramGenerator(bigram.load(BIGRAM))
    results = [await generator.sample(one.call()) for one in asked]
    return [result.sequences[0].tokens.astype("<i4").tobytes() for result in results]


def percentile_ms(times: Sequence[float], q: float) -> float:
    return float(np.percentile(times, q)) * 1000


def _at_most(name: str, unit: str, ours: float, goal: float) -> Row:
    return Row(name=name, unit=unit, ours=ours, goal=goal, kind="at_most")


def _shown(name: str, unit: str, ours: float) -> Row:
    return Row(name=name, unit=unit, ours=ours, kind="shown")


if __name__ == "__main__":
    sys.exit(main())
