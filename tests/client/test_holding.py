"""Snapshots are held as long as somebody samples from them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from tests.client.fake_service import FakeService
from together_post_training.client import holding
from together_post_training.client.address import parse_address
from together_post_training.client.channel import Connection, FixedServer
from together_post_training.client.holding import Holds
from together_post_training.client.loop import background_loop
from together_post_training.client.retry import RetryPolicy
from together_post_training.client.sampler import Sampler

SOON_S = 5.0


@pytest.fixture
def connection(fake: FakeService) -> Iterator[Connection]:
    """To a server that wants to hear of snapshots every 50 ms."""
    fake.lease_s = 0.2
    made = connect(fake)
    yield made
    close(made)


def connect(fake: FakeService) -> Connection:
    server = FixedServer(parse_address(fake.address, what="address"))
    return Connection(server, policy=RetryPolicy(first_delay_s=0.01, max_delay_s=0.05))


def close(connection: Connection) -> None:
    background_loop().start(connection.close()).result(10)


def told(fake: FakeService) -> list[list[str]]:
    return [list(request.snapshots) for request in fake.received("HoldSnapshots")]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.01)


def test_snapshot_is_held_as_long_as_its_sampler_lives(fake: FakeService, connection: Connection):
    samplers = [Sampler(connection, f"snapshots/{name}", "model") for name in "ab"]
    wait_until(lambda: told(fake)[-1:] == [["snapshots/a", "snapshots/b"]])
    count = len(told(fake))
    wait_until(lambda: len(told(fake)) > count + 2)
    assert told(fake)[-1] == ["snapshots/a", "snapshots/b"], "said again and again"
    del samplers[0]
    gc.collect()
    wait_until(lambda: told(fake)[-1] == ["snapshots/b"])
    samplers.clear()
    gc.collect()
    wait_until(lambda: told(fake)[-1] == [])
    count = len(told(fake))
    time.sleep(0.3)
    assert len(told(fake)) == count, "there is nothing to say any more"
    again = Sampler(connection, "snapshots/c", "model")
    wait_until(lambda: told(fake)[-1] == [again.snapshot])
    assert len({request.holder for request in fake.received("HoldSnapshots")}) == 1


def test_new_snapshot_is_held_at_once_and_a_second_sampler_of_it_changes_nothing(
    fake: FakeService,
):
    """Although it would be half a minute until the next call."""
    connection = connect(fake)
    first = Sampler(connection, "snapshots/a", "model")
    wait_until(lambda: told(fake) == [["snapshots/a"]])
    twin = Sampler(connection, "snapshots/a", "model")
    time.sleep(0.1)
    assert told(fake) == [["snapshots/a"]]
    other = Sampler(connection, "snapshots/b", "model")
    wait_until(lambda: told(fake)[1:] == [["snapshots/a", "snapshots/b"]])
    assert first == twin != other
    close(connection)


def test_base_models_are_not_held(fake: FakeService, connection: Connection):
    sampler = Sampler(connection, "snapshots/base:0123", "model")
    time.sleep(0.1)
    assert told(fake) == []
    assert connection.holds.names() == set()
    del sampler


def test_closing_lets_everything_go(fake: FakeService, connection: Connection):
    sampler = Sampler(connection, "snapshots/a", "model")
    wait_until(lambda: told(fake) != [])
    close(connection)
    assert told(fake)[-1] == []
    count = len(told(fake))
    time.sleep(0.2)
    assert len(told(fake)) == count
    del sampler


def test_closing_keeps_what_was_exported(fake: FakeService, connection: Connection):
    samplers = [Sampler(connection, f"snapshots/{name}", "model") for name in "ab"]
    samplers[1].exported()
    wait_until(lambda: told(fake)[-1:] == [["snapshots/a", "snapshots/b"]])
    close(connection)
    assert told(fake)[-1] == ["snapshots/b"]


def test_closing_is_quick_when_the_server_is_gone(fake: FakeService):
    connection = connect(fake)
    sampler = Sampler(connection, "snapshots/a", "model")
    wait_until(lambda: told(fake) != [])
    fake.stop()
    start_s = time.monotonic()
    close(connection)
    assert time.monotonic() - start_s < 3
    fake.start()
    del sampler


def test_exported_snapshot_is_held_for_an_hour_after_its_sampler_is_gone():
    now = 100.0
    holds = Holds(monotonic=lambda: now)
    holds.export("snapshots/a")
    assert holds.names() == {"snapshots/a"}
    now += holding.EXPORTED_S - 1
    holds.export("snapshots/b")
    now += 2
    assert holds.names() == {"snapshots/b"}


def test_server_that_was_away_is_told_when_it_is_back(fake: FakeService, connection: Connection):
    sampler = Sampler(connection, "snapshots/a", "model")
    wait_until(lambda: told(fake) != [])
    fake.stop()
    time.sleep(0.2)
    count = len(told(fake))
    fake.start()
    wait_until(lambda: len(told(fake)) > count)
    assert told(fake)[-1] == [sampler.snapshot]


def test_server_that_does_not_know_of_holding_is_asked_once(
    fake: FakeService, connection: Connection
):
    fake.inject("HoldSnapshots", code=grpc.StatusCode.UNIMPLEMENTED, times=100)
    samplers = [Sampler(connection, "snapshots/a", "model")]
    wait_until(lambda: told(fake) != [])
    time.sleep(0.2)
    samplers.append(Sampler(connection, "snapshots/b", "model"))
    time.sleep(0.2)
    assert told(fake) == [["snapshots/a"]]


def test_other_refusals_do_not_end_it(fake: FakeService, connection: Connection, monkeypatch):
    monkeypatch.setattr(holding, "INTERVAL_S", 0.05)
    fake.inject("HoldSnapshots", code=grpc.StatusCode.INTERNAL, times=2)
    sampler = Sampler(connection, "snapshots/a", "model")
    wait_until(lambda: len(told(fake)) > 4)
    assert told(fake)[-1] == [sampler.snapshot]
