from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.services.harness import (
    MODEL,
    Caller,
    Clock,
    Running,
    cross_entropy,
    refusal,
    sample,
    serving,
)
from together_post_training.v1 import operations_pb2 as o
from together_post_training.v1 import sessions_pb2 as pb
from together_post_training.v1 import trainer_pb2 as t


def create(**fields: Any) -> pb.CreateSessionRequest:
    given: dict[str, Any] = {"base_model": MODEL} | fields
    return pb.CreateSessionRequest(**given)


def lora(**fields) -> pb.CreateSessionRequest:
    return create(lora=pb.LoraConfig(**fields))


def test_session_shows_the_configuration_it_got(caller: Caller):
    shown = caller.sessions.CreateSession(
        create(user_metadata={"k": "größe"}, display_name="Lauf 1")
    )
    assert shown.state == pb.SESSION_STATE_RUNNING
    assert (shown.lora.rank, shown.lora.alpha) == (32, 64.0)
    assert shown.lora.target_modules == ["default"]
    assert shown.lora.HasField("seed")
    assert shown.user_metadata == {"k": "größe"}
    assert shown.policy_version == 0
    again = caller.sessions.GetSession(pb.GetSessionRequest(id=shown.id))
    again.last_request_time.CopyFrom(shown.last_request_time)
    assert again == shown


@pytest.mark.parametrize(
    "fields", [{}, {"train_mlp": False}, {"target_modules": ["lm_head"], "dropout": 0.25}]
)
def test_configuration_that_is_shown_makes_the_same_session_again(caller: Caller, fields: dict):
    shown = caller.sessions.CreateSession(lora(rank=4, **fields))
    again = caller.sessions.CreateSession(create(lora=shown.lora, optimizer=shown.optimizer))
    assert (again.lora, again.optimizer) == (shown.lora, shown.optimizer)


def test_session_seeds_differ_when_absent_and_an_explicit_0_is_0(caller: Caller):
    """SA-05."""
    drawn = {caller.sessions.CreateSession(create()).lora.seed for _ in range(4)}
    assert len(drawn) == 4
    zeros = [caller.session(lora=pb.LoraConfig(rank=4, seed=0)) for _ in range(2)]
    assert all(run.shown.lora.seed == 0 for run in zeros)
    for run in zeros:
        run.train([3, 4, 9])
    first, second = (run.logprobs([3, 4, 9]) for run in zeros)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("request_", "code", "reason", "says"),
    [
        (create(base_model=""), "NOT_FOUND", "MODEL_NOT_FOUND", MODEL),
        (create(base_model="gpt-9"), "NOT_FOUND", "MODEL_NOT_FOUND", "'gpt-9'"),
        (create(base_model="../../etc"), "NOT_FOUND", "MODEL_NOT_FOUND", MODEL),
        (lora(rank=0), "INVALID_ARGUMENT", "INVALID_ARGUMENT", "rank 0: this model takes 1 to 64"),
        (lora(rank=-4), "INVALID_ARGUMENT", "INVALID_ARGUMENT", "rank -4"),
        (lora(rank=65), "INVALID_ARGUMENT", "INVALID_ARGUMENT", "1 to 64"),
        (lora(alpha=0), "INVALID_ARGUMENT", "INVALID_ARGUMENT", "alpha 0"),
        (lora(alpha=float("nan")), "INVALID_ARGUMENT", "INVALID_ARGUMENT", "alpha nan"),
        (lora(dropout=1.0), "INVALID_ARGUMENT", "INVALID_ARGUMENT", "dropout 1"),
        (
            lora(train_attn=False, train_mlp=False, train_unembed=False),
            "INVALID_ARGUMENT",
            "INVALID_ARGUMENT",
            "train_attn, train_mlp, train_unembed",
        ),
        (create(load_optimizer=True), "INVALID_ARGUMENT", "INVALID_ARGUMENT", "resume_from"),
        (create(id="a/b"), "INVALID_ARGUMENT", "INVALID_NAME", "'a/b'"),
        (create(id="x" * 129), "INVALID_ARGUMENT", "INVALID_NAME", "128"),
        (create(id="a\nb"), "INVALID_ARGUMENT", "INVALID_NAME", "session id"),
        (create(resume_from="http://x"), "INVALID_ARGUMENT", "INVALID_PATH", "sampler_weights"),
        (
            create(resume_from="tinker://a/weights/b", lora=pb.LoraConfig(rank=4)),
            "INVALID_ARGUMENT",
            "INVALID_ARGUMENT",
            "lora",
        ),
        (
            create(user_metadata={"k": "x" * 20_000}),
            "INVALID_ARGUMENT",
            "INVALID_ARGUMENT",
            "16384",
        ),
        (create(display_name="x" * 300), "INVALID_ARGUMENT", "INVALID_ARGUMENT", "256"),
    ],
)
def test_session_is_refused_with_the_value_and_what_is_accepted(
    caller: Caller, request_: pb.CreateSessionRequest, code: str, reason: str, says: str
):
    refused = refusal(caller.sessions.CreateSession, request_)
    assert refused.code == grpc.StatusCode[code]
    assert refused.reason == reason
    assert says in refused.message


