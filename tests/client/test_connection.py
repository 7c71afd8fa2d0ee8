"""Calls that fail, are tried again, and give up."""

from __future__ import annotations

import logging
import socket
import time
from concurrent.futures import Future
from typing import Any

import grpc
import pytest

from tests.client.fake_service import FakeService
from together_post_training.client import channel
from together_post_training.client.address import Address, parse_address
from together_post_training.client.channel import Connection, FixedServer
from together_post_training.client.loop import background_loop
from together_post_training.client.retry import RetryPolicy
from together_post_training.errors import ConnectionLostError, PostTrainingError, Reason, fail
from together_post_training.v1 import catalog_pb2, generator_pb2

FAST = RetryPolicy(
    connect_timeout_s=1.0, outage_timeout_s=1.0, first_delay_s=0.01, max_delay_s=0.05
)
LIST = catalog_pb2.ListModelsRequest()


def connect(fake: FakeService, **settings: Any) -> Connection:
    server = FixedServer(parse_address(fake.address, what="address"))
    return Connection(server, **{"policy": FAST, **settings})


def start(connection: Connection, method: str, request: Any) -> Future[Any]:
    return background_loop().start(connection.call(method, request))


def call(connection: Connection, method: str = "catalog.ListModels", request: Any = LIST) -> Any:
    return start(connection, method, request).result(20)


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_call_sends_the_key_and_headers_as_metadata(fake):
    call(connect(fake, key="tml-1", headers={"X-Team": "blue"}))
    sent = fake.metadata[-1]
    assert (sent["authorization"], sent["x-team"]) == ("Bearer tml-1", "blue")


def test_call_without_a_key_sends_no_authorization(fake):
    call(connect(fake))
    assert "authorization" not in fake.metadata[-1]


def test_server_on_this_machine_is_called_past_any_proxy(fake, monkeypatch):
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert call(connect(fake)).models[0].name == "fake"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("localhost:1", True),
        ("127.0.0.9:1", True),
        ("[::1]:1", True),
        ("localhost.example:1", False),
        ("10.0.0.1:1", False),
    ],
)
def test_addresses_of_this_machine_are_known(target, expected):
    assert Address(target=target).is_loopback is expected


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
def test_call_is_tried_again_when_the_connection_breaks(fake, code):
    fake.inject("ListModels", code=code, times=3)
    assert call(connect(fake)).models[0].name == "fake"
    assert len(fake.received("ListModels")) == 4


def test_call_is_tried_again_when_the_server_is_full_after_the_delay_it_asks_for(fake):
    full = fail(Reason.RESOURCE_EXHAUSTED, "full")
    fake.inject("ListModels", error=full, retry_s=0.4)
    start_s = time.monotonic()
    call(connect(fake))
    assert time.monotonic() - start_s >= 0.4
    assert len(fake.received("ListModels")) == 2


def test_call_waits_for_as_long_as_the_server_says_when_to_come_again(fake):
    """Longer than it would wait for one that is away, and in even steps."""
    full = fail(Reason.RESOURCE_EXHAUSTED, "full")
    fake.inject("ListModels", error=full, retry_s=0.2, times=8)
    start_s = time.monotonic()
    assert call(connect(fake)).models[0].name == "fake"
    assert FAST.outage_timeout_s < 8 * 0.2 <= time.monotonic() - start_s
    assert len(fake.received("ListModels")) == 9


def test_calls_that_wait_for_room_say_so_once(fake, caplog):
    full = fail(Reason.RESOURCE_EXHAUSTED, "full: 7 of 7")
    fake.inject("ListModels", error=full, retry_s=0.1, times=15)
    connection = connect(fake)
    with caplog.at_level(logging.WARNING):
        for pending in [start(connection, "catalog.ListModels", LIST) for _ in range(5)]:
            assert pending.result(20).models
    (record,) = caplog.records
    assert "full: 7 of 7" in record.message


def test_outage_after_a_wait_for_room_is_timed_from_its_own_start(fake):
    full = fail(Reason.RESOURCE_EXHAUSTED, "full")
    fake.inject("ListModels", error=full, retry_s=0.3, times=4)
    fake.inject("ListModels", code=grpc.StatusCode.UNAVAILABLE, times=3)
    assert call(connect(fake)).models
    assert len(fake.received("ListModels")) == 8


def test_outage_of_a_call_that_ran_for_long_is_timed_from_its_own_start(fake, monkeypatch):
    """A call may wait for its turn for hours. That the connection then breaks once is no outage of hours."""
    monkeypatch.setattr(channel, "_ALIVE_S", 0.5)
    slow = {"code": grpc.StatusCode.UNAVAILABLE, "stall_s": 0.6, "times": 3}
    fake.inject("ListModels", **slow)
    assert call(connect(fake)).models
    assert len(fake.received("ListModels")) == 4


