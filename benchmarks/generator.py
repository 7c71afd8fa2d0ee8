"""Sampling through client and server, against transformers and SGLang on the same machine and model.

make bench BENCH=generator        (the rows of SGLang need `make test-sglang` once, which installs it)
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import tinker_compat as tinker
from benchmarks import generator_direct, model, report
from benchmarks.continuous_direct import ContinuousGenerator
from benchmarks.loads import EVEN, MIXED, Load, Request
from benchmarks.report import Row
from benchmarks.server import serve
from benchmarks.sglang_direct import SglangClient
from benchmarks.spine import data, random_sequences
from tests.sglang import environment
from tests.sglang import server as sglang_server

RANK = 16
ROUNDS = 5
STATIC_BATCH = 16
PREFIX_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """directory: of the model. store: of the server."""

    service: tinker.ServiceClient
    directory: Path
    store: Path
    rounds: int

    def sampler(self) -> tinker.SamplingClient:
        return self.service.create_sampling_client(base_model="bench").result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="run the parts whose name contains this")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = model.save(Path(scratch) / "model")
        store = Path(scratch) / "store"
        with serve(f"bench={directory}", "builtin:tiny", store=store) as served:
            service = tinker.ServiceClient(base_url=served.address)
            bench = Bench(service=service, directory=directory, store=store, rounds=args.rounds)
            for part in (transformers, adapters, publishing, prefixes, sglang, sglang_adapters):
                if args.only in part.__name__:
                    print(f"{part.__name__} ...", flush=True)
                    rows += (found := part(bench))
                    report.show(found)
            service.close("success").result()
    return report.finish("generator", rows)


def transformers(bench: Bench) -> list[Row]:
    """Against generate in static batches, and against transformers' continuous batching."""
    direct = generator_direct.DirectGenerator(bench.directory)
    client = bench.sampler()
    rows = []
    for shape in (MIXED, EVEN):
        load = Load(shape)
        continuous = ContinuousGenerator(
            bench.directory, num_requests=shape.count, num_tokens=load.num_tokens
        )
        sides = [
            lambda load=load: sample([client], load.fresh()),
            lambda load=load: static_batches(direct, load.fresh()),
            lambda load=load, continuous=continuous: continuous.sample(load.fresh()),
        ]
        ours, static, paged = (
            load.num_new / s for s in report.medians_in_turn(sides, rounds=bench.rounds)
        )
        continuous.close()
        goal = 2.0 if shape == MIXED else None
        rows += [
            _rate(f"{shape.name} vs generate, batches of {STATIC_BATCH}", ours, static, goal),
            _rate(f"{shape.name} vs transformers' continuous batching", ours, paged, 1.5),
        ]
    return rows


def adapters(bench: Bench) -> list[Row]:
    """What adapters cost: all tokens through one of 8, against the base model alone."""
    load = Load(EVEN)
    base, adapted = [bench.sampler()], _published(bench.service, "bench", 8)
    sides = [lambda: sample(adapted, load.fresh()), lambda: sample(base, load.fresh())]
    ours, reference = (load.num_new / s for s in report.medians_in_turn(sides, rounds=bench.rounds))
    return [_rate("8 adapters in a batch vs base alone", ours, reference, 0.65)]


def publishing(bench: Bench) -> list[Row]:
    """From trained weights to a sampling client."""
    rows = []
    for name in ("builtin:tiny", "bench"):
        client = bench.service.create_lora_training_client(name, rank=RANK, seed=1).result()
        client.forward_backward(data([list(range(16))]), "cross_entropy").result()
        client.optim_step(tinker.AdamParams()).result()
        seconds = _median_s(lambda c=client: c.save_weights_and_get_sampling_client().result(), 20)
        rows.append(
            Row(name=f"publish, {name}", unit="ms", ours=1000 * seconds, goal=20, kind="at_most")
        )
    return rows


def prefixes(bench: Bench) -> list[Row]:
    """Time to the first token after a prefix that was read before, against one that was not."""
    client = bench.sampler()
    rng = np.random.default_rng(2)

    def tokens(count: int) -> list[int]:
        return rng.integers(0, model.VOCAB_SIZE, count).tolist()

    known = tokens(PREFIX_TOKENS)

    def first_token(prompt: list[int]) -> None:
        sample([client], [Request(prompt=prompt, num_new=1)])

    first_token(known)
    sides = [
        lambda: first_token(known + tokens(1)),
        lambda: first_token(tokens(PREFIX_TOKENS + 1)),
    ]
    warm, cold = report.medians_in_turn(sides, rounds=4 * bench.rounds)
    return [
        Row(
            name=f"first token, warm prefix of {PREFIX_TOKENS} vs cold",
            unit="ms",
            ours=1000 * warm,
            reference=1000 * cold,
            goal=0.3,
            kind="ratio_at_most",
        )
    ]