def test_session_of_the_same_id_and_bytes_is_the_same_and_of_other_bytes_is_refused(
    caller: Caller,
):
    request = create(id="run:train:0", lora=pb.LoraConfig(rank=4))
    answers: list[pb.Session] = []
    threads = [
        threading.Thread(target=lambda: answers.append(caller.sessions.CreateSession(request)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {a.lora.seed for a in answers} == {answers[0].lora.seed}
    assert len(answers) == 8
    refused = refusal(caller.sessions.CreateSession, create(id="run:train:0", display_name="x"))
    assert refused.reason == "SESSION_EXISTS"
    assert refused.code == grpc.StatusCode.ALREADY_EXISTS


def test_ranks_of_sessions_are_their_own(caller: Caller):
    """LP-19: rank 4 and rank 64 side by side, each as if alone."""

    def alone(rank: int) -> np.ndarray:
        run = caller.session(lora=pb.LoraConfig(rank=rank, seed=1, alpha=32))
        run.train([3, 4, 9, 1])
        return run.logprobs([3, 4, 9, 1])

    small, large = (
        caller.session(lora=pb.LoraConfig(rank=rank, seed=1, alpha=32)) for rank in (4, 64)
    )
    for run in (small, large):
        run.do("ForwardBackward", loss=cross_entropy(), samples=[sample([3, 4, 9, 1])])
    for run in (large, small):
        run.do("OptimStep", adam=t.AdamParams(learning_rate=0.1))
    for run, rank in ((small, 4), (large, 64)):
        np.testing.assert_array_equal(run.logprobs([3, 4, 9, 1]), alone(rank))
        scored = caller.score(run.publish(), [3, 4, 9, 1])[1:]
        np.testing.assert_allclose(scored, run.logprobs([3, 4, 9, 1]), atol=1e-6)


def test_heartbeat_of_a_session_that_is_not_there_is_not_found(caller: Caller):
    """CO-07."""
    refused = refusal(caller.sessions.HeartbeatSession, pb.HeartbeatSessionRequest(id="nobody"))
    assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")
    run = caller.session()
    caller.sessions.HeartbeatSession(pb.HeartbeatSessionRequest(id=run.id))
    caller.sessions.StopSession(pb.StopSessionRequest(id=run.id))
    refused = refusal(caller.sessions.HeartbeatSession, pb.HeartbeatSessionRequest(id=run.id))
    assert refused.reason == "SESSION_STOPPED"


def test_sessions_are_listed_newest_first_in_pages(tmp_path: Path):
    with serving(tmp_path / "store") as running:
        caller = running.caller
        ids = [caller.session(id=f"s{n}").id for n in range(5)]
        got, token = [], ""
        for _ in range(3):
            page = caller.sessions.ListSessions(
                pb.ListSessionsRequest(page_size=2, page_token=token)
            )
            got += [s.id for s in page.sessions]
            token = page.next_page_token
        assert got == ids[::-1]
        assert not token
        for bad in (pb.ListSessionsRequest(page_size=0), pb.ListSessionsRequest(page_token="zz")):
            assert refusal(caller.sessions.ListSessions, bad).reason == "INVALID_ARGUMENT"


def test_stopped_session_frees_its_place_and_leaves_others_alone(watched: Running):
    """CO-09: stopped while its operation runs."""
    assert watched.watched is not None
    caller = watched.caller
    a, b = caller.session(), caller.session()
    watched.watched.gate.clear()
    running = a.submit("ForwardBackward", loss=cross_entropy(), samples=[sample([1, 2])])
    waiting = a.submit("OptimStep", adam=t.AdamParams())
    watched.watched.started.wait(5)
    other = b.submit("ForwardBackward", loss=cross_entropy(), samples=[sample([1, 2])])
    stopped = caller.sessions.StopSession(pb.StopSessionRequest(id=a.id))
    assert stopped.state == pb.SESSION_STATE_STOPPED
    cancelled = caller.wait(waiting)
    assert cancelled.state == o.OPERATION_STATE_CANCELLED
    assert cancelled.error.reason == "SESSION_STOPPED"
    watched.watched.gate.set()
    assert caller.wait(running).state == o.OPERATION_STATE_SUCCEEDED
    assert caller.wait(other).state == o.OPERATION_STATE_SUCCEEDED
    assert caller.sessions.StopSession(pb.StopSessionRequest(id=a.id)).state == stopped.state
    retried = caller.trainer.OptimStep(
        t.OptimStepRequest(session=a.id, sequence=2, adam=t.AdamParams())
    )
    assert retried == cancelled
    refused = refusal(
        caller.trainer.OptimStep,
        t.OptimStepRequest(session=a.id, sequence=3, adam=t.AdamParams()),
    )
    assert refused.reason == "SESSION_STOPPED"
    with pytest.raises(Exception, match="Unknown session"):
        watched.watched.weights(a.id)


def test_missing_numbers_of_a_silent_caller_are_given_up(tmp_path: Path):
    monotonic = Clock(0.0)
    with serving(
        tmp_path / "store", clocks={"monotonic": monotonic}, gap_check_interval_s=0.02
    ) as running:
        caller = running.caller
        run = caller.session()
        run.sequence = 2
        held = run.submit("Forward", loss=cross_entropy(), samples=[sample([1, 2])])
        assert held.state == o.OPERATION_STATE_HELD
        monotonic.now = 59.0
        caller.sessions.HeartbeatSession(pb.HeartbeatSessionRequest(id=run.id))
        monotonic.now = 118.0
        assert caller.wait(held, timeout_s=0.1).state == o.OPERATION_STATE_HELD
        request = o.WaitOperationRequest(name=held.name)
        waiting = caller.operations.WaitOperation.future(request)  # pyright: ignore
        caller.sessions.HeartbeatSession(pb.HeartbeatSessionRequest(id=run.id))
        monotonic.now = 118.0 + 60.0
        assert waiting.result(10).state == o.OPERATION_STATE_SUCCEEDED
        for n in (1, 2):
            lost = caller.operations.GetOperation(
                o.GetOperationRequest(name=f"sessions/{run.id}/operations/{n}")
            )
            assert lost.state == o.OPERATION_STATE_FAILED
            assert lost.error.reason == "SEQUENCE_GAP"


def test_resume_continues_as_if_it_had_never_stopped_with_the_optimizer_and_afresh_without(
    caller: Caller,
):
    """CK-02 and law 13: bit for bit with the optimiser; |delta| = lr at the first step without."""
    first = caller.session()
    for tokens in ([3, 4, 9], [1, 7, 2]):
        first.train(tokens)
    first.save("mid")
    resumed = caller.session(resume_from=first.path("mid"), load_optimizer=True)
    assert resumed.shown.policy_version == 2
    assert resumed.shown.resumed_from == first.path("mid")
    assert resumed.shown.lora == first.shown.lora
    fresh = caller.session(resume_from=first.path("mid"), base_model="")
    assert fresh.shown.policy_version == 0
    np.testing.assert_array_equal(fresh.logprobs([3, 4, 9]), first.logprobs([3, 4, 9]))
    for run in (first, resumed, fresh):
        run.train([5, 6, 7])
    np.testing.assert_array_equal(resumed.logprobs([5, 6, 7]), first.logprobs([5, 6, 7]))
    assert not np.array_equal(fresh.logprobs([5, 6, 7]), first.logprobs([5, 6, 7]))


def test_resume_is_refused_naming_what_is_missing_and_leaves_no_session(caller: Caller):
    """CK-04, CK-05."""
    run = caller.session()
    run.save("w", "INFERENCE")
    path = run.path("w", "sampler_weights")
    refused = refusal(
        caller.sessions.CreateSession,
        pb.CreateSessionRequest(id="half", resume_from=path, load_optimizer=True),
    )
    assert refused.reason == "WRONG_CHECKPOINT_KIND"
    assert "optimizer.safetensors" in refused.message
    assert caller.session(resume_from=path).shown.policy_version == 0
    for bad, reason in (
        (run.path("nothing"), "CHECKPOINT_NOT_FOUND"),
        (f"tinker://{run.id}/optimizer/x", "INVALID_PATH"),
        ("together://x/weights/y", "INVALID_PATH"),
    ):
        refused = refusal(
            caller.sessions.CreateSession, pb.CreateSessionRequest(id="half", resume_from=bad)
        )
        assert refused.reason == reason
    missing = refusal(caller.sessions.GetSession, pb.GetSessionRequest(id="half"))
    assert missing.reason == "SESSION_NOT_FOUND"
