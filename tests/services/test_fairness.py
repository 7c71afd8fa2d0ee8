"""Law 19: nobody is slowed without bound by what others send. In what the trainer did, not in seconds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.services.harness import Run, Running, cross_entropy, sample, serving_watched
from tests.services.programs import held, resource
from together_post_training.v1 import trainer_pb2

STEPS = 6
MODEL = "builtin:bigram16"
SMALL, HUGE = [sample([1, 2, 3, 4, 5])], [sample([1, 2] * 500)] * 8

Call = tuple[str, ...]


def submit_steps(run: Run, samples: list[Any], count: int = STEPS) -> None:
    for _ in range(count):
        run.submit("ForwardBackward", loss=cross_entropy(), samples=samples)
        run.submit("OptimStep", adam=trainer_pb2.AdamParams(learning_rate=0.01))


def calls_of(running: Running, loads: dict[int, list[Any]], num_runs: int) -> list[Call]:
    """What the trainer was called for, with everything sent before it began: ("pass", "0", "3"), ("step", "0").

    Args:
        loads: the samples of the sessions of these numbers; others send SMALL ones.
    """
    assert running.watched is not None
    runs = [running.caller.session() for _ in range(num_runs)]
    with held(resource(running, MODEL)):
        for i, run in enumerate(runs):
            submit_steps(run, loads.get(i, SMALL))
    for run in runs:
        running.caller.wait(run.submit("OptimStep", adam=trainer_pb2.AdamParams()))
    number = {run.id: str(i) for i, run in enumerate(runs)}
    return [(kind, *(number[s] for s in sessions)) for kind, *sessions in running.watched.calls]


def ends(calls: list[Call], num_runs: int) -> list[int]:
    """How many calls had begun when each session's last step did."""
    last = {call[1]: n for n, call in enumerate(calls, start=1) if call[0] == "step"}
    return [last[str(i)] for i in range(num_runs)]


@pytest.mark.parametrize("merge_tokens", [0, 16, 4096])
def test_law_19_clients_of_equal_load_finish_within_twice_the_time_of_each_other(
    tmp_path: Path, merge_tokens: int
):
    with serving_watched(tmp_path / "store", merge_tokens=merge_tokens) as running:
        ended = ends(calls_of(running, {}, 8), 8)
    assert max(ended) <= 2 * min(ended)


@pytest.mark.parametrize("merge_tokens", [0, 16, 4096])
def test_law_19_a_client_of_huge_operations_does_not_hold_up_small_ones(
    tmp_path: Path, merge_tokens: int
):
    """It came first, and has run one or two of its passes when the others are through."""
    with serving_watched(tmp_path / "store", merge_tokens=merge_tokens) as running:
        calls = calls_of(running, {0: HUGE}, 4)
    through = max(ends(calls, 4)[1:])
    huge = Counter(call[0] for call in calls[:through] if "0" in call)
    assert huge["pass"] <= 2
    assert Counter(call[0] for call in calls if "0" in call)["pass"] == STEPS


def test_law_19_a_client_of_many_small_operations_does_not_hold_up_a_huge_one(tmp_path: Path):
    """Of the same number of tokens, it has had no more than the other when that is through, and one operation."""
    with serving_watched(tmp_path / "store") as running:
        assert running.watched is not None
        small, huge = running.caller.session(), running.caller.session()
        with held(resource(running, MODEL)):
            submit_steps(small, SMALL, 100)
            huge.submit("ForwardBackward", loss=cross_entropy(), samples=HUGE[:2])
        running.caller.wait(small.submit("OptimStep", adam=trainer_pb2.AdamParams()))
        calls = running.watched.calls
    before = calls[: calls.index(("pass", huge.id))]
    tokens = sum(4 if kind == "pass" else 64 for kind, *_ in before)
    assert 0 < tokens <= 2 * 999 + 3 * 64
