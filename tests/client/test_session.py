"""Operations of a session, against a service with faults."""

from __future__ import annotations

import asyncio
import gc
import time
from concurrent.futures import Future
from typing import Any

import grpc
import pytest

from tests.client.fake_service import FakeService
from together_post_training.client import session as session_module
from together_post_training.client.address import parse_address
from together_post_training.client.channel import Connection, FixedServer
from together_post_training.client.loop import background_loop
from together_post_training.client.retry import RetryPolicy
from together_post_training.client.session import TrainingSession, Turn, create_session
from together_post_training.errors import ConnectionLostError, PostTrainingError, Reason, fail
from together_post_training.v1 import sessions_pb2, trainer_pb2

FAST = RetryPolicy(
    connect_timeout_s=2.0, outage_timeout_s=1.0, first_delay_s=0.01, max_delay_s=0.05
)


def open_session(fake: FakeService, session_id: str = "s") -> TrainingSession:
    connection = Connection(FixedServer(parse_address(fake.address, what="address")), policy=FAST)
    request = sessions_pb2.CreateSessionRequest(id=session_id, base_model="fake")
    return background_loop().start(create_session(connection, request)).result(10)


def step() -> trainer_pb2.OptimStepRequest:
    return trainer_pb2.OptimStepRequest(adam=trainer_pb2.AdamParams())


def submit(session: TrainingSession, *requests: Any) -> Future[Any]:
    session.number(requests, session.reserve(len(requests)))
    return background_loop().start(session.run(requests))


def sequences(fake: FakeService, method: str) -> list[int]:
    return [request.sequence for request in fake.received(method)]


def until(condition: Any, timeout_s: float = 5.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.01)


def test_numbers_start_at_1_and_follow_the_calls(fake):
    session = open_session(fake)
    assert session.reserve(1).sequences == range(1, 2)
    assert session.reserve(3).sequences == range(2, 5)
    first, rest = session.reserve(5).split(2)
    assert (first.sequences, rest.sequences) == (range(5, 7), range(7, 10))


def test_operations_end_in_the_order_of_their_numbers_when_the_first_is_late(fake):
    session = open_session(fake)
    fake.inject("OptimStep", code=grpc.StatusCode.UNAVAILABLE)
    first, second = submit(session, step()), submit(session, step())
    assert [first.result(5)[0].name, second.result(5)[0].name] == [
        "sessions/s/operations/1",
        "sessions/s/operations/2",
    ]
    assert sorted(sequences(fake, "OptimStep")) == [1, 1, 2]


def passes(*num_samples: int) -> list[trainer_pb2.ForwardBackwardRequest]:
    """One call's, of so many samples each."""
    requests = [
        trainer_pb2.ForwardBackwardRequest(num_chunks=len(num_samples)) for _ in num_samples
    ]
    for request, count in zip(requests, num_samples, strict=True):
        for _ in range(count):
            request.samples.add().loss_fn_inputs["target_tokens"].ints.values.append(1)
    return requests


def test_a_failure_names_the_sample_by_its_place_in_the_call(fake):
    def refuse(request: Any) -> None:
        if request.sequence == 3:
            message = "Sample 1: x[0] is bad. The gradient of sample 1 is not finite."
            raise fail(Reason.NON_FINITE_LOSS, message, sample=1, x=0)

    fake.behave = refuse
    session = open_session(fake)
    with pytest.raises(PostTrainingError) as refused:
        submit(session, *passes(3, 2, 4)).result(5)
    assert str(refused.value) == "Sample 6: x[0] is bad. The gradient of sample 6 is not finite."
    assert refused.value.metadata["sample"] == "6"
    assert refused.value.metadata["x"] == "0"
    assert refused.value.metadata["operation"] == "sessions/s/operations/3"


