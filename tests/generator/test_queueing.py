"""Whose turn it is: fair over flows, first come first served within each."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from backend.generator.queueing import FairQueue

DEAREST = 50


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.sampled_from("abc"), st.integers(1, DEAREST)),
            st.just("pop"),
        ),
        max_size=150,
    )
)
def test_flows_that_wait_are_served_alike(steps):
    """Over any time in which two flows both wait, what they are served differs by two items at most."""
    queue: FairQueue[int] = FairQueue()
    costs: dict[int, tuple[str, int]] = {}
    served: Counter[str] = Counter()
    # By pair of flows that both wait: the least and the most that one was ahead since then.
    leads: dict[tuple[str, str], tuple[int, int]] = {}
    for number, step in enumerate(steps):
        if step != "pop":
            costs[number] = step
            queue.push(step[0], number, step[1])
        elif queue:
            flow, cost = costs[queue.pop()]
            served[flow] += cost
        waiting = {costs[item][0] for item in queue}
        for pair in itertools.combinations("abc", 2):
            if not waiting.issuperset(pair):
                leads.pop(pair, None)
                continue
            lead = served[pair[0]] - served[pair[1]]
            low, high = leads.get(pair, (lead, lead))
            leads[pair] = min(low, lead), max(high, lead)
            assert leads[pair][1] - leads[pair][0] <= 2 * DEAREST


@given(
    flows=st.lists(st.sampled_from("abcd"), min_size=1, max_size=60),
    put_back=st.sets(st.integers(0, 60)),
)
def test_a_flow_is_served_in_the_order_of_its_calls(flows, put_back):
    """Whatever is popped and put back on the way; and twice the same is served in the same order."""

    def run() -> list[int]:
        queue: FairQueue[int] = FairQueue()
        for number, flow in enumerate(flows):
            queue.push(flow, number, 1 + number % 7)
        order: list[int] = []
        for attempt in itertools.count():
            if not queue:
                return order
            item = queue.pop()
            if attempt in put_back:
                queue.put_back(item)
            else:
                order.append(item)
        raise AssertionError

    order = run()
    assert sorted(order) == list(range(len(flows)))
    for flow in "abcd":
        mine = [number for number in order if flows[number] == flow]
        assert mine == sorted(mine)
    assert order == run()


def test_a_flow_that_was_idle_has_no_claim_to_what_it_left():
    queue: FairQueue[str] = FairQueue()
    for i in range(100):
        queue.push("busy", f"busy {i}", 10)
    for _ in range(50):
        queue.pop()
    for i in range(3):
        queue.push("late", f"late {i}", 10)
    order = [queue.pop() for _ in range(6)]
    assert [item.split()[0] for item in order].count("late") == 3
    assert order[0] == "late 0", "it had nothing yet"
    queue.push("late", "late 3", 10)
    assert [queue.pop() for _ in range(2)] != ["busy 54", "busy 55"]


def test_what_was_put_back_was_not_served():
    """However often there was no room for it."""
    queue: FairQueue[str] = FairQueue()
    for item in ("a0", "a1", "b0", "b1"):
        queue.push(item[0], item, cost=10)
    assert queue.pop() == "a0"
    for _ in range(3):
        assert queue.pop() == "b0"
        queue.put_back("b0")
    assert [queue.pop() for _ in range(3)] == ["b0", "a1", "b1"]


def test_what_an_item_took_beyond_its_cost_counts():
    queue: FairQueue[str] = FairQueue()
    for flow in ("a", "b"):
        for i in range(9):
            queue.push(flow, f"{flow}{i}", 1)
    assert [queue.pop(), queue.pop()] == ["a0", "b0"]
    queue.leave("a0", more=3)
    assert [queue.pop() for _ in range(4)] == ["b1", "b2", "b3", "a1"]


def test_items_that_leave_are_not_served():
    queue: FairQueue[str] = FairQueue()
    for item in ("a0", "a1", "a2"):
        queue.push("a", item, 1)
    queue.leave("a1")
    queue.leave("never here")
    assert [*queue] == ["a0", "a2"]
    assert [queue.pop(), queue.pop()] == ["a0", "a2"]
    assert not queue
    assert len(queue) == 0


def test_flows_that_are_over_are_forgotten():
    queue: FairQueue[int] = FairQueue()
    for number in range(1000):
        queue.push(f"flow {number}", number, 5)
        assert queue.pop() == number
        queue.leave(number, more=-2)
    assert len(queue._served) < 50
    assert len(queue._tickets) == 0
