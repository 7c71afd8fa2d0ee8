from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend.operations.scheduler import Scheduler

QUANTUM = 100
costs = st.lists(st.integers(min_value=1, max_value=1000), min_size=1, max_size=30)


def drain(scheduler: Scheduler[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    served = []
    while (item := scheduler.next()) is not None:
        served.append(item)
        scheduler.release(item[0])
    return served


def fill(queues: dict[str, list[int]]) -> Scheduler[tuple[str, int, int]]:
    scheduler: Scheduler[tuple[str, int, int]] = Scheduler(QUANTUM)
    for name, queue in queues.items():
        for i, cost in enumerate(queue):
            scheduler.add(name, (name, i, cost), cost)
    return scheduler


@given(st.dictionaries(st.sampled_from("abcde"), costs, min_size=1))
def test_scheduler_serves_everything_once_and_each_session_in_order(queues: dict[str, list[int]]):
    served = drain(fill(queues))
    for name, queue in queues.items():
        assert [i for session, i, _ in served if session == name] == list(range(len(queue)))


@given(st.dictionaries(st.sampled_from("abcde"), costs, min_size=2))
def test_scheduler_gives_sessions_that_always_have_work_the_same_number_of_tokens(
    queues: dict[str, list[int]],
):
    """While nobody has run out, two sessions differ by at most a quantum and the largest operation of each."""
    scheduler = fill(queues)
    left = {name: len(queue) for name, queue in queues.items()}
    tokens = dict.fromkeys(queues, 0)
    while all(left.values()):
        item = scheduler.next()
        assert item is not None
        name, _, cost = item
        scheduler.release(name)
        left[name] -= 1
        tokens[name] += cost
        largest = max(max(queue) for queue in queues.values())
        assert max(tokens.values()) - min(tokens.values()) <= QUANTUM + 2 * largest


def test_scheduler_lets_small_operations_pass_a_session_of_large_ones():
    scheduler = fill({"large": [10_000] * 3, "small": [50] * 100})
    first = drain(scheduler)[:50]
    assert sum(name == "small" for name, _, _ in first) >= 48


def test_scheduler_gives_others_a_turn_however_many_free_items_a_session_has():
    served = drain(fill({"free": [0] * 500, "other": [150]}))
    assert served.index(("other", 0, 150)) <= 2 * QUANTUM


def test_scheduler_runs_one_operation_of_a_session_at_a_time():
    scheduler = fill({"a": [1, 1], "b": [1]})
    first, second = scheduler.next(), scheduler.next()
    assert first is not None
    assert second is not None
    assert {first[0], second[0]} == {"a", "b"}
    assert scheduler.next() is None
    scheduler.release("a")
    assert scheduler.next() == ("a", 1, 1)


def test_scheduler_serves_one_that_costs_more_than_many_quanta():
    scheduler = fill({"a": [10**9]})
    assert scheduler.next() == ("a", 0, 10**9)


def test_scheduler_drops_what_waits_and_keeps_what_runs_busy():
    scheduler = fill({"a": [1, 1, 1]})
    scheduler.next()
    assert [i for _, i, _ in scheduler.drop("a")] == [1, 2]
    scheduler.add("a", ("a", 9, 1), 1)
    assert scheduler.next() is None
    scheduler.release("a")
    assert scheduler.next() == ("a", 9, 1)
    assert scheduler.drop("unknown") == []