def test_a_failure_that_quotes_another_operation_is_not_renumbered(fake):
    message = "Not run: forward_backward (operation 1) failed (Sample 1: x[0] is bad.)"

    def refuse(request: Any) -> None:
        if request.sequence == 2:
            raise fail(Reason.WINDOW_VOID, message)

    fake.behave = refuse
    with pytest.raises(PostTrainingError, match=r"\(Sample 1: "):
        submit(open_session(fake), *passes(3, 2)).result(5)


def test_warnings_name_samples_by_their_place_in_the_call(fake):
    fake.warnings.update({1: ["Sample 2: shifted."], 2: ["Sample 0: shifted.", "Samples vary."]})
    session = open_session(fake)
    submit(session, *passes(3, 2)).result(5)
    assert session.warnings.take() == ["Sample 2: shifted.", "Sample 3: shifted.", "Samples vary."]


def test_a_submission_that_is_tried_again_is_the_same_bytes(fake):
    session = open_session(fake)
    fake.inject("OptimStep", code=grpc.StatusCode.UNAVAILABLE, times=2)
    submit(session, step()).result(5)
    sent = {request.SerializeToString(deterministic=True) for request in fake.received("OptimStep")}
    assert len(fake.received("OptimStep")) == 3
    assert len(sent) == 1


def test_a_wait_that_loses_its_connection_is_asked_again(fake):
    session = open_session(fake)
    fake.unfinished = {1}
    fake.inject("WaitOperation", code=grpc.StatusCode.UNAVAILABLE, times=2)
    running = submit(session, step())
    until(lambda: len(fake.received("WaitOperation")) == 3)
    fake.unfinished.clear()
    fake.nudge()
    assert running.result(5)[0].optim_step.policy_version == 1


def test_a_failed_operation_raises_its_reason_and_its_name(fake):
    session = open_session(fake)

    def refuse(request: Any) -> None:
        raise fail(Reason.UNKNOWN_LOSS, "no such loss 'x'", loss="x")

    fake.behave = refuse
    with pytest.raises(PostTrainingError, match="no such loss") as failed:
        submit(session, step()).result(5)
    assert failed.value.reason is Reason.UNKNOWN_LOSS
    assert failed.value.metadata == {"loss": "x", "operation": "sessions/s/operations/1"}


def test_of_several_failures_the_first_by_number_is_raised_when_all_have_ended(fake):
    session = open_session(fake)

    def refuse(request: Any) -> None:
        if request.sequence > 1:
            raise fail(Reason.NOT_FINITE, f"bad {request.sequence}")

    fake.behave = refuse
    with pytest.raises(PostTrainingError, match="bad 2"):
        submit(session, step(), step(), step()).result(5)
    assert sequences(fake, "OptimStep") == [1, 2, 3]


@pytest.mark.parametrize("when", ["before", "after"])
def test_failures_seen_are_those_delivered_before_the_call(fake, when):
    session = open_session(fake)
    turn = session.reserve(1)
    if when == "before":
        session.failure_delivered(1)
    request = step()
    following = session.reserve(1)
    session.failure_delivered(1)
    session.number([request], following)
    assert turn.sequences == range(1, 2)
    assert request.failures_seen_through == (1 if when == "before" else 0)


def test_failures_seen_never_fall_and_go_only_where_the_window_is(fake):
    session = open_session(fake)
    session.failure_delivered(4)
    session.failure_delivered(2)
    requests = [
        trainer_pb2.ForwardBackwardRequest(),
        trainer_pb2.CustomForwardBackwardRequest(),
        step(),
    ]
    session.number(requests, Turn(range(1, 4), session.reserve(1).failures_seen))
    assert [r.failures_seen_through for r in requests] == [4, 4, 4]
    others = [trainer_pb2.ForwardRequest(), trainer_pb2.SaveCheckpointRequest()]
    session.number(others, session.reserve(2))
    assert [field.name for r in others for field, _ in r.ListFields()] == [
        "session",
        "sequence",
    ] * 2


