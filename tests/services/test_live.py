"""The three ways of publishing, and calls that follow a live policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.services.gated import GatedGenerator, serving_gated
from tests.services.harness import MODEL, Caller, Run, Running, prompt, refusal, wait_until
from together_post_training.errors import Reason, fail
from together_post_training.v1 import generator_pb2 as pb
from together_post_training.v1 import operations_pb2, sessions_pb2
from together_post_training.v1.trainer_pb2 import WeightSyncType

TOKENS = [3, 4, 9, 1]
SYNCHRONOUS, BACKGROUND, PIPELINE = "SYNCHRONOUS", "BACKGROUND_PUBLISH", "PIPELINE"
Gated = tuple[Running, GatedGenerator]


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Gated]:
    with serving_gated(tmp_path / "store") as running:
        yield running


def sync(run: Run, how: str) -> operations_pb2.WeightsSyncResult:
    done = run.do("WeightsSync", type=WeightSyncType.Value(f"WEIGHT_SYNC_TYPE_{how}"))
    assert done.state == operations_pb2.OPERATION_STATE_SUCCEEDED, done.error
    return done.weights_sync


def submit(run: Run, how: str) -> operations_pb2.Operation:
    return run.submit("WeightsSync", type=WeightSyncType.Value(f"WEIGHT_SYNC_TYPE_{how}"))


def live(caller: Caller, run: Run) -> pb.Snapshot:
    return caller.generator.OpenSnapshot(pb.OpenSnapshotRequest(live_session=run.id))


def request(snapshot: str, max_tokens: int = 1, **fields: Any) -> pb.SampleRequest:
    params = pb.SamplingParams(max_tokens=max_tokens, seed=5, stop=pb.Stop())
    return pb.SampleRequest(snapshot=snapshot, prompt=prompt([3]), params=params, **fields)


def start(caller: Caller, snapshot: str, max_tokens: int, **fields: Any) -> grpc.Future:
    return caller.generator.Sample.future(request(snapshot, max_tokens, **fields))  # pyright: ignore


def segments(sequence: pb.SampledSequence) -> list[tuple[int, int, str]]:
    return [(s.policy_version, s.first_token, s.snapshot) for s in sequence.policy_segments]


def logprobs(sequence: pb.SampledSequence) -> np.ndarray:
    return np.frombuffer(sequence.logprobs, "<f4")


def expected_logprobs(caller: Caller, sequence: pb.SampledSequence) -> np.ndarray:
    """What each token's own weights give it: the bigram looks at the token before it only."""
    tokens = [3, *np.frombuffer(sequence.tokens, "<i4").tolist()]
    parts = list(sequence.policy_segments)
    ends = [part.first_token for part in parts[1:]] + [len(tokens) - 1]
    scores = [
        caller.score(part.snapshot, tokens)[1:][part.first_token : end]
        for part, end in zip(parts, ends, strict=True)
    ]
    return np.concatenate(scores)


def test_first_sample_after_each_kind_of_sync_is_of_the_new_version(gated: Gated):
    """SYNCHRONOUS and PIPELINE end when it can be sampled; BACKGROUND_PUBLISH sooner, and the first sample waits."""
    running, generator = gated
    caller, run = running.caller, running.caller.session()
    sync(run, SYNCHRONOUS)
    following = live(caller, run)
    assert (following.name, following.is_live) == (f"snapshots/live:{run.id}", True)
    assert following.policy_version == 0
    for version, how in enumerate((SYNCHRONOUS, BACKGROUND, PIPELINE), start=1):
        run.train(TOKENS)
        generator.may_add.clear()
        operation = submit(run, how)
        if how == BACKGROUND:
            published = caller.wait(operation)
            first = start(caller, following.name, 1)
            assert published.weights_sync.is_pending
            assert not first.done()
            generator.let_add()
        else:
            still = caller.wait(operation, timeout_s=0.1)
            assert still.state == operations_pb2.OPERATION_STATE_RUNNING
            before = caller.generator.Sample(request(following.name))
            assert before.policy_version == version - 1
            generator.let_add()
            published = caller.wait(operation)
            assert not published.weights_sync.is_pending
            first = start(caller, following.name, 1)
        answered = first.result(10)
        assert published.weights_sync.policy_version == version
        assert answered.policy_version == version
        (sequence,) = answered.sequences
        assert segments(sequence) == [(version, 0, published.weights_sync.snapshot)]
        shown = caller.generator.GetSnapshot(pb.GetSnapshotRequest(name=following.name))
        assert (shown.policy_version, shown.session, shown.is_live) == (version, run.id, True)


