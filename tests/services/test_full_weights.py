"""Sessions of full weights over the wire, and how many of their snapshots are in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from backend.generator.bigram import BigramGenerator
from backend.resources.residency import MAX_RESIDENT_FULL, Residency
from backend.trainer import bigram
from backend.trainer.base import FullWeights, Weights
from tests.services.harness import MODEL, Caller, Run, Running, refusal, serving, wait_until
from together_post_training.v1 import (
    checkpoints_pb2,
    model_resources_pb2,
    operations_pb2,
    sessions_pb2,
)

TOKENS = [3, 4, 5, 9, 1]
SUCCEEDED = operations_pb2.OPERATION_STATE_SUCCEEDED
FAILED = operations_pb2.OPERATION_STATE_FAILED


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with serving(tmp_path / "store") as running:
        yield running


@pytest.fixture
def own(running: Running) -> Caller:
    return running.caller


def full_session(caller: Caller, **fields) -> Run:
    return caller.session(lora=None, full_weights=sessions_pb2.FullWeightsConfig(), **fields)


def stop(caller: Caller, run: Run) -> None:
    caller.sessions.StopSession(sessions_pb2.StopSessionRequest(id=run.id))


def load(run: Run, path: str, *, optimizer: bool = False) -> operations_pb2.Operation:
    return run.do("LoadCheckpoint", path=path, optimizer=optimizer)


def test_session_shows_that_it_trains_full_weights(own: Caller):
    run = full_session(own)
    got = own.sessions.GetSession(sessions_pb2.GetSessionRequest(id=run.id))
    (listed,) = own.sessions.ListSessions(sessions_pb2.ListSessionsRequest()).sessions
    for shown in (run.shown, got, listed):
        assert shown.HasField("full_weights")
        assert not shown.HasField("lora")
        assert shown.optimizer.HasField("adamw")


def test_second_session_of_full_weights_is_refused_until_the_first_is_stopped(own: Caller):
    first = full_session(own)
    request = sessions_pb2.CreateSessionRequest(base_model=MODEL)
    request.full_weights.SetInParent()
    refused = refusal(own.sessions.CreateSession, request)
    assert refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert first.id in refused.message
    assert refused.metadata["session"] == first.id
    own.session().train(TOKENS)  # LoRA goes on beside it.
    request = model_resources_pb2.ListModelResourcesRequest()

    def holder() -> str:
        (resource,) = own.resources.ListModelResources(request).model_resources
        return resource.full_weights_session

    assert holder() == first.id
    stop(own, first)
    wait_until(lambda: not holder())
    second = full_session(own)
    assert holder() == second.id
    np.testing.assert_array_equal(second.logprobs(TOKENS), own.session().logprobs(TOKENS))


def test_law_14_snapshots_of_full_weights_answer_for_ever_from_memory_or_disk(
    own: Caller, tmp_path: Path
):
    run = full_session(own)
    snapshots, wanted = [], []
    for _ in range(MAX_RESIDENT_FULL + 3):
        run.train(TOKENS)
        snapshots.append(run.publish())
        wanted.append(run.logprobs(TOKENS))
    assert len({lp.tobytes() for lp in wanted}) == len(wanted)
    spilled = list((tmp_path / "store").glob("*/snapshots/*.safetensors"))
    assert len(spilled) >= 3
    stop(own, run)
    for _ in range(2):
        for snapshot, logprobs in zip(snapshots, wanted, strict=True):
            np.testing.assert_allclose(own.score(snapshot, TOKENS)[1:], logprobs, atol=1e-6)


def test_law_13_full_weights_resume_from_a_checkpoint_with_their_optimiser(own: Caller):
    run = full_session(own)
    run.train(TOKENS)
    assert run.save("half").state == SUCCEEDED
    run.train(TOKENS[::-1])
    wanted = run.logprobs(TOKENS)
    stop(own, run)
    resumed = own.session(resume_from=run.path("half"), load_optimizer=True)
    assert resumed.shown.HasField("full_weights")
    assert resumed.shown.policy_version == 1
    resumed.train(TOKENS[::-1])
    np.testing.assert_array_equal(resumed.logprobs(TOKENS), wanted)


def test_checkpoint_of_full_weights_is_loaded_into_a_running_session(own: Caller):
    run = full_session(own)
    run.train(TOKENS)
    wanted = run.logprobs(TOKENS)
    run.save("one")
    run.train(TOKENS)
    done = load(run, run.path("one"))
    assert (done.state, done.load_checkpoint.policy_version) == (SUCCEEDED, 0)
    np.testing.assert_array_equal(run.logprobs(TOKENS), wanted)


def test_checkpoints_of_the_other_kind_are_refused_by_name(own: Caller):
    full, lora = full_session(own), own.session()
    for run in (full, lora):
        run.save("mine")
    for run, other in ((full, lora), (lora, full)):
        done = load(run, other.path("mine"))
        assert done.state == FAILED
        assert done.error.reason == "INCOMPATIBLE_CHECKPOINT"
        assert other.path("mine") in done.error.message
        assert "LoRA" in done.error.message


def test_checkpoint_of_full_weights_is_opened_as_a_snapshot_while_another_session_trains(
    own: Caller,
):
    run = full_session(own)
    run.train(TOKENS)
    wanted = run.logprobs(TOKENS)
    for kind, folder in (("TRAINING", "weights"), ("INFERENCE", "sampler_weights")):
        assert run.save("one", kind).state == SUCCEEDED
        snapshot = own.open(path=run.path("one", folder))
        np.testing.assert_allclose(own.score(snapshot, TOKENS)[1:], wanted, atol=1e-6)
    run.train(TOKENS)
    np.testing.assert_allclose(own.score(snapshot, TOKENS)[1:], wanted, atol=1e-6)


def test_checkpoint_of_full_weights_shows_what_it_is_and_is_downloaded(own: Caller):
    run = full_session(own)
    run.save("one")
    path = run.path("one")
    shown = own.checkpoints.GetCheckpoint(checkpoints_pb2.GetCheckpointRequest(path=path))
    assert shown.HasField("full_weights")
    assert not shown.HasField("lora")
    assert shown.has_optimizer
    pieces = own.checkpoints.DownloadCheckpoint(
        checkpoints_pb2.DownloadCheckpointRequest(path=path)
    )
    names = list(dict.fromkeys(piece.filename for piece in pieces))
    assert names == ["model.safetensors", "optimizer.safetensors", "manifest.json"]


class CountingGenerator(BigramGenerator):
    """Knows how many snapshots it holds, and held at most."""

    def __init__(self) -> None:
        super().__init__(bigram.load(MODEL))
        self.held: set[str] = set()
        self.most = 0

    async def add_snapshot(self, snapshot: str, weights: Weights) -> None:
        await super().add_snapshot(snapshot, weights)
        self.held.add(snapshot)
        self.most = max(self.most, len(self.held))

    def drop_snapshot(self, snapshot: str) -> None:
        super().drop_snapshot(snapshot)
        self.held.discard(snapshot)


def weights(seed: int) -> FullWeights:
    head = np.random.default_rng(seed).normal(size=(16, 16)).astype(np.float32)
    return FullWeights(tensors={bigram.HEAD: head})


def test_full_weights_in_memory_stay_few_however_many_are_published_and_used_at_once(
    tmp_path: Path,
):
    generator = CountingGenerator()
    num_uses = 0

    async def scenario() -> None:
        nonlocal num_uses
        residency = Residency(generator, tmp_path, max_resident=16)
        names = [f"snapshot {i}" for i in range(7)]
        for i, name in enumerate(names):
            await residency.add(name, weights(i))

        async def use(name: str) -> None:
            nonlocal num_uses
            async with residency.use(name) as engine_name:
                assert engine_name in generator.held
                await asyncio.sleep(0.002)
                num_uses += 1

        await asyncio.gather(*(use(name) for name in names * 4))

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert num_uses == 28
    # One more while an older one leaves.
    assert generator.most <= MAX_RESIDENT_FULL + 1


def test_full_weights_wait_until_others_are_not_in_use_and_those_cancelled_do_not_block(
    tmp_path: Path,
):
    async def scenario() -> None:
        residency = Residency(CountingGenerator(), tmp_path, max_resident=16)
        for i in range(4):
            await residency.add(str(i), weights(i))
        entered: list[str] = []

        async def use(name: str, until: asyncio.Event) -> None:
            async with residency.use(name):
                entered.append(name)
                await until.wait()

        end, never = asyncio.Event(), asyncio.Event()
        first = [asyncio.create_task(use(name, end)) for name in ("2", "3")]
        await asyncio.sleep(0.1)
        late = [asyncio.create_task(use(name, never)) for name in ("0", "1")]
        await asyncio.sleep(0.05)
        assert sorted(entered) == ["2", "3"]
        late[0].cancel()
        end.set()
        await asyncio.gather(*first)
        while "1" not in entered:
            await asyncio.sleep(0.01)
        assert "0" not in entered
        late[1].cancel()

    asyncio.run(asyncio.wait_for(scenario(), 20))