def test_cancelling_uses_the_numbers_up_and_the_session_goes_on(fake):
    session = open_session(fake)
    fake.unfinished = {1}
    stuck = submit(session, step())
    until(lambda: fake.received("WaitOperation"))
    stuck.cancel()
    assert submit(session, step()).result(5)
    assert [r.name for r in fake.received("CancelOperation")] == ["sessions/s/operations/1"]


def test_cancelling_before_anything_was_sent_uses_the_numbers_up(fake):
    session = open_session(fake)

    async def never() -> None:
        await asyncio.Event().wait()

    request = step()
    session.number([request], session.reserve(1))
    held = background_loop().start(session.run([request], after=never()))
    held.cancel()
    assert submit(session, step()).result(5)
    assert sequences(fake, "OptimStep") == [2]


def test_a_submission_that_the_server_refuses_outright_uses_its_number_up(fake):
    session = open_session(fake)
    fake.inject("OptimStep", error=fail(Reason.SEQUENCE_REUSED, "other bytes"))
    with pytest.raises(PostTrainingError, match="other bytes"):
        submit(session, step()).result(5)
    assert submit(session, step()).result(5)


def test_a_number_lost_with_the_connection_is_settled_before_the_next_submission(fake):
    session = open_session(fake)
    fake.stop()
    with pytest.raises(ConnectionLostError):
        submit(session, step()).result(10)
    fake.start()
    assert submit(session, step()).result(10)
    assert [r.name for r in fake.received("CancelOperation")] == ["sessions/s/operations/1"]


def test_a_number_that_a_full_server_does_not_take_back_is_settled_later(fake):
    session = open_session(fake)
    full = fail(Reason.RESOURCE_EXHAUSTED, "full")
    fake.inject("OptimStep", error=full, times=1000)
    fake.inject("CancelOperation", error=full, times=1000)
    with pytest.raises(PostTrainingError, match="full"):
        submit(session, step()).result(5)
    until(lambda: session._unsettled)
    fake.faults.clear()
    assert submit(session, step()).result(5)[0].name == "sessions/s/operations/2"


def test_a_number_whose_turn_never_came_is_settled_like_the_one_before_it(fake):
    session = open_session(fake)
    lost = {"code": grpc.StatusCode.UNAVAILABLE, "times": 1000}
    fake.inject("OptimStep", **lost)
    fake.inject("CancelOperation", **lost)
    for _ in range(2):  # The second fails before it is sent, while the first is being settled.
        with pytest.raises(ConnectionLostError):
            submit(session, step()).result(5)
    fake.faults.clear()
    assert submit(session, step()).result(5)[0].name == "sessions/s/operations/3"


def test_a_dropped_operation_still_runs(fake):
    session = open_session(fake)
    submit(session, step())
    gc.collect()
    until(lambda: fake.received("OptimStep"))


def test_many_operations_at_once_all_end(fake):
    session = open_session(fake)
    futures = [submit(session, step()) for _ in range(300)]
    names = [future.result(30)[0].name for future in futures]
    assert names == [f"sessions/s/operations/{i}" for i in range(1, 301)]


def test_heartbeats_go_on_while_the_session_is_kept_and_end_with_it(fake, monkeypatch):
    monkeypatch.setattr(session_module, "HEARTBEAT_INTERVAL_S", 0.02)
    session = open_session(fake)
    until(lambda: len(fake.received("HeartbeatSession")) >= 3)
    del session
    gc.collect()
    time.sleep(0.1)
    count = len(fake.received("HeartbeatSession"))
    time.sleep(0.1)
    assert len(fake.received("HeartbeatSession")) == count


def test_heartbeats_end_when_the_server_does_not_know_the_session(fake, monkeypatch):
    monkeypatch.setattr(session_module, "HEARTBEAT_INTERVAL_S", 0.02)
    gone = fail(Reason.SESSION_NOT_FOUND, "gone")
    fake.inject("HeartbeatSession", error=gone, times=100)
    session = open_session(fake)
    until(lambda: fake.received("HeartbeatSession"))
    time.sleep(0.15)
    assert len(fake.received("HeartbeatSession")) == 1
    assert session.id == "s"