def test_training_goes_on_while_weights_are_published_in_the_background(gated: Gated):
    running, generator = gated
    run = running.caller.session()
    generator.may_add.clear()
    published = sync(run, BACKGROUND)
    expected = run.logprobs(TOKENS)
    run.train(TOKENS)
    waiting = running.caller.generator.ComputeLogprobs.future(  # pyright: ignore
        pb.ComputeLogprobsRequest(snapshot=published.snapshot, prompt=prompt(TOKENS))
    )
    assert not waiting.done()
    generator.let_add()
    scores = np.frombuffer(waiting.result(10).logprobs.raw, "<f4")
    np.testing.assert_allclose(scores[1:], expected, atol=1e-6)


def test_next_sync_waits_for_the_one_in_the_background(gated: Gated):
    """Versions come in order, and one copy of the weights is on its way at a time."""
    running, generator = gated
    run = running.caller.session()
    generator.may_add.clear()
    sync(run, BACKGROUND)
    run.train(TOKENS)
    later = submit(run, SYNCHRONOUS)
    assert running.caller.wait(later, 0.1).state == operations_pb2.OPERATION_STATE_RUNNING
    generator.let_add()
    assert running.caller.wait(later).weights_sync.policy_version == 1
    versions = [name.partition("#")[0].rpartition(":")[2] for name in generator.added]
    assert versions == ["1", "4"]


def test_failed_background_publish_is_told_to_samples_and_tried_again_by_the_next(
    gated: Gated, caplog: pytest.LogCaptureFixture
):
    running, generator = gated
    caller, run = running.caller, running.caller.session()
    sync(run, SYNCHRONOUS)
    generator.may_add.clear()
    generator.raises = fail(Reason.OUT_OF_MEMORY, "No room for these weights.")
    run.train(TOKENS)
    published = sync(run, BACKGROUND)
    names = [published.snapshot, live(caller, run).name]
    calls = [start(caller, name, 1) for name in names]
    generator.let_add()
    for call in calls:
        assert "No room" in str(call.exception(10))
    assert "No room" in caplog.text
    for name in names:
        assert refusal(caller.generator.Sample, request(name)).reason == "OUT_OF_MEMORY"
    generator.raises = None
    for name in names:
        assert caller.generator.Sample(request(name)).policy_version == 1


def test_failed_synchronous_publish_leaves_nothing_and_the_next_one_works(gated: Gated):
    running, generator = gated
    caller, run = running.caller, running.caller.session()
    first = sync(run, SYNCHRONOUS)
    generator.raises = fail(Reason.OUT_OF_MEMORY, "No room for these weights.")
    run.train(TOKENS)
    failed = run.do("WeightsSync")
    assert failed.error.reason == "OUT_OF_MEMORY"
    generator.raises = None
    name = f"snapshots/session:{run.id}:{run.sequence}"
    refused = refusal(caller.generator.Sample, request(name))
    assert refused.reason == "SNAPSHOT_NOT_FOUND"
    assert live(caller, run).policy_version == 0
    assert caller.generator.Sample(request(first.snapshot)).policy_version == 0
    assert sync(run, SYNCHRONOUS).policy_version == 1
    assert live(caller, run).policy_version == 1


@pytest.mark.parametrize("how", [SYNCHRONOUS, BACKGROUND])
def test_running_calls_end_under_the_weights_that_they_began_with(gated: Gated, how: str):
    running, generator = gated
    caller, run = running.caller, running.caller.session()
    first = sync(run, SYNCHRONOUS)
    generator.steps.is_open = False
    call = start(caller, live(caller, run).name, 6)
    generator.steps.allow(3)
    run.train(TOKENS)
    assert sync(run, how).policy_version == 1
    generator.steps.open()
    (sequence,) = call.result(10).sequences
    assert segments(sequence) == [(0, 0, first.snapshot)]
    np.testing.assert_allclose(logprobs(sequence), expected_logprobs(caller, sequence), atol=1e-6)


