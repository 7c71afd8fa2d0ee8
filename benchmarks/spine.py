"""The spine: a training step, a sample, a publish through client and server, against direct loops.

make bench BENCH=spine
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import tinker_compat as tinker
from benchmarks import generator_direct, model, report, trainer_direct, wire
from benchmarks.report import Row
from benchmarks.server import serve

RANK = 16
ROUNDS = 7


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="run the parts whose name contains this")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = model.save(Path(scratch) / "model")
        store = Path(scratch) / "store"
        with serve(f"bench={directory}", "builtin:bigram16", store=store) as served:
            service = tinker.ServiceClient(base_url=served.address)
            rows.append(_at_most("server ready, cold", "s", served.ready_s, 15))
            for part in (training, sampling, publishing, latency, transfer):
                if args.only in part.__name__:
                    print(f"{part.__name__} ...", flush=True)
                    rows += part(service, directory, args.rounds)
            service.close("success").result()
    return report.finish("spine", rows)


def training(service: tinker.ServiceClient, directory: Path, rounds: int) -> list[Row]:
    """forward_backward + optim_step: tokens per second against torch and peft in one process."""
    client = service.create_lora_training_client("bench", rank=RANK, seed=0).result()
    direct = trainer_direct.DirectTrainer(directory, rank=RANK)
    rows = []
    for name, lengths, goal in (("32 x 128", [128] * 32, 0.9), ("4 x 32", [32] * 4, 0.75)):
        sequences = random_sequences(lengths)
        ours = training_step(client, sequences)
        reference = direct.padded_step(sequences)
        rows.append(_train_row(f"train {name}", lengths, ours, reference, goal, rounds))
    lengths = log_uniform_lengths(32, 16, 512)
    sequences = random_sequences(lengths)
    ours = training_step(client, sequences)
    rows.append(
        _train_row(
            "train 16..512 vs padded", lengths, ours, direct.padded_step(sequences), 2.3, rounds
        )
    )
    by_size = [
        _train_row(
            f"train 16..512 vs sorted by {size}",
            lengths,
            ours,
            direct.sorted_step(sequences, micro_batch=size),
            0.9,
            rounds,
        )
        for size in (4, 8)
    ]
    return [*rows, max(by_size, key=lambda row: row.reference or 0.0)]


def sampling(service: tinker.ServiceClient, directory: Path, rounds: int) -> list[Row]:
    """Tokens per second against transformers.generate, which returns no log-probabilities."""
    client = service.create_sampling_client(base_model="bench").result()
    direct = generator_direct.DirectGenerator(directory)
    rows = []
    for name, count, new_tokens in (("32 x 64", 32, 64), ("1 x 64", 1, 64)):
        prompts = [s[:32] for s in random_sequences([33] * count)]

        def ours(prompts: list[list[int]] = prompts, new_tokens: int = new_tokens) -> None:
            params = tinker.SamplingParams(max_tokens=new_tokens, temperature=1.0, stop=[])
            inputs = [tinker.ModelInput.from_ints(p) for p in prompts]
            futures = [client.sample(p, 1, params) for p in inputs]
            for future in futures:
                (sequence,) = future.result().sequences
                assert len(sequence.tokens) == len(sequence.logprobs or ()) == new_tokens

        reference = direct.generate(prompts, new_tokens=new_tokens)
        rate = report.rate_in_turn(count * new_tokens, ours, reference, rounds=rounds)
        rows.append(_at_least(f"sample {name}", "tokens/s", rate, 0.8))
    return rows


def publishing(service: tinker.ServiceClient, directory: Path, rounds: int) -> list[Row]:
    """From trained weights to a sampling client, and to its first token."""
    client = service.create_lora_training_client("bench", rank=RANK, seed=1).result()
    training_step(client, random_sequences([16] * 2))()
    prompt = tinker.ModelInput.from_ints(list(range(16)))
    params = tinker.SamplingParams(max_tokens=1, stop=[])

    def publish() -> tinker.SamplingClient:
        return client.save_weights_and_get_sampling_client().result()

    def publish_and_sample() -> None:
        publish().sample(prompt, 1, params).result()

    optim = median_ms(
        lambda: client.optim_step(tinker.AdamParams()).result(),
        rounds * 3,
        before=lambda: client.forward_backward(data([list(range(16))]), "cross_entropy").result(),
    )
    return [
        _at_most("publish", "ms", median_ms(publish, rounds * 3), 60),
        _at_most("publish + first token", "ms", median_ms(publish_and_sample, rounds * 3), 150),
        _at_most("optim_step round trip", "ms", optim, 20),
    ]


def latency(service: tinker.ServiceClient, directory: Path, rounds: int) -> list[Row]:
    """What the service adds to an operation that costs nothing."""
    client = service.create_lora_training_client("builtin:bigram16", rank=4).result()
    empty = median_ms(lambda: client.optim_step(tinker.AdamParams()).result(), rounds * 30)
    return [_at_most("empty operation", "ms", empty, 5)]


def transfer(service: tinker.ServiceClient, directory: Path, rounds: int) -> list[Row]:
    """A million tokens in four arrays, and a float for each back."""
    through = wire.seconds_through_the_service(rounds)
    return [
        _at_most("1M tokens across the wire", "s", wire.seconds_across_the_wire(rounds), 0.15),
        Row(name="1M tokens through the service", unit="s", ours=through, kind="shown"),
    ]


def training_step(client: tinker.TrainingClient, sequences: list[list[int]]) -> Callable[[], None]:
    batch = data(sequences)

    def step() -> None:
        backward = client.forward_backward(batch, "cross_entropy")
        step = client.optim_step(tinker.AdamParams(learning_rate=1e-4))
        backward.result()
        step.result()

    return step


def data(sequences: list[list[int]]) -> list[tinker.Datum]:
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_numpy(np.asarray(tokens[1:])),
                "weights": tinker.TensorData.from_numpy(np.ones(len(tokens) - 1, np.float32)),
            },
        )
        for tokens in sequences
    ]


def random_sequences(lengths: list[int]) -> list[list[int]]:
    """Token sequences that give samples of these lengths (one token more)."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, model.VOCAB_SIZE, n + 1).tolist() for n in lengths]


def log_uniform_lengths(count: int, low: int, high: int) -> list[int]:
    rng = np.random.default_rng(0)
    return np.exp(rng.uniform(np.log(low), np.log(high), count)).astype(int).tolist()


def median_ms(
    run: Callable[[], object], rounds: int, before: Callable[[], object] | None = None
) -> float:
    times = []
    for _ in range(rounds + 1):
        if before:
            before()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[1:])


def _train_row(
    name: str,
    lengths: list[int],
    ours: Callable[[], object],
    reference: Callable[[], object],
    goal: float,
    rounds: int,
) -> Row:
    return _at_least(
        name, "tokens/s", report.rate_in_turn(sum(lengths), ours, reference, rounds=rounds), goal
    )


def _at_least(name: str, unit: str, rate: tuple[float, float], goal: float) -> Row:
    return Row(name=name, unit=unit, ours=rate[0], reference=rate[1], goal=goal, kind="at_least")


def _at_most(name: str, unit: str, ours: float, goal: float) -> Row:
    return Row(name=name, unit=unit, ours=ours, goal=goal, kind="at_most")


if __name__ == "__main__":
    sys.exit(main())
