from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.operations.scheduler import Kind, Scheduler

QUANTUM = 100
MERGE = 60


@dataclass(frozen=True, slots=True)
class Item:
    session: str
    number: int
    cost: int
    kind: Kind = Kind.BACKWARD


items = st.tuples(
    st.one_of(st.integers(1, 40), st.integers(1, 1000)),
    st.sampled_from([Kind.SHORT, Kind.FORWARD, Kind.BACKWARD]),
)
queues = st.dictionaries(st.sampled_from("abcde"), st.lists(items, min_size=1, max_size=30))
Queues = dict[str, list[tuple[int, Kind]]]


def filled(queues: Queues, merge_tokens: int = MERGE) -> Scheduler[Item]:
    scheduler: Scheduler[Item] = Scheduler(merge_tokens=merge_tokens, quantum_tokens=QUANTUM)
    for session, queue in queues.items():
        for i, (cost, kind) in enumerate(queue):
            scheduler.add(session, Item(session, i, cost, kind), cost, kind)
    return scheduler


def of_passes(queues: dict[str, list[int]], merge_tokens: int = MERGE) -> Scheduler[Item]:
    return filled({s: [(c, Kind.BACKWARD) for c in q] for s, q in queues.items()}, merge_tokens)


def batches(scheduler: Scheduler[Item]) -> Iterator[list[Item]]:
    while batch := scheduler.next_batch():
        yield batch
        for item in batch:
            scheduler.release(item.session)


def drained(scheduler: Scheduler[Item]) -> list[Item]:
    return [item for batch in batches(scheduler) for item in batch]


@given(queues)
def test_scheduler_serves_everything_once_and_each_session_in_order(queues: Queues):
    served = drained(filled(queues))
    for session, queue in queues.items():
        numbers = [item.number for item in served if item.session == session]
        assert numbers == list(range(len(queue)))


@given(queues)
def test_scheduler_puts_together_short_items_or_small_passes_of_one_kind_and_of_different_sessions(
    queues: Queues,
):
    for batch in batches(filled(queues)):
        assert len({item.session for item in batch}) == len(batch)
        assert len({item.kind for item in batch}) == 1
        if len(batch) > 1 and batch[0].kind is not Kind.SHORT:
            assert sum(item.cost for item in batch) <= MERGE


@given(queues, st.sampled_from([0, MERGE, 5 * QUANTUM]))
def test_scheduler_gives_sessions_that_always_have_work_the_same_number_of_tokens(
    queues: Queues, merge_tokens: int
):
    """While nobody has run out, two sessions differ by at most three quanta, what may merge, and the largest operation:
    one turn more, the credit that a session may keep, and the debt that another may have."""
    left = {session: len(queue) for session, queue in queues.items()}
    tokens = dict.fromkeys(queues, 0)
    largest = max((cost for queue in queues.values() for cost, _ in queue), default=0)
    for batch in batches(filled(queues, merge_tokens)):
        for item in batch:
            left[item.session] -= 1
            tokens[item.session] += item.cost
        if not all(left.values()):
            return
        bound = 3 * QUANTUM + merge_tokens + largest
        assert max(tokens.values()) - min(tokens.values()) <= bound


def test_scheduler_runs_alone_every_pass_where_nothing_may_merge():
    assert [len(batch) for batch in batches(of_passes({"a": [1, 1], "b": [1]}, 0))] == [1, 1, 1]


def test_scheduler_lets_those_whose_turn_is_next_join_first_until_the_tokens_are_together():
    scheduler = of_passes({"a": [20], "b": [30], "c": [20], "d": [10]})
    assert [[i.session for i in b] for b in batches(scheduler)] == [["a", "b", "d"], ["c"]]


def test_scheduler_never_takes_a_second_item_of_a_session_into_a_batch():
    scheduler = of_passes({"a": [5, 5, 5], "b": [5]})
    assert [[i.session for i in b] for b in batches(scheduler)] == [["a", "b"], ["a"], ["a"]]


def test_scheduler_runs_a_large_pass_alone():
    scheduler = of_passes({"a": [MERGE + 1], "b": [1], "c": [1]})
    assert [[i.session for i in b] for b in batches(scheduler)] == [["a"], ["b", "c"]]


def test_scheduler_runs_what_is_short_before_passes_so_that_the_next_passes_come_together():
    passed, short = (10, Kind.BACKWARD), (10, Kind.SHORT)
    scheduler = filled({"a": [passed, passed], "b": [short, passed], "c": [short, passed]})
    assert [[i.session for i in b] for b in batches(scheduler)] == [
        ["b", "c"],
        ["a", "b", "c"],
        ["a"],
    ]


def test_scheduler_lets_passes_run_however_many_short_items_a_session_has():
    scheduler = filled({"busy": [(10, Kind.SHORT)] * 500, "other": [(20, Kind.BACKWARD)]})
    served = drained(scheduler)
    place = [item.session for item in served].index("other")
    assert sum(item.cost for item in served[:place]) <= 2 * QUANTUM


def test_scheduler_lets_small_operations_pass_a_session_of_large_ones():
    first = drained(of_passes({"large": [10_000] * 3, "small": [50] * 100}))[:50]
    assert sum(item.session == "small" for item in first) >= 48


@pytest.mark.parametrize("kind", [Kind.SHORT, Kind.BACKWARD])
def test_scheduler_gives_others_a_turn_however_many_free_items_a_session_has(kind: Kind):
    served = drained(filled({"free": [(0, kind)] * 5000, "other": [(150, Kind.BACKWARD)]}))
    assert [item.session for item in served].index("other") <= 3 * QUANTUM + MERGE + 150


def test_scheduler_runs_one_operation_of_a_session_at_a_time():
    scheduler = of_passes({"a": [1, 1], "b": [1]}, merge_tokens=0)
    first, second = scheduler.next_batch(), scheduler.next_batch()
    assert {first[0].session, second[0].session} == {"a", "b"}
    assert scheduler.next_batch() == []
    scheduler.release("a")
    assert [item.number for item in scheduler.next_batch()] == [1]


def test_scheduler_serves_one_that_costs_more_than_many_quanta():
    assert len(of_passes({"a": [10**9]}).next_batch()) == 1


def test_scheduler_drops_what_waits_and_keeps_what_runs_busy():
    scheduler = of_passes({"a": [1, 1, 1]})
    scheduler.next_batch()
    assert [item.number for item in scheduler.drop("a")] == [1, 2]
    scheduler.add("a", Item("a", 9, 1), 1)
    assert scheduler.next_batch() == []
    scheduler.release("a")
    assert [item.number for item in scheduler.next_batch()] == [9]
    assert scheduler.drop("unknown") == []
