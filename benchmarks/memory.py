"""How much memory a step takes: the highest resident size of a process while it runs. Linux only."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks import trainer_direct

_RESET_PEAK = "5"


def peak_mb(pid: int, run: Callable[[], object]) -> float:
    """MB by which the resident memory of process `pid` rises above what it is now, at the highest."""
    Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK)
    before = _kb(pid, "VmRSS")
    run()
    return (_kb(pid, "VmHWM") - before) / 1024


def resident_mb(pid: int) -> float:
    return _kb(pid, "VmRSS") / 1024


def direct_peak_mb(directory: Path, sequences: Sequence[Sequence[int]], *, rank: int) -> float:
    """Of one padded step with plain transformers and peft, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as child:
        return child.submit(_direct_peak_mb, directory, sequences, rank).result()


def _direct_peak_mb(directory: Path, sequences: Sequence[Sequence[int]], rank: int) -> float:
    direct = trainer_direct.DirectTrainer(directory, rank=rank)
    direct.padded_step([sequences[0][:9]])()
    return peak_mb(os.getpid(), direct.padded_step(sequences))


def _kb(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise LookupError(f"/proc/{pid}/status has no {field}")
