from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.harness import MODEL, Caller, Clock, Running, refusal, serving
from together_post_training.v1 import generator_pb2 as pb

TOKENS = [3, 4, 9, 1]
LEASE_S = 100.0


@pytest.fixture
def clock() -> Clock:
    return Clock(5000.0)


@pytest.fixture
def running(tmp_path: Path, clock: Clock) -> Iterator[Running]:
    with serving(
        tmp_path,
        clocks={"monotonic": clock},
        snapshot_lease_s=LEASE_S,
        snapshot_sweep_interval_s=0.01,
    ) as made:
        yield made


def listed(caller: Caller, **fields: Any) -> list[str]:
    response = caller.generator.ListSnapshots(pb.ListSnapshotsRequest(**fields))
    assert not response.next_page_token
    for shown in response.snapshots:
        assert caller.generator.GetSnapshot(pb.GetSnapshotRequest(name=shown.name)) == shown
    return [shown.name for shown in response.snapshots]


def hold(caller: Caller, holder: str, *names: str) -> None:
    caller.generator.HoldSnapshots(pb.HoldSnapshotsRequest(holder=holder, snapshots=names))


def test_snapshots_are_listed_by_name_whatever_they_are_of(running: Running):
    caller = running.caller
    assert listed(caller) == []
    run, other = caller.session(), caller.session()
    first = run.publish()
    run.train(TOKENS)
    second, others = run.publish(), other.publish()
    run.save("a", "INFERENCE")
    opened = caller.open(path=run.path("a", "sampler_weights"))
    base = caller.open(base_model=MODEL)
    live, others_live = (f"snapshots/live:{one.id}" for one in (run, other))
    everything = [first, second, others, opened, base, live, others_live]
    assert listed(caller) == sorted(everything)
    assert listed(caller, session=run.id) == sorted([first, second, opened, live])
    assert listed(caller, session=other.id) == sorted([others, others_live])
    assert listed(caller, session="none") == []
    for name in everything:
        caller.score(name, TOKENS)


def test_holders_snapshots_are_those_that_it_said_last(running: Running, clock: Clock):
    caller = running.caller
    run = caller.session()
    first = run.publish()
    run.train(TOKENS)
    second = run.publish()
    base = caller.open(base_model=MODEL)
    live = f"snapshots/live:{run.id}"
    hold(caller, "one", first, live)
    hold(caller, "two", first, base, "snapshots/none")
    assert listed(caller, holder="one") == sorted([first, live])
    assert listed(caller, holder="two") == sorted([first, base])
    assert listed(caller, holder="two", session=run.id) == [first]
    assert listed(caller, holder="none") == []
    (shown,) = (
        one
        for one in caller.generator.ListSnapshots(pb.ListSnapshotsRequest(holder="one")).snapshots
        if one.is_live
    )
    assert (shown.session, shown.policy_version) == (run.id, 1)
    clock.now += LEASE_S + 1
    assert listed(caller, holder="one") == sorted([first, live]), "it may be asleep"
    hold(caller, "one", second)
    assert listed(caller, holder="one") == [second]
    hold(caller, "one")
    assert listed(caller, holder="one") == []


def test_snapshots_are_listed_in_pages(running: Running):
    caller, run = running.caller, running.caller.session()
    for _ in range(4):
        run.train(TOKENS)
        run.publish()
    expected, got, token, num_pages = listed(caller), [], "", 0
    while num_pages == 0 or token:
        page = caller.generator.ListSnapshots(
            pb.ListSnapshotsRequest(page_size=2, page_token=token)
        )
        got += [shown.name for shown in page.snapshots]
        token, num_pages = page.next_page_token, num_pages + 1
    assert (got, num_pages) == (expected, 3)
    assert len(expected) == 5


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"holder": "a b"}, "INVALID_NAME"),
        ({"session": "../x"}, "INVALID_NAME"),
        ({"page_size": 0}, "INVALID_ARGUMENT"),
        ({"page_size": 1001}, "INVALID_ARGUMENT"),
        ({"page_token": "x"}, "INVALID_ARGUMENT"),
    ],
)
def test_list_of_snapshots_refuses_what_it_cannot_mean(
    caller: Caller, fields: dict[str, Any], reason: str
):
    request = pb.ListSnapshotsRequest(**fields)
    assert refusal(caller.generator.ListSnapshots, request).reason == reason
