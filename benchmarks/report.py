"""Rows of a benchmark: measured, compared with a goal, printed as a table and saved as JSON."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. `reference` and `ratio` are None where the goal is absolute.

    at_least, ratio_at_most: of ours to the reference; at_most: ours itself, in `unit`; shown: no goal.
    """

    name: str
    unit: str
    ours: float
    reference: float | None = None
    goal: float = 0.0
    kind: Literal["at_least", "ratio_at_most", "at_most", "shown"]

    @property
    def ratio(self) -> float | None:
        return None if self.reference is None else self.ours / self.reference

    @property
    def is_met(self) -> bool:
        if self.kind in ("at_least", "ratio_at_most"):
            assert self.ratio is not None
            is_large = self.ratio >= self.goal
            return is_large if self.kind == "at_least" else not is_large
        return self.kind == "shown" or self.ours <= self.goal


def rate_in_turn(
    work: float, ours: Callable[[], object], reference: Callable[[], object], *, rounds: int
) -> tuple[float, float]:
    """(ours, reference) in units of work per second: medians over rounds that alternate the two sides."""
    times = medians_in_turn([ours, reference], rounds=rounds)
    return work / times[0], work / times[1]


def medians_in_turn(sides: Sequence[Callable[[], object]], *, rounds: int) -> list[float]:
    """Seconds of each side: medians over rounds, each of which runs all of them, there and back in turn."""
    times: list[list[float]] = [[] for _ in sides]
    for side in sides:
        side()
    for i in range(rounds):
        order = range(len(sides)) if i % 2 == 0 else reversed(range(len(sides)))
        for side in order:
            times[side].append(seconds(sides[side]))
    return [statistics.median(of_side) for of_side in times]


def median_seconds(run: Callable[[], object], *, rounds: int) -> float:
    run()
    return statistics.median(seconds(run) for _ in range(rounds))


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def finish(name: str, rows: list[Row]) -> int:
    """Prints the table, saves the JSON, and returns the exit status: 1 if a goal was missed."""
    show(rows)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    document = {
        "benchmark": name,
        "machine": platform.processor() or platform.machine(),
        "rows": [{**asdict(row), "ratio": row.ratio, "met": row.is_met} for row in rows],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
    missed = [row.name for row in rows if not row.is_met]
    print(f"\nsaved {path}; " + (f"missed: {', '.join(missed)}" if missed else "every goal met"))
    return 1 if missed else 0


def show(rows: Sequence[Row]) -> None:
    print(f"\n{'':2}{'name':<46}{'ours':>12}{'reference':>12}{'ratio':>8}   goal")
    for row in rows:
        print(_line(row), flush=True)


def _line(row: Row) -> str:
    mark = "  " if row.is_met else "! "
    reference = "-" if row.reference is None else f"{row.reference:,.1f}"
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    goals = {
        "at_least": f">= {row.goal:g}x",
        "ratio_at_most": f"< {row.goal:g}x",
        "at_most": f"<= {row.goal:g} {row.unit}",
        "shown": "-",
    }
    goal = goals[row.kind]
    return f"{mark}{row.name:<46}{row.ours:>12,.2f}{reference:>12}{ratio:>8}   {goal} ({row.unit})"
