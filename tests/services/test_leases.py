"""Who holds what, against a model of sets; times are made up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend.resources.leases import Leases

LEASE_S = 10.0


def test_holder_lets_go_of_what_it_leaves_out():
    leases = Leases(LEASE_S)
    assert leases.hold("a", ["x", "y"], 0.0) == set()
    assert leases.hold("b", ["y"], 0.0) == set()
    assert leases.hold("a", [], 1.0) == {"x", "y"}
    assert [leases.is_held(name) for name in "xy"] == [False, True]
    assert [leases.is_let_go(name) for name in "xy"] == [True, False]
    leases.hold("b", ["x"], 2.0)
    assert [leases.is_let_go(name) for name in "xy"] == [False, True]


def test_silent_holder_holds_nothing_and_has_let_nothing_go():
    leases = Leases(LEASE_S)
    leases.hold("a", ["x", "y"], 0.0)
    leases.hold("b", ["y"], 0.0)
    leases.hold("b", [], 5.0)
    assert leases.expire(LEASE_S) == set()
    assert leases.expire(LEASE_S + 0.1) == {"x", "y"}
    assert leases.expire(LEASE_S + 0.2) == set()
    for name in "xy":
        assert not leases.is_held(name)
        assert not leases.is_let_go(name), "a may be asleep"
    assert leases.hold("a", ["x"], 50.0) == {"y"}
    assert leases.is_held("x")
    assert leases.is_let_go("y")


def test_never_held_is_not_let_go_until_its_publisher_says_so():
    leases = Leases(LEASE_S)
    assert not leases.is_let_go("x")
    leases.let_go("x")
    assert leases.is_let_go("x")
    leases.hold("a", ["x"], 0.0)
    assert not leases.is_let_go("x")
    leases.expire(LEASE_S + 1)
    assert not leases.is_let_go("x")


def test_names_of_one_snapshot_count_together():
    leases = Leases(LEASE_S)
    leases.hold("a", ["live"], 0.0)
    assert leases.is_held("pinned", "live")
    leases.let_go("pinned")
    assert not leases.is_let_go("pinned", "live")
    leases.hold("a", [], 1.0)
    assert leases.is_let_go("pinned", "live")


NAMES = st.sets(st.sampled_from("vwxyz"))
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), st.sampled_from("abc"), NAMES),
        st.tuples(st.just("pass"), st.floats(0, 2 * LEASE_S), st.none()),
        st.tuples(st.just("forget"), st.sampled_from("vwxyz"), st.none()),
    ),
    max_size=40,
)


@given(EVENTS)
def test_name_is_held_if_and_only_if_a_holder_that_is_not_silent_said_it_last(events):
    leases, now = Leases(LEASE_S), 0.0
    said: dict[str, tuple[set[str], float]] = {}
    silent: dict[str, set[str]] = {}
    for kind, what, names in events:
        if kind == "hold":
            leases.hold(what, names, now)
            said[what] = (set(names), now)
            silent.pop(what, None)
        elif kind == "pass":
            now += what
            leases.expire(now)
            for holder in [h for h, (_, at) in said.items() if now - at > LEASE_S]:
                silent[holder] = said.pop(holder)[0]
        else:
            leases.forget(what)
            for its in [*silent.values(), *(its for its, _ in said.values())]:
                its.discard(what)
            assert not leases.is_let_go(what)
        held = set().union(*(its for its, _ in said.values()))
        left = set().union(*silent.values())
        assert {name for name in "vwxyz" if leases.is_held(name)} == held
        assert not {name for name in held | left if leases.is_let_go(name)}
        for holder in "abc":
            mine = said[holder][0] if holder in said else silent.get(holder, set())
            assert leases.held_by(holder) == mine
