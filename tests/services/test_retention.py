"""What nobody holds goes: from memory, from disk and from the journal. What somebody holds stays."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.services.gated import GatedGenerator, serving_gated
from tests.services.harness import (
    MODEL,
    Caller,
    Clock,
    Run,
    Running,
    on_loop,
    prompt,
    refusal,
    serving,
    wait_until,
)
from together_post_training.v1 import checkpoints_pb2, sessions_pb2
from together_post_training.v1 import generator_pb2 as pb
from together_post_training.v1.trainer_pb2 import WeightSyncType

TOKENS = [3, 4, 9, 1]
LEASE_S, RETENTION_S = 100.0, 1000.0


@dataclass(slots=True, kw_only=True)
class Kept:
    """A server whose clock the test moves, and which looks at its snapshots when the test says so."""

    running: Running
    generator: GatedGenerator
    clock: Clock
    store: Path

    @property
    def caller(self) -> Caller:
        return self.running.caller

    def pass_(self, seconds: float) -> None:
        self.clock.now += seconds
        on_loop(self.running.server._snapshots.sweep())

    def hold(self, holder: str, *names: str) -> list[str]:
        request = pb.HoldSnapshotsRequest(holder=holder, snapshots=names)
        response = self.caller.generator.HoldSnapshots(request)
        assert response.lease_s == LEASE_S
        return list(response.missing)

    def exists(self, name: str) -> bool:
        """Asks without using it."""
        try:
            self.caller.generator.GetSnapshot(pb.GetSnapshotRequest(name=name))
        except grpc.RpcError:
            return False
        return True

    def here(self) -> set[str]:
        """Which snapshots are in the generator."""
        engine_names = set(self.generator.added) - set(self.generator.dropped)
        return {name.partition("#")[0] for name in engine_names}

    def files(self) -> list[Path]:
        return list(self.store.glob("*/snapshots/*"))

    def recorded(self) -> set[str]:
        with closing(sqlite3.connect(self.store / "server" / "journal.sqlite3")) as database:
            return {name for (name,) in database.execute("SELECT name FROM snapshots")}


@contextmanager
def keeping(store: Path, **config: Any) -> Iterator[Kept]:
    clock = Clock(5000.0)
    settings = {
        "snapshot_lease_s": LEASE_S,
        "snapshot_retention_s": RETENTION_S,
        "snapshot_sweep_interval_s": 3600.0,
        "clocks": {"monotonic": clock},
    }
    with serving_gated(store, **settings | config) as (running, generator):
        yield Kept(running=running, generator=generator, clock=clock, store=store)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    with keeping(tmp_path / "store", max_resident_snapshots=1) as made:
        yield made


def sync(run: Run, how: str = "SYNCHRONOUS") -> str:
    value = WeightSyncType.Value(f"WEIGHT_SYNC_TYPE_{how}")
    return run.do("WeightsSync", type=value).weights_sync.snapshot


def superseded(run: Run, how: str = "SYNCHRONOUS") -> str:
    """A snapshot that is not its session's newest any more."""
    name = sync(run, how)
    run.train(TOKENS)
    sync(run, how)
    return name


def why_gone(caller: Caller, name: str) -> str:
    refused = refusal(caller.generator.Sample, pb.SampleRequest(snapshot=name, prompt=prompt([3])))
    assert refused.reason == "SNAPSHOT_NOT_FOUND"
    return refused.message


def stop(caller: Caller, run: Run) -> None:
    caller.sessions.StopSession(sessions_pb2.StopSessionRequest(id=run.id))


def test_snapshot_is_kept_as_long_as_it_is_held_and_goes_when_it_was_let_go(kept: Kept):
    run = kept.caller.session()
    name = superseded(run)
    expected = kept.caller.score(name, TOKENS)
    for _ in range(50):
        assert kept.hold("client", name) == []
        kept.pass_(LEASE_S * 0.9)
    np.testing.assert_array_equal(kept.caller.score(name, TOKENS), expected)
    kept.hold("client")
    kept.pass_(LEASE_S * 0.9)
    np.testing.assert_array_equal(kept.caller.score(name, TOKENS), expected)
    kept.pass_(LEASE_S * 0.9)
    assert kept.exists(name), "it was used meanwhile"
    kept.pass_(LEASE_S * 0.2)
    assert kept.hold("client", name) == [name]
    message = why_gone(kept.caller, name)
    assert "its clients let it go" in message
    assert "100 s" in message
    assert "Publish its session's weights again" in message


def test_snapshot_goes_from_memory_disk_and_journal(kept: Kept):
    run = kept.caller.session()
    names = [superseded(run) for _ in range(4)]
    newest = f"snapshots/session:{run.id}:{run.sequence}"
    wait_until(lambda: len(kept.here()) == 1)
    assert len(kept.files()) >= 7
    kept.pass_(RETENTION_S + 1)
    assert not any(kept.exists(name) for name in names)
    assert kept.here() == {newest}
    assert kept.files() == []
    assert kept.recorded() == {newest}
    np.testing.assert_allclose(
        kept.caller.score(newest, TOKENS)[1:], run.logprobs(TOKENS), atol=1e-6
    )


