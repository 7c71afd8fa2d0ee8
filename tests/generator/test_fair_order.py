"""Who is next."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from backend.generator.fair_order import FairOrder

FLOWS = st.sampled_from("abc")
# ("push", flow, cost), ("pop",) or ("remove", which of those that wait).
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), FLOWS, st.integers(1, 50)),
        st.tuples(st.just("pop")),
        st.tuples(st.just("remove"), st.integers(0, 100)),
    ),
    max_size=80,
)


def play(actions) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(what came out, what still waits), as (flow, number)."""
    order: FairOrder[tuple[str, int]] = FairOrder()
    waiting: list[tuple[str, int]] = []
    popped = []
    for number, (action, *values) in enumerate(actions):
        if action == "push":
            flow, cost = values
            order.push(flow, (flow, number), cost)
            waiting.append((flow, number))
        elif waiting and action == "pop":
            popped.append(order.pop())
            waiting.remove(popped[-1])
        elif waiting:
            flow, removed = waiting.pop(values[0] % len(waiting))
            order.discard(flow, (flow, removed))
            order.discard(flow, (flow, removed))
        assert len(order) == len(waiting)
    return popped, [order.pop() for _ in range(len(order))]


@given(ACTIONS)
def test_everyone_comes_out_once_and_in_order_within_a_flow(actions):
    popped, left = play(actions)
    out = popped + left
    assert len(set(out)) == len(out)
    for flow in "abc":
        numbers = [number for name, number in out if name == flow]
        assert all(a < b for a, b in pairwise(numbers))


@given(
    counts=st.dictionaries(FLOWS, st.integers(1, 40), min_size=2),
    costs=st.dictionaries(FLOWS, st.integers(1, 50), min_size=3),
)
def test_flows_that_wait_get_equal_shares_within_one_item_of_each(counts, costs):
    order: FairOrder[tuple[str, int]] = FairOrder()
    for flow, count in counts.items():
        for i in range(count):
            order.push(flow, (flow, i), costs[flow])
    served: Counter[str] = Counter()
    left = Counter(counts)
    while all(left.values()):
        flow, _ = order.pop()
        served[flow] += costs[flow]
        left[flow] -= 1
        most = max(served[f] for f in counts)
        assert most - min(served[f] for f in counts) <= 2 * max(costs.values())


def test_newcomer_is_next_but_for_one_however_many_wait():
    order: FairOrder[str] = FairOrder()
    for i in range(1000):
        order.push("many", f"many {i}", 10)
    order.pop()
    order.push("one", "one", 10)
    assert "one" in (order.pop(), order.pop())


def test_flow_of_large_items_does_not_hold_up_small_ones():
    order: FairOrder[str] = FairOrder()
    for i in range(3):
        order.push("large", f"large {i}", 1000)
    for i in range(100):
        order.push("small", f"small {i}", 10)
    out = [order.pop() for _ in range(103)]
    assert out.index("large 1") > out.index("small 98")


def test_flow_that_comes_and_goes_is_not_served_more_than_one_that_stays():
    """Each time its one item is done it sends the next; the other has many waiting."""
    order: FairOrder[str] = FairOrder()
    for _ in range(100):
        order.push("stays", f"stays {len(order)}", 10)
    order.push("returns", "returns", 10)
    out = []
    for i in range(50):
        out.append(order.pop())
        if out[-1].startswith("returns"):
            order.push("returns", f"returns {i}", 10)
    assert 24 <= sum(item.startswith("returns") for item in out) <= 26


def test_flows_that_left_are_forgotten():
    order: FairOrder[int] = FairOrder()
    order.push("stays", -1, 1)
    order.push("stays", -2, 10**9)
    for i in range(1000):
        order.push(f"flow {i}", i, 1)
    for _ in range(1001):
        order.pop()
    assert len(order._flows) == len(order._heap) <= 1001
    order.pop()
    assert not order._flows
    assert not order._heap