def test_call_that_cannot_be_sent_for_lack_of_memory_is_not_tried_again(fake):
    fake.inject("ListModels", error=fail(Reason.OUT_OF_MEMORY, "too large"), retry_s=0.1)
    with pytest.raises(PostTrainingError, match="too large"):
        call(connect(fake))
    assert len(fake.received("ListModels")) == 1


def test_call_gives_up_on_a_server_that_stays_full_and_does_not_say_until_when(fake):
    fake.inject("ListModels", error=fail(Reason.RESOURCE_EXHAUSTED, "full: 7 of 7"), times=1000)
    with pytest.raises(PostTrainingError, match="7 of 7") as refused:
        call(connect(fake))
    assert refused.value.reason is Reason.RESOURCE_EXHAUSTED


def test_call_is_not_tried_again_when_the_server_refuses(fake):
    fake.inject("ListModels", error=fail(Reason.MODEL_NOT_FOUND, "no 'x'", model="x"))
    with pytest.raises(PostTrainingError, match="no 'x'") as refused:
        call(connect(fake))
    assert (refused.value.reason, refused.value.metadata) == (
        Reason.MODEL_NOT_FOUND,
        {"model": "x"},
    )
    assert len(fake.received("ListModels")) == 1


def test_call_survives_a_server_that_restarts_on_its_address(fake):
    connection = connect(
        fake, policy=RetryPolicy(first_delay_s=0.01, max_delay_s=0.05, outage_timeout_s=20)
    )
    call(connection)
    fake.stop()
    pending = start(connection, "catalog.ListModels", LIST)
    with pytest.raises(TimeoutError):
        pending.result(0.3)
    fake.start()
    assert pending.result(20).models[0].name == "fake"


def test_calls_that_wait_for_a_server_say_so_once_and_say_when_it_answers(fake, caplog):
    policy = RetryPolicy(first_delay_s=0.01, max_delay_s=0.05, outage_timeout_s=20)
    connection = connect(fake, policy=policy)
    call(connection)
    fake.stop()
    pending = [start(connection, "catalog.ListModels", LIST) for _ in range(5)]
    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError):
        pending[0].result(2)
    (record,) = caplog.records
    assert f"No answer from {fake.address}" in record.message
    assert "up to 20 s" in record.message
    fake.start()
    for waiting in pending:
        assert waiting.result(20).models
    assert [r.message for r in caplog.records[1:]] == [f"{fake.address} answers."]


def test_call_gives_up_on_a_server_that_stays_away_and_names_it(fake):
    connection = connect(fake)
    call(connection)
    fake.stop()
    with pytest.raises(ConnectionLostError, match=f"Lost the connection to {fake.address}"):
        call(connection)
    fake.start()
    assert call(connection).models, "the connection works again once the server is back"


def test_call_to_nobody_gives_up_within_the_connect_timeout_and_names_the_address():
    port = unused_port()
    connection = Connection(FixedServer(Address(target=f"127.0.0.1:{port}")), policy=FAST)
    start_s = time.monotonic()
    with pytest.raises(
        ConnectionLostError, match=f"Cannot reach grpc://127.0.0.1:{port}.*within 1 s"
    ):
        call(connection)
    assert time.monotonic() - start_s < 3


def test_call_to_a_peer_that_never_answers_gives_up_within_the_connect_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        connection = Connection(FixedServer(Address(target=target)), policy=FAST)
        start_s = time.monotonic()
        with pytest.raises(ConnectionLostError, match="Cannot reach"):
            call(connection)
        assert time.monotonic() - start_s < 5


def test_call_waits_for_a_server_that_starts_late(fake):
    fake.stop()
    pending = start(
        connect(fake, policy=RetryPolicy(connect_timeout_s=20)), "catalog.ListModels", LIST
    )
    with pytest.raises(TimeoutError):
        pending.result(0.3)
    fake.start()
    assert pending.result(20).models


def test_call_with_a_message_over_the_limit_fails_at_once_and_says_so(fake):
    prompt = generator_pb2.ComputeLogprobsRequest()
    prompt.prompt.chunks.add().encoded_text.raw = bytes(257 * 2**20)
    with pytest.raises(PostTrainingError, match=r"too large.*268435456") as refused:
        call(connect(fake), "generator.ComputeLogprobs", prompt)
    assert refused.value.reason is Reason.RESOURCE_EXHAUSTED


def test_call_after_close_is_refused(fake):
    connection = connect(fake)
    call(connection)
    background_loop().start(connection.close()).result(5)
    with pytest.raises(PostTrainingError, match="closed"):
        call(connection)


def test_call_reports_a_reason_that_it_does_not_know_as_internal_with_the_message(fake):
    trouble = fail(Reason.INTERNAL, "brand new trouble")
    fake.inject("ListModels", error=trouble, reason="FROM_THE_FUTURE")
    with pytest.raises(PostTrainingError, match="brand new trouble") as refused:
        call(connect(fake))
    assert refused.value.reason is Reason.INTERNAL
