"""The trainer: many small clients, long samples, samples of many lengths, against plain transformers and peft.

make bench BENCH=trainer

Rows called "service" run tinker clients against a server in a child process, from forward_backward's arguments to its
results; rows called "trainer" run the engine in this process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import tinker_compat as tinker
from backend.trainer import base_model
from backend.trainer.base import AdamParams, LoraConfig, Pass
from backend.trainer.torch_trainer import TorchTrainer
from benchmarks import memory, model, report
from benchmarks.clients import Clients
from benchmarks.report import Row
from benchmarks.server import serve
from benchmarks.spine import log_uniform_lengths, random_sequences, training_step
from benchmarks.trainer_direct import DirectTrainer
from together_post_training.samples import Sample

RANK = 16
ROUNDS = 5
NUM_CLIENTS = 8
_LARGE_VOCABULARY = 32_768
# A difference of 1% shows in the median of so many times as many rounds.
_FINE = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """directory: of the model that the server calls "bench"."""

    service: tinker.ServiceClient
    directory: Path
    scratch: Path
    rounds: int

    def client(self) -> tinker.TrainingClient:
        return self.service.create_lora_training_client("bench", rank=RANK, seed=0).result()

    def clients(self, lengths: list[int], count: int = NUM_CLIENTS) -> Clients:
        """Each trains on samples of these lengths."""
        sequences = random_sequences(lengths)
        return Clients(self.service, "bench", sequences, count=count, rank=RANK)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="run the parts whose name contains this")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        directory = model.save(scratch / "model")
        with serve(f"bench={directory}", store=scratch / "store") as served:
            service = tinker.ServiceClient(base_url=served.address)
            setting = Setting(
                service=service, directory=directory, scratch=scratch, rounds=args.rounds
            )
            for part in (
                small_clients,
                equal_clients,
                batches,
                many_lengths,
                idle_adapter,
                peak_memory,
            ):
                if args.only in part.__name__:
                    print(f"{part.__name__} ...", flush=True)
                    rows += part(setting)
            service.close("success").result()
    return report.finish("trainer", rows)


def small_clients(setting: Setting) -> list[Row]:
    """Sessions that train at the same time, against adapters trained one after the other."""
    direct = DirectTrainer(setting.directory, rank=RANK, num_adapters=NUM_CLIENTS)
    rows = []
    for name, lengths, num_steps, goal in (
        ("1 x 16", [16], 10, 2.5),
        ("1 x 64", [64], 5, 1.3),
        ("4 x 128", [128] * 4, 2, 0.97),
    ):
        clients = setting.clients(lengths)
        step = direct.padded_step(random_sequences(lengths))
        rate = report.rate_in_turn(
            NUM_CLIENTS * num_steps * sum(lengths),
            lambda clients=clients, n=num_steps: clients.train(n),
            lambda step=step, n=num_steps: [step() for _ in range(n)],
            rounds=setting.rounds,
        )
        rows.append(_at_least(f"service, {NUM_CLIENTS} x ({name})", rate, goal))
    return rows


def equal_clients(setting: Setting) -> list[Row]:
    """What clients of equal load get together and each, against one that is alone."""
    lengths, num_steps = [32] * 4, 8
    alone, together = setting.clients(lengths, 1), setting.clients(lengths)
    spreads = []

    def all_of_them() -> None:
        times = together.train(num_steps)
        spreads.append(max(times) / min(times))

    times = report.medians_in_turn(
        [all_of_them, lambda: alone.train(num_steps)], rounds=setting.rounds
    )
    tokens = num_steps * sum(lengths)
    rate = NUM_CLIENTS * tokens / times[0], tokens / times[1]
    return [
        _at_least(f"service, {NUM_CLIENTS} x (4 x 32) vs one client", rate, 1.2),
        Row(
            name="service, slowest client / fastest",
            unit="x",
            ours=statistics.median(spreads[1:]),
            goal=2.0,
            kind="at_most",
        ),
    ]


def batches(setting: Setting) -> list[Row]:
    """One client, samples of equal length."""
    client, direct = setting.client(), DirectTrainer(setting.directory, rank=RANK)
    rows = []
    for name, lengths, num_steps, goal in (
        ("32 x 128", [128] * 32, 1, 0.97),
        ("4 x 32", [32] * 4, 8, 0.85),
    ):
        sequences = random_sequences(lengths)
        ours = training_step(client, sequences)
        reference = direct.padded_step(sequences)
        rate = report.rate_in_turn(
            num_steps * sum(lengths),
            lambda ours=ours, n=num_steps: [ours() for _ in range(n)],
            lambda reference=reference, n=num_steps: [reference() for _ in range(n)],
            rounds=setting.rounds,
        )
        rows.append(_at_least(f"service, {name}", rate, goal))
    return rows


def many_lengths(setting: Setting) -> list[Row]:
    """One client, 32 samples of 16 to 512 tokens, against one padded batch and against sorted micro-batches."""
    lengths = log_uniform_lengths(32, 16, 512)
    sequences = random_sequences(lengths)
    direct = DirectTrainer(setting.directory, rank=RANK)
    ours, padded, by_4, by_8 = report.medians_in_turn(
        [
            training_step(setting.client(), sequences),
            direct.padded_step(sequences),
            direct.sorted_step(sequences, micro_batch=4),
            direct.sorted_step(sequences, micro_batch=8),
        ],
        rounds=setting.rounds,
    )
    tokens = sum(lengths)
    best = min(by_4, by_8)
    size = 4 if best == by_4 else 8
    return [
        _at_least("service, 16..512 vs padded", (tokens / ours, tokens / padded), 2.7),
        _at_least(f"service, 16..512 vs sorted by {size}", (tokens / ours, tokens / best), 1.0),
    ]


def idle_adapter(setting: Setting) -> list[Row]:
    """A step of one session, with and without another that does nothing."""
    trainer = TorchTrainer(base_model.load("bench", str(setting.directory)))
    lora = LoraConfig(rank=RANK, alpha=32.0, seed=0)
    trainer.create_session("busy", lora)
    lengths = [32] * 4
    work = Pass(session="busy", samples=_samples(random_sequences(lengths)), backward=True)

    def step() -> None:
        trainer.run(work)
        trainer.optim_step("busy", AdamParams())

    def timed() -> float:
        step()  # Making and deleting an adapter leaves the caches cold.
        return report.seconds(step)

    def beside_another() -> float:
        trainer.create_session("idle", lora)
        try:
            return timed()
        finally:
            trainer.delete_session("idle")

    ours, reference = [], []
    sides = [(beside_another, ours), (timed, reference)]
    for i in range(_FINE * setting.rounds):
        for run, times in sides if i % 2 else reversed(sides):
            times.append(run())
    tokens = sum(lengths)
    rate = tokens / statistics.median(ours), tokens / statistics.median(reference)
    return [_at_least("trainer, 4 x 32 beside an idle adapter", rate, 0.99)]


def peak_memory(setting: Setting) -> list[Row]:
    """Of one step, above what the process held when the model was loaded."""
    large = model.save(setting.scratch / "large", vocab_size=_LARGE_VOCABULARY)
    return [
        _memory_row(setting, "1 x 2048, vocabulary 32k", large, [2048], 0.5),
        _memory_row(setting, "32 x 128", setting.directory, [128] * 32, 1.0),
    ]


def _memory_row(
    setting: Setting, name: str, directory: Path, lengths: list[int], goal: float
) -> Row:
    sequences = random_sequences(lengths)
    store = setting.scratch / f"store of {name}"
    with serve(f"bench={directory}", store=store) as served:
        service = tinker.ServiceClient(base_url=served.address)
        client = service.create_lora_training_client("bench", rank=RANK, seed=0).result()
        training_step(client, [sequences[0][:9]])()
        ours = memory.peak_mb(served.pid, training_step(client, sequences))
        service.close("success").result()
    return Row(
        name=f"service, peak memory of {name}",
        unit="MB",
        ours=ours,
        reference=memory.direct_peak_mb(directory, sequences, rank=RANK),
        goal=goal,
        kind="ratio_at_most",
    )


def _samples(sequences: list[list[int]]) -> list[Sample]:
    arrays = [np.asarray(sequence, np.int32) for sequence in sequences]
    return [Sample(tokens=a[:-1], inputs={"target_tokens": a[1:]}) for a in arrays]


def _at_least(name: str, rate: tuple[float, float], goal: float) -> Row:
    return Row(
        name=name, unit="tokens/s", ours=rate[0], reference=rate[1], goal=goal, kind="at_least"
    )


if __name__ == "__main__":
    sys.exit(main())
