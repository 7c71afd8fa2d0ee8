"""Passes of many sessions in shared rows: against PEFT's set_adapter one after the other, and against one by one.

make bench BENCH=mixed

The engine alone, in this process; forward, backward and AdamW of every session. The trainer's `merge_tokens` follows
from the rows "vs one by one".
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backend.trainer import base_model
from backend.trainer.base import AdamParams, LoraConfig, Pass
from backend.trainer.torch_trainer import TorchTrainer
from benchmarks import model, report
from benchmarks.report import Row
from benchmarks.spine import random_sequences
from benchmarks.trainer_direct import DirectTrainer
from together_post_training.samples import Sample

NUM_SESSIONS = 8
RANK = 16
ROUNDS = 9
DROPOUT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What each session trains on, and the least ratios to PEFT and to one by one."""

    name: str
    lengths: Sequence[int]
    of_peft: float | None = None
    of_one_by_one: float | None = None


SIZES = (
    Size(name="1 x 16", lengths=[16], of_peft=2.5, of_one_by_one=1.0),
    Size(name="1 x 64", lengths=[64], of_peft=1.3, of_one_by_one=1.0),
    Size(name="4 x 32", lengths=[32] * 4),
    Size(name="4 x 128", lengths=[128] * 4),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = model.save(Path(scratch) / "model")
        trainer = TorchTrainer(base_model.load("bench", str(directory)))
        plain = _sessions(trainer, "plain", dropout=0.0)
        dropping = _sessions(trainer, "dropping", dropout=DROPOUT)
        direct = DirectTrainer(directory, rank=RANK, num_adapters=NUM_SESSIONS)
        rows: list[Row] = []
        for size in SIZES:
            print(f"{size.name} ...", flush=True)
            rows += _measure(size, trainer, plain, dropping, direct, args.rounds)
    return report.finish("mixed", rows)


def _measure(
    size: Size,
    trainer: TorchTrainer,
    plain: Sequence[str],
    dropping: Sequence[str],
    direct: DirectTrainer,
    rounds: int,
) -> list[Row]:
    sequences = random_sequences(list(size.lengths))
    works, with_dropout = _passes(plain, sequences), _passes(dropping, sequences)
    times = report.medians_in_turn(
        [
            lambda: _step_together(trainer, works),
            lambda: _step_one_by_one(trainer, works),
            direct.padded_step(sequences),
            lambda: _step_together(trainer, with_dropout),
        ],
        rounds=rounds,
    )
    tokens = NUM_SESSIONS * sum(size.lengths)
    merged, one_by_one, peft, dropped = (tokens / seconds for seconds in times)
    name = f"{NUM_SESSIONS} x ({size.name})"
    return [
        _row(f"{name} merged vs PEFT", merged, peft, size.of_peft),
        _row(f"{name} merged vs one by one", merged, one_by_one, size.of_one_by_one),
        _row(f"{name} dropout {DROPOUT} vs none", dropped, merged, None),
    ]


def _step_together(trainer: TorchTrainer, works: Sequence[Pass]) -> None:
    trainer.run_batch(works)
    for work in works:
        trainer.optim_step(work.session, AdamParams())


def _step_one_by_one(trainer: TorchTrainer, works: Sequence[Pass]) -> None:
    for work in works:
        trainer.run(work)
        trainer.optim_step(work.session, AdamParams())


def _sessions(trainer: TorchTrainer, prefix: str, *, dropout: float) -> list[str]:
    names = [f"{prefix}-{i}" for i in range(NUM_SESSIONS)]
    for i, name in enumerate(names):
        trainer.create_session(name, LoraConfig(rank=RANK, alpha=32.0, seed=i, dropout=dropout))
    return names


def _passes(sessions: Sequence[str], sequences: Sequence[Sequence[int]]) -> list[Pass]:
    arrays = [np.asarray(sequence, np.int64) for sequence in sequences]
    samples = [Sample(tokens=a[:-1], inputs={"target_tokens": a[1:]}) for a in arrays]
    return [Pass(session=session, samples=samples, backward=True) for session in sessions]


def _row(name: str, ours: float, reference: float, goal: float | None) -> Row:
    return Row(
        name=name,
        unit="tokens/s",
        ours=ours,
        reference=reference,
        goal=goal or 0.0,
        kind="shown" if goal is None else "at_least",
    )


if __name__ == "__main__":
    sys.exit(main())