def sglang(bench: Bench) -> list[Row]:
    client = bench.sampler()
    with sglang_server.running(*_sglang(bench)) as other:
        reference = SglangClient(other.url)
        rows = [
            _against_sglang(
                bench, f"{shape.name} vs SGLang", Load(shape), [client], reference, [None]
            )
            for shape in (MIXED, EVEN)
        ]
        reference.close()
    return rows


def sglang_adapters(bench: Bench) -> list[Row]:
    """The same three adapters on both sides."""
    clients = _published(bench.service, "bench", 3, save_as="sglang")
    directories = sorted((bench.store / "checkpoints").glob("*/sampler_weights/sglang"))
    with sglang_server.running(*_sglang(bench), *environment.LORA_ARGUMENTS) as other:
        reference = SglangClient(other.url)
        names = [f"adapter-{i}" for i in range(len(directories))]
        for name, directory in zip(names, directories, strict=True):
            reference.load_adapter(name, directory)
        rows = [
            _against_sglang(
                bench, f"{shape.name}, 3 adapters vs SGLang", Load(shape), clients, reference, names
            )
            for shape in (MIXED, EVEN)
        ]
        reference.close()
    return rows


def _against_sglang(
    bench: Bench,
    name: str,
    load: Load,
    clients: Sequence[tinker.SamplingClient],
    reference: SglangClient,
    adapters: Sequence[str | None],
) -> Row:
    sides = [
        lambda: sample(clients, load.fresh()),
        lambda: reference.sample(load.fresh(), adapters),
    ]
    ours, theirs = (load.num_new / s for s in report.medians_in_turn(sides, rounds=bench.rounds))
    return _rate(name, ours, theirs, 1.5)


def _sglang(bench: Bench) -> tuple[environment.Installation, Path, Path, str]:
    """A server with as many threads as ours: one for each core."""
    installed = environment.installation()
    variables = {**installed.variables, "OMP_NUM_THREADS": str(os.cpu_count())}
    log = bench.store.parent / "sglang.log"
    return replace(installed, variables=variables), bench.directory, log, "--skip-tokenizer-init"


def sample(clients: Sequence[tinker.SamplingClient], requests: Sequence[Request]) -> None:
    """All at the same time; request i from client i, counted round."""
    futures = [
        clients[i % len(clients)].sample(
            tinker.ModelInput.from_ints(request.prompt),
            1,
            tinker.SamplingParams(max_tokens=request.num_new, temperature=1.0, stop=[]),
        )
        for i, request in enumerate(requests)
    ]
    for request, future in zip(requests, futures, strict=True):
        (sequence,) = future.result().sequences
        assert len(sequence.tokens) == len(sequence.logprobs or ()) == request.num_new


def static_batches(direct: generator_direct.DirectGenerator, requests: Sequence[Request]) -> None:
    """In the order of arrival; a batch ends with its longest."""
    for start in range(0, len(requests), STATIC_BATCH):
        batch = requests[start : start + STATIC_BATCH]
        prompts = [request.prompt for request in batch]
        direct.generate(prompts, new_tokens=max(request.num_new for request in batch))()


def _published(
    service: tinker.ServiceClient, name: str, count: int, *, save_as: str = ""
) -> list[tinker.SamplingClient]:
    """Samplers of adapters that were trained for a step, each a session of its own."""
    made = []
    for seed in range(count):
        client = service.create_lora_training_client(name, rank=RANK, seed=seed).result()
        client.forward_backward(data(random_sequences([16] * 2)), "cross_entropy").result()
        client.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        made.append(client.save_weights_and_get_sampling_client().result())
        if save_as:
            client.save_weights_for_sampler(save_as).result()
    return made


def _rate(name: str, ours: float, reference: float, goal: float | None) -> Row:
    """Tokens per second."""
    kind = "shown" if goal is None else "at_least"
    return Row(
        name=name, unit="tokens/s", ours=ours, reference=reference, goal=goal or 0.0, kind=kind
    )


def _median_s(run: Callable[[], object], count: int) -> float:
    run()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