def test_snapshot_that_nobody_ever_held_is_kept_for_the_retention(kept: Kept):
    name = superseded(kept.caller.session())
    kept.pass_(RETENTION_S * 0.9)
    kept.caller.score(name, TOKENS)
    kept.pass_(RETENTION_S * 0.9)
    assert kept.exists(name)
    kept.pass_(RETENTION_S * 0.2)
    assert "nobody held it" in why_gone(kept.caller, name)


def test_snapshot_of_a_silent_holder_is_kept_for_the_retention(kept: Kept):
    """It may be a laptop that was closed; others may have let it go."""
    name = superseded(kept.caller.session())
    for holder in ("asleep", "awake"):
        kept.hold(holder, name)
    kept.hold("awake")
    kept.pass_(LEASE_S + 1)
    kept.pass_(RETENTION_S * 0.9)
    assert kept.hold("asleep", name) == []
    kept.pass_(LEASE_S + 1)
    kept.pass_(RETENTION_S + 1)
    assert kept.hold("asleep", name) == [name]


def test_newest_snapshot_is_kept_as_long_as_its_session_runs(kept: Kept):
    run = kept.caller.session()
    name = sync(run)
    kept.hold("client", name)
    kept.hold("client")
    kept.pass_(10 * RETENTION_S)
    kept.caller.score(name, TOKENS)
    stop(kept.caller, run)
    kept.pass_(LEASE_S * 0.9)
    kept.caller.score(name, TOKENS)
    kept.pass_(LEASE_S * 1.1)
    assert "let it go" in why_gone(kept.caller, name)
    assert "let it go" in why_gone(kept.caller, f"snapshots/live:{run.id}")


def test_sample_that_runs_or_waits_keeps_its_snapshot(tmp_path: Path):
    with keeping(tmp_path / "store") as kept:
        name = superseded(kept.caller.session())
        kept.generator.steps.is_open = False
        params = pb.SamplingParams(max_tokens=2)
        request = pb.SampleRequest(snapshot=name, prompt=prompt([3]), params=params)
        calls = [kept.caller.generator.Sample.future(request) for _ in range(3)]  # pyright: ignore
        wait_until(lambda: kept.generator.steps.num_waiting == 3)
        kept.pass_(RETENTION_S + 1)
        kept.generator.steps.open()
        assert all(len(call.result(10).sequences) == 1 for call in calls)
        kept.pass_(RETENTION_S + 1)
        assert not kept.exists(name)


def test_sample_that_waits_for_its_turn_keeps_its_snapshot(tmp_path: Path):
    with keeping(tmp_path / "store") as kept:
        name = superseded(kept.caller.session())
        turns = on_loop(kept.running.server._snapshots.resource(name)).turns
        turns._max_running = 1
        kept.generator.steps.is_open = False
        calls = []
        for num_waiting, snapshot in enumerate((kept.caller.open(base_model=MODEL), name)):
            request = pb.SampleRequest(
                snapshot=snapshot, prompt=prompt([3]), params=pb.SamplingParams(max_tokens=2)
            )
            calls.append(kept.caller.generator.Sample.future(request))  # pyright: ignore
            wait_until(lambda: kept.generator.steps.num_waiting == 1)
            wait_until(lambda wanted=num_waiting: turns.num_waiting == wanted)
        kept.pass_(RETENTION_S + 1)
        kept.generator.steps.open()
        assert all(len(call.result(10).sequences) == 1 for call in calls)


def test_what_followers_left_behind_goes_soon_unless_it_is_held_by_name(kept: Kept):
    """A loop of PIPELINE syncs holds the live policy only; nobody ever names its older versions."""
    run = kept.caller.session()
    live = f"snapshots/live:{run.id}"
    names = [sync(run, "PIPELINE")]
    for _ in range(5):
        assert kept.hold("client", live, names[0]) == []
        run.train(TOKENS)
        names.append(sync(run, "PIPELINE"))
        kept.pass_(LEASE_S * 0.4)
    kept.hold("client", live, names[0])
    kept.pass_(LEASE_S * 0.9)
    assert [kept.exists(name) for name in names] == [True, False, False, False, False, True]
    # Held, and the newest of a session that runs.
    kept.hold("client", live, names[0])
    kept.pass_(LEASE_S * 0.9)
    stop(kept.caller, run)
    for _ in range(30):
        kept.hold("client", live)
        kept.pass_(LEASE_S * 0.9)
    assert [kept.exists(name) for name in (names[0], names[-1], live)] == [False, True, True]
    kept.hold("client")
    kept.pass_(LEASE_S + 1)
    assert not kept.exists(live)
    assert not kept.exists(names[-1])
    assert kept.files() == []
    assert kept.here() == set()


