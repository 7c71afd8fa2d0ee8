"""A snapshot is kept as long as a client for it lives, wherever that is."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from tinker import types

import tinker_compat as tinker
from tests.compat.data import datum, greedy, prompt
from tests.services.harness import MODEL, Clock, Running, on_loop, serving
from together_post_training.client import holding
from together_post_training.v1 import generator_pb2

LEASE_S, RETENTION_S = 600.0, 24 * 3600.0


@dataclass(slots=True, kw_only=True)
class Server:
    """One whose clock the test moves; clients say what they hold every 50 ms of real time."""

    running: Running
    clock: Clock

    @property
    def url(self) -> str:
        return f"grpc://{self.running.address}"

    def wait(self, seconds: float) -> None:
        """As long as clients have things to say every half minute."""
        for _ in range(2):
            time.sleep(0.3)
            self.clock.now += seconds / 2
        self.sweep()

    def sweep(self) -> None:
        on_loop(self.running.server._snapshots.sweep())

    def exists(self, name: str) -> bool:
        try:
            asked = generator_pb2.GetSnapshotRequest(name=name)
            self.running.caller.generator.GetSnapshot(asked)
        except grpc.RpcError:
            return False
        return True


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(holding, "INTERVAL_S", 0.05)
    clock = Clock(5000.0)
    with serving(
        tmp_path / "store", clocks={"monotonic": clock}, snapshot_sweep_interval_s=3600.0
    ) as running:
        yield Server(running=running, clock=clock)


@pytest.fixture
def client(server: Server) -> Iterator[tinker.TrainingClient]:
    service = tinker.ServiceClient(base_url=server.url)
    yield service.create_lora_training_client(MODEL, rank=4, seed=1).result()
    service.close("errored").result()


def train(client: tinker.TrainingClient) -> None:
    client.forward_backward([datum([3], target_tokens=[9])], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=0.1)).result()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.02)


def test_samplers_keep_their_weights_for_ever_and_give_them_back_when_they_are_gone(
    server: Server, client: tinker.TrainingClient
):
    kept, dropped = [], []
    for step in range(6):
        sampler = client.save_weights_and_get_sampling_client().result()
        (dropped if step % 2 else kept).append(sampler)
        train(client)
    expected = [sampler.compute_logprobs(prompt(3, 9)).result() for sampler in kept]
    names = [sampler._sampling_session_id for sampler in dropped]
    del sampler
    dropped.clear()
    gc.collect()
    for _ in range(5):
        server.wait(LEASE_S * 0.8)
    # The newest is the session's.
    assert [server.exists(name) for name in names] == [False, False, True]
    assert [sampler.compute_logprobs(prompt(3, 9)).result() for sampler in kept] == expected


def test_client_that_is_still_a_future_holds_what_was_published(
    server: Server, client: tinker.TrainingClient
):
    future = client.save_weights_and_get_sampling_client()
    train(client)
    newest = client.save_weights_and_get_sampling_client().result()
    for _ in range(5):
        server.wait(LEASE_S * 0.8)
    assert server.exists(future.result()._sampling_session_id)
    del newest


def hold_and_score(sampler: tinker.SamplingClient, gate, opened) -> list[float | None]:
    opened.set()
    gate.wait(60)
    return sampler.compute_logprobs(prompt(3, 9)).result()


def test_pickled_client_holds_in_the_process_that_it_comes_to(
    server: Server, client: tinker.TrainingClient
):
    """From when it is unpickled on, long before it is used, and though the original is gone."""
    sampler = client.save_weights_and_get_sampling_client().result()
    expected = sampler.compute_logprobs(prompt(3, 9)).result()
    name = sampler._sampling_session_id
    train(client)
    newest = client.save_weights_and_get_sampling_client().result()
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager, spawn.Pool(1) as pool:
        gate, opened = manager.Event(), manager.Event()
        scored = pool.apply_async(hold_and_score, (sampler, gate, opened))
        # Not by this process, which keeps what it has pickled for an hour.
        sampler.holder.connection.holds._exported.clear()
        del sampler
        gc.collect()
        assert opened.wait(60)
        leases = server.running.server._snapshots._retention._leases
        wait_until(lambda: [h for h in leases._holders.values() if name in h.names] != [])
        server.clock.now += LEASE_S * 0.9
        server.sweep()
        assert server.exists(name)
        gate.set()
        assert scored.get(60) == expected
    del newest


def test_handle_keeps_its_snapshot_for_an_hour(server: Server, client: tinker.TrainingClient):
    sampler = client.save_weights_and_get_sampling_client().result()
    expected = sampler.compute_logprobs(prompt(3, 9)).result()
    handle, pickled = sampler.get_sampler_handle(), pickle.dumps(sampler)
    train(client)
    newest = client.save_weights_and_get_sampling_client().result()
    del sampler
    gc.collect()
    for _ in range(5):
        server.wait(LEASE_S * 0.8)
    for copy in (tinker.SamplingClient.from_sampler_handle(handle), pickle.loads(pickled)):
        assert copy.compute_logprobs(prompt(3, 9)).result() == expected
    del newest


def test_closed_client_lets_everything_go(server: Server):
    service = tinker.ServiceClient(base_url=server.url)
    client = service.create_lora_training_client(MODEL, rank=4).result()
    names = []
    samplers = []
    for kind in ("snapshot", "inflight"):
        samplers.append(client.save_weights_and_get_sampling_client(kind=kind).result())
        names.append(samplers[-1]._sampling_session_id)
        samplers[-1].sample(prompt(3), 1, greedy(2)).result()
    server.wait(LEASE_S * 0.8)
    service.close("success").result()
    server.wait(LEASE_S + 2)
    assert [server.exists(name) for name in names] == [False, False]


def test_inflight_clients_leave_no_versions_behind(server: Server, client: tinker.TrainingClient):
    follower = client.save_weights_and_get_sampling_client(kind="inflight").result()
    for _ in range(4):
        train(client)
        client.save_weights_and_get_sampling_client(kind="inflight").result()
    for _ in range(3):
        server.wait(LEASE_S * 0.8)
    assert len(server.running.server._snapshots._records.all()) == 1
    assert follower.sample(prompt(3), 1, greedy(2)).result().sequences