def test_pipeline_moves_running_calls_and_each_sequence_tells_its_segments(gated: Gated):
    """A call that began two versions ago moves as well; pinned calls and other sessions' stay."""
    running, generator = gated
    caller, run, other = running.caller, running.caller.session(), running.caller.session()
    names = [sync(run, SYNCHRONOUS).snapshot]
    sync(other, SYNCHRONOUS)
    following, others = live(caller, run).name, live(caller, other).name
    generator.steps.is_open = False

    def begin(snapshot: str, num_steps: int) -> grpc.Future:
        """Of 9 tokens, of which it has so many."""
        call = start(caller, snapshot, 9)
        wait_until(lambda: generator.steps.num_waiting == len(calls) + 1)
        return call

    calls: list[grpc.Future] = []
    for snapshot in (following, names[0], others):
        calls.append(begin(snapshot, 0))
    # One step each: they wait in turn.
    generator.steps.allow(3 * 2)
    wait_until(lambda: generator.steps.num_waiting == 3)
    run.train(TOKENS)
    names.append(sync(run, SYNCHRONOUS).snapshot)
    calls.append(begin(following, 0))
    generator.steps.allow(4)
    run.train(TOKENS)
    names.append(sync(run, PIPELINE).snapshot)
    generator.steps.allow(4)
    run.train(TOKENS)
    names.append(sync(run, PIPELINE).snapshot)
    generator.steps.open()
    answers = [call.result(10) for call in calls]
    told = [segments(answer.sequences[0]) for answer in answers]
    versions = [[version for version, _, _ in its] for its in told]
    assert versions == [[0, 2, 3], [0], [0], [1, 2, 3]]
    assert [answer.policy_version for answer in answers] == [3, 0, 0, 3]
    for its in told:
        firsts = [first for _, first, _ in its]
        assert firsts[0] == 0
        assert firsts == sorted(set(firsts))
    assert [name for _, _, name in told[0]] == [names[0], names[2], names[3]]
    for answer in answers:
        (sequence,) = answer.sequences
        wanted = expected_logprobs(caller, sequence)
        np.testing.assert_allclose(logprobs(sequence), wanted, atol=1e-6)
    # New weights give other numbers: the check above tells them apart.
    tokens = [3, *np.frombuffer(answers[0].sequences[0].tokens, "<i4").tolist()]
    assert not np.allclose(caller.score(names[0], tokens)[1:], logprobs(answers[0].sequences[0]))


def test_generator_that_cannot_move_calls_says_so_once_and_they_end_as_they_began(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
):
    def move(old: str, new: str) -> None:
        raise fail(Reason.UNIMPLEMENTED, "Calls cannot move.")

    running, generator = gated
    monkeypatch.setattr(generator, "move", move)
    caller, run = running.caller, running.caller.session()
    first = sync(run, PIPELINE)
    generator.steps.is_open = False
    call = start(caller, live(caller, run).name, 6)
    wait_until(lambda: generator.steps.num_waiting == 1)
    warnings = []
    for _ in range(2):
        run.train(TOKENS)
        done = caller.wait(submit(run, PIPELINE))
        assert done.state == operations_pb2.OPERATION_STATE_SUCCEEDED, done.error
        warnings.extend(done.warnings)
    (warning,) = warnings
    assert "weights that they began with" in warning
    generator.steps.open()
    assert segments(call.result(10).sequences[0]) == [(0, 0, first.snapshot)]
    assert caller.generator.Sample(request(live(caller, run).name)).policy_version == 2


