"""Live policies on the torch engine, over the wire."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.resources.catalog import ModelSpec
from tests.services.harness import Caller, Run, cross_entropy, prompt, sample, serving
from together_post_training.v1 import generator_pb2 as pb
from together_post_training.v1 import operations_pb2, sessions_pb2, trainer_pb2
from together_post_training.v1.trainer_pb2 import WeightSyncType

MODEL = "builtin:tiny"
TOKENS = list(b"the quick brown fox jumps over the lazy dog")
# Of the sampler, which decodes token by token, and a score of the whole: both float32.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    store: Path = tmp_path_factory.mktemp("store")
    with serving(store, models=(ModelSpec(name=MODEL, path=MODEL),)) as running:
        yield running.caller


def session(caller: Caller, kind: str) -> Run:
    if kind == "full":
        return caller.session(
            base_model=MODEL, lora=None, full_weights=sessions_pb2.FullWeightsConfig()
        )
    return caller.session(base_model=MODEL, lora=sessions_pb2.LoraConfig(rank=8, seed=3))


def sync(run: Run, how: str) -> operations_pb2.Operation:
    done = run.do("WeightsSync", type=WeightSyncType.Value(f"WEIGHT_SYNC_TYPE_{how}"))
    assert done.state == operations_pb2.OPERATION_STATE_SUCCEEDED, done.error
    return done


def train(run: Run) -> None:
    """Steps that change the model's mind, and leave it sane."""
    for _ in range(3):
        run.submit("ForwardBackward", loss=cross_entropy(), samples=[sample(TOKENS)])
        done = run.do("OptimStep", adam=trainer_pb2.AdamParams(learning_rate=3e-3))
        assert done.state == operations_pb2.OPERATION_STATE_SUCCEEDED, done.error


def start(caller: Caller, snapshot: str, **params: Any) -> Any:
    asked = pb.SampleRequest(
        snapshot=snapshot,
        prompt=prompt(TOKENS[:10]),
        params=pb.SamplingParams(stop=pb.Stop(), **params),
        num_samples=2,
    )
    return caller.generator.Sample.future(asked)  # pyright: ignore


def check(caller: Caller, sequence: pb.SampledSequence) -> None:
    """Each segment's log-probabilities are what its weights give to all the tokens before."""
    tokens = np.frombuffer(sequence.tokens, "<i4").tolist()
    logprobs = np.frombuffer(sequence.logprobs, "<f4")
    parts = list(sequence.policy_segments)
    ends = [part.first_token for part in parts[1:]] + [len(tokens)]
    for part, end in zip(parts, ends, strict=True):
        scores = caller.score(part.snapshot, [*TOKENS[:10], *tokens[:end]])[10:]
        its = slice(part.first_token, end)
        np.testing.assert_allclose(logprobs[its], scores[its], atol=TOLERANCE)
        others = [other for other in parts if other.snapshot != part.snapshot]
        for other in others:
            wrong = caller.score(other.snapshot, [*TOKENS[:10], *tokens[:end]])[10:][its]
            assert np.abs(wrong - logprobs[its]).max() > 100 * TOLERANCE


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_running_calls_go_on_exactly_as_the_new_weights_would(caller: Caller, kind: str):
    run = session(caller, kind)
    sync(run, "SYNCHRONOUS")
    live = caller.generator.OpenSnapshot(pb.OpenSnapshotRequest(live_session=run.id)).name
    call = start(caller, live, max_tokens=800, seed=1)
    train(run)
    done = sync(run, "PIPELINE")
    assert not done.warnings
    version = done.weights_sync.policy_version
    response = call.result(60)
    assert response.policy_version == version == 3
    for sequence in response.sequences:
        assert [part.policy_version for part in sequence.policy_segments] == [0, 3]
        assert 0 < sequence.policy_segments[1].first_token < 800
        check(caller, sequence)
    caller.sessions.StopSession(sessions_pb2.StopSessionRequest(id=run.id))


def test_long_generations_end_while_other_snapshots_come_and_go(caller: Caller):
    """SA-23: as if nothing had happened beside them; what is new can be sampled within 10 s."""
    run = session(caller, "lora")
    train(run)
    first = sync(run, "SYNCHRONOUS").weights_sync.snapshot
    base = caller.open(base_model=MODEL)
    alone = start(caller, first, max_tokens=200, seed=7).result(60)
    generator = caller.generator
    generator.HoldSnapshots(pb.HoldSnapshotsRequest(holder="a", snapshots=[first]))
    calls = [start(caller, first, max_tokens=200, seed=7 + 2 * i) for i in range(8)]
    generator.HoldSnapshots(pb.HoldSnapshotsRequest(holder="a"))
    for _ in range(2):
        train(run)
        later = sync(run, "PIPELINE").weights_sync.snapshot
        assert start(caller, later, max_tokens=2).result(10).sequences
    assert start(caller, base, max_tokens=2).result(10).sequences
    answers = [call.result(60) for call in calls]
    for answer in answers:
        for sequence in answer.sequences:
            assert [part.snapshot for part in sequence.policy_segments] == [first]
            check(caller, sequence)
    tokens = [sequence.tokens for sequence in answers[0].sequences]
    assert tokens == [sequence.tokens for sequence in alone.sequences]