def test_call_that_ended_keeps_nothing_that_is_published_later(kept: Kept):
    """Neither one that was answered nor one that hung up follows any more."""
    caller, run = kept.caller, kept.caller.session()
    sync(run, "PIPELINE")
    following = caller.generator.OpenSnapshot(pb.OpenSnapshotRequest(live_session=run.id)).name
    params = pb.SamplingParams(max_tokens=9, stop=pb.Stop())
    request = pb.SampleRequest(snapshot=following, prompt=prompt([3]), params=params)
    caller.generator.Sample(request)
    kept.generator.steps.is_open = False
    hangs_up = caller.generator.Sample.future(request)  # pyright: ignore
    wait_until(lambda: kept.generator.steps.num_waiting == 1)
    hangs_up.cancel()
    wait_until(lambda: kept.generator.steps.num_waiting == 0)
    run.train(TOKENS)
    later = sync(run, "PIPELINE")
    stop(caller, run)
    kept.pass_(RETENTION_S + 1)
    assert not kept.exists(later)
    assert kept.here() == set()


def test_publish_that_cannot_be_recorded_leaves_nothing(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
):
    async def no_disk(_: pb.Snapshot) -> None:
        raise OSError("no space left")

    caller, run = kept.caller, kept.caller.session()
    monkeypatch.setattr(kept.running.server._snapshots._records, "put", no_disk)
    assert run.do("WeightsSync").error.reason
    assert len(kept.generator.added) == 1
    assert kept.here() == set()
    monkeypatch.undo()
    assert caller.score(sync(run), TOKENS).size == len(TOKENS)


def test_snapshot_of_a_checkpoint_goes_from_memory_and_comes_back_by_its_name(kept: Kept):
    run = kept.caller.session()
    run.train(TOKENS)
    run.save("a", "INFERENCE")
    path = run.path("a", "sampler_weights")
    name = kept.caller.open(path=path)
    expected = kept.caller.score(name, TOKENS)
    kept.pass_(RETENTION_S + 1)
    assert kept.here() == set()
    np.testing.assert_array_equal(kept.caller.score(name, TOKENS), expected)
    kept.pass_(RETENTION_S + 1)
    assert kept.caller.open(path=path) == name
    assert kept.here() == {name}


def test_held_snapshot_of_a_deleted_checkpoint_answers_until_it_is_let_go(kept: Kept):
    run = kept.caller.session()
    run.train(TOKENS)
    run.save("a", "INFERENCE")
    path = run.path("a", "sampler_weights")
    name = kept.caller.open(path=path)
    expected = kept.caller.score(name, TOKENS)
    kept.caller.checkpoints.DeleteCheckpoint(checkpoints_pb2.DeleteCheckpointRequest(path=path))
    for _ in range(20):
        kept.hold("client", name)
        kept.pass_(LEASE_S * 0.9)
    np.testing.assert_array_equal(kept.caller.score(name, TOKENS), expected)
    kept.hold("client")
    kept.pass_(LEASE_S + 1)
    assert "was deleted or overwritten" in why_gone(kept.caller, name)
    assert name not in kept.recorded()


def test_base_models_are_always_there(kept: Kept):
    name = kept.caller.open(base_model=MODEL)
    kept.hold("client", name)
    kept.hold("client")
    kept.pass_(10 * RETENTION_S)
    assert len(kept.caller.score(name, TOKENS)) == 4


def test_holders_say_who_they_are_and_hear_what_is_missing(kept: Kept):
    name = superseded(kept.caller.session())
    missing = ["snapshots/none", "snapshots/live:none"]
    assert kept.hold("a:B-1_2", name, *missing) == sorted(missing)
    for holder in ("", "a b", "x" * 129):
        request = pb.HoldSnapshotsRequest(holder=holder)
        assert refusal(kept.caller.generator.HoldSnapshots, request).reason == "INVALID_NAME"


def test_background_publish_that_failed_for_good_goes_like_any_other(kept: Kept):
    run = kept.caller.session()
    sync(run)
    kept.generator.raises = RuntimeError("the generator is away")
    name = sync(run, "BACKGROUND_PUBLISH")
    wait_until(lambda: kept.exists(name))
    kept.generator.raises = None
    kept.pass_(1)
    sync(run)
    kept.pass_(RETENTION_S + 1)
    assert not kept.exists(name)
    assert len(kept.here()) == 1


def test_server_looks_by_itself(tmp_path: Path):
    with keeping(tmp_path / "store", snapshot_sweep_interval_s=0.02) as kept:
        name = superseded(kept.caller.session())
        kept.clock.now += RETENTION_S + 1
        wait_until(lambda: not kept.exists(name))


def test_files_of_spilled_snapshots_end_with_their_server(tmp_path: Path):
    store = tmp_path / "store"
    with serving(store, max_resident_snapshots=0) as running:
        running.caller.session().publish()
        wait_until(lambda: len(list(store.glob("*/snapshots/*.safetensors"))) == 1)
    with serving(store):
        assert list(store.glob("*/snapshots/*")) == []