def test_each_sequence_of_a_call_has_segments_of_its_own(gated: Gated):
    """One has ended before the weights change, the other spans the change."""
    running, generator = gated
    caller, run = running.caller, running.caller.session()
    first = sync(run, SYNCHRONOUS)
    generator.steps.is_open = False
    params = pb.SamplingParams(max_tokens=40, seed=1, temperature=5.0, stop=pb.Stop(tokens=[7, 8]))
    call = caller.generator.Sample.future(  # pyright: ignore
        pb.SampleRequest(
            snapshot=live(caller, run).name, prompt=prompt([3]), params=params, num_samples=8
        )
    )
    wait_until(lambda: generator.steps.num_waiting == 1)
    generator.steps.allow(8)
    run.train(TOKENS)
    second = sync(run, PIPELINE)
    generator.steps.open()
    sequences = call.result(10).sequences
    ended = [s for s in sequences if len(s.tokens) // 4 <= 8]
    spanning = [s for s in sequences if len(s.tokens) // 4 > 8]
    assert ended
    assert spanning
    for sequence in ended:
        assert segments(sequence) == [(0, 0, first.snapshot)]
    for sequence in spanning:
        assert segments(sequence) == [(0, 0, first.snapshot), (1, 8, second.snapshot)]
        np.testing.assert_allclose(
            logprobs(sequence), expected_logprobs(caller, sequence), atol=1e-6
        )


def test_both_weights_of_a_call_that_moved_stay_until_it_ends(tmp_path: Path):
    """With room for one more only, and others published meanwhile."""
    with serving_gated(tmp_path / "store", max_resident_snapshots=1) as (running, generator):
        caller, run = running.caller, running.caller.session()
        old = sync(run, SYNCHRONOUS)
        generator.steps.is_open = False
        call = start(caller, live(caller, run).name, 6)
        wait_until(lambda: generator.steps.num_waiting == 1)
        generator.steps.allow(2)
        new = sync(run, PIPELINE)
        for _ in range(4):
            run.train(TOKENS)
            sync(run, SYNCHRONOUS)
        here = {name.partition("#")[0] for name in set(generator.added) - set(generator.dropped)}
        assert {old.snapshot, new.snapshot} <= here
        generator.steps.open()
        (sequence,) = call.result(10).sequences
        assert [s.snapshot for s in sequence.policy_segments] == [old.snapshot, new.snapshot]
        wait_until(lambda: len(generator.added) - len(generator.dropped) <= 1)


def test_pinned_sequences_have_one_segment(gated: Gated):
    caller, run = gated[0].caller, gated[0].caller.session()
    run.train(TOKENS)
    published = sync(run, PIPELINE)
    run.save("a", "INFERENCE")
    opened = caller.open(path=run.path("a", "sampler_weights"))
    base = caller.open(base_model=MODEL)
    for name, version in ((published.snapshot, 1), (opened, 1), (base, 0)):
        response = caller.generator.Sample(request(name, num_samples=2))
        assert response.policy_version == version
        for sequence in response.sequences:
            assert segments(sequence) == [(version, 0, name)]


def test_score_of_a_live_policy_is_of_its_newest_version(gated: Gated):
    caller, run = gated[0].caller, gated[0].caller.session()
    sync(run, SYNCHRONOUS)
    following = live(caller, run).name
    for _ in range(2):
        run.train(TOKENS)
        sync(run, SYNCHRONOUS)
        np.testing.assert_allclose(
            caller.score(following, TOKENS)[1:], run.logprobs(TOKENS), atol=1e-6
        )


def test_live_policy_without_a_publish_or_a_session_is_refused_with_what_to_do(gated: Gated):
    caller, run = gated[0].caller, gated[0].caller.session()
    for call, asked in (
        (caller.generator.OpenSnapshot, pb.OpenSnapshotRequest(live_session=run.id)),
        (caller.generator.Sample, request(f"snapshots/live:{run.id}")),
        (caller.generator.GetSnapshot, pb.GetSnapshotRequest(name=f"snapshots/live:{run.id}")),
    ):
        refused = refusal(call, asked)
        assert refused.reason == "SNAPSHOT_NOT_FOUND"
        assert "WeightsSync" in refused.message
        assert run.id in refused.message
    caller.sessions.StopSession(sessions_pb2.StopSessionRequest(id=run.id))
    for session, reason in ((run.id, "SESSION_STOPPED"), ("nobody", "SESSION_NOT_FOUND")):
        asked = pb.OpenSnapshotRequest(live_session=session)
        assert refusal(caller.generator.OpenSnapshot, asked).reason == reason


def test_live_policy_of_a_stopped_session_goes_on_with_its_last_version(gated: Gated):
    caller, run = gated[0].caller, gated[0].caller.session()
    run.train(TOKENS)
    sync(run, PIPELINE)
    following = live(caller, run).name
    caller.sessions.StopSession(sessions_pb2.StopSessionRequest(id=run.id))
    assert caller.generator.Sample(request(following)).policy_version == 1
