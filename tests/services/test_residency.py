"""Snapshots come, go and are used while the generator and the disk take their time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.generator.bigram import BigramGenerator
from backend.resources import residency as module
from backend.resources.residency import Residency
from backend.trainer import bigram
from backend.trainer.base import Adapter, LoraConfig, Weights
from backend.trainer.bigram_trainer import BigramTrainer
from tests.services.harness import MODEL

TIMEOUT_S = 20.0


class SlowGenerator(BigramGenerator):
    """`gate` cleared: add_snapshot waits. `failures`: so many fail first. `here`: what it has."""

    def __init__(self) -> None:
        super().__init__(bigram.load(MODEL))
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures = 0
        self.num_waiting = 0
        self.num_added = 0
        self.here: set[str] = set()

    async def add_snapshot(self, snapshot: str, weights: Weights) -> None:
        self.num_waiting += 1
        try:
            await self.gate.wait()
        finally:
            self.num_waiting -= 1
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the generator is away")
        await super().add_snapshot(snapshot, weights)
        self.num_added += 1
        self.here.add(snapshot)

    def drop_snapshot(self, snapshot: str) -> None:
        super().drop_snapshot(snapshot)
        self.here.remove(snapshot)


def adapter(seed: int) -> Adapter:
    trainer = BigramTrainer(bigram.load(MODEL))
    trainer.create_session("s", LoraConfig(rank=2, alpha=4.0, seed=seed))
    weights = trainer.weights("s")
    assert isinstance(weights, Adapter)
    return weights


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.002)


async def settled() -> None:
    """What can happen without the gates has happened."""
    for _ in range(20):
        await asyncio.sleep(0.002)


def test_many_users_of_a_snapshot_on_disk_wait_for_one_load(tmp_path: Path):
    async def scenario() -> None:
        generator = SlowGenerator()
        residency = Residency(generator, tmp_path, max_resident=0)
        await residency.add("a", adapter(1))
        await until(lambda: not generator.here)
        generator.gate.clear()
        names: list[str] = []

        async def use() -> None:
            async with residency.use("a") as name:
                names.append(name)
                await asyncio.sleep(0)

        users = [asyncio.create_task(use()) for _ in range(5)]
        await until(lambda: generator.num_waiting == 1)
        users[0].cancel()
        await settled()
        assert generator.num_waiting == 1
        generator.gate.set()
        await asyncio.gather(*users, return_exceptions=True)
        assert len(names) == 4
        assert len(set(names)) == 1
        assert generator.num_added == 2

    run(scenario)


def test_snapshot_dropped_while_it_is_loaded_leaves_nothing(tmp_path: Path):
    """Its only user has hung up. The same name may come again before the load has ended."""

    async def scenario() -> None:
        generator = SlowGenerator()
        residency = Residency(generator, tmp_path, max_resident=0)
        await residency.add("a", adapter(1))
        await until(lambda: not generator.here)
        generator.gate.clear()

        async def use() -> None:
            async with residency.use("a"):
                raise AssertionError("it was cancelled before")

        user = asyncio.create_task(use())
        await until(lambda: generator.num_waiting == 1)
        user.cancel()
        await asyncio.gather(user, return_exceptions=True)
        await residency.drop("a")
        assert not residency.has("a")
        residency.add_later("a", adapter(2))
        generator.gate.set()
        async with residency.use("a") as name:
            assert generator.here == {name}
        await until(lambda: not generator.here)
        assert len(list(tmp_path.iterdir())) == 1
        await residency.drop("a")
        assert list(tmp_path.iterdir()) == []

    run(scenario)


class SlowWriter:
    """Stands in for the writing of files, which then waits for the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.num_waiting = 0
        self._write = module._write
        monkeypatch.setattr(module, "_write", self)

    def __call__(self, path: Path, weights: Weights) -> None:
        self.num_waiting += 1
        assert self.gate.wait(TIMEOUT_S)
        self._write(path, weights)
        self.num_waiting -= 1


def test_snapshot_used_while_it_is_spilled_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        writer, generator = SlowWriter(monkeypatch), SlowGenerator()
        residency = Residency(generator, tmp_path, max_resident=0)
        await residency.add("a", adapter(1))
        await until(lambda: writer.num_waiting == 1)
        async with residency.use("a") as name:
            writer.gate.set()
            await until(lambda: writer.num_waiting == 0)
            await settled()
            assert generator.here == {name}
        await until(lambda: not generator.here)

    run(scenario)


def test_snapshot_dropped_while_it_is_spilled_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def scenario() -> None:
        writer, generator = SlowWriter(monkeypatch), SlowGenerator()
        residency = Residency(generator, tmp_path, max_resident=0)
        await residency.add("a", adapter(1))
        await until(lambda: writer.num_waiting == 1)
        await residency.drop("a")
        assert not generator.here
        writer.gate.set()
        await until(lambda: writer.num_waiting == 0)
        await until(lambda: list(tmp_path.iterdir()) == [])

    run(scenario)


def test_snapshot_that_the_generator_refuses_is_as_if_it_had_never_been(tmp_path: Path):
    async def scenario() -> None:
        generator = SlowGenerator()
        residency = Residency(generator, tmp_path, max_resident=4)
        generator.failures = 1
        with pytest.raises(RuntimeError, match="away"):
            await residency.add("a", adapter(1))
        assert not residency.has("a")
        await residency.add("a", adapter(1))
        async with residency.use("a") as name:
            assert generator.here == {name}

    run(scenario)


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_use_tries_again_what_failed(tmp_path: Path, *, is_on_disk: bool):
    async def scenario() -> None:
        generator = SlowGenerator()
        residency = Residency(generator, tmp_path, max_resident=0)
        if is_on_disk:
            await residency.add("a", adapter(1))
            await until(lambda: not generator.here)
            generator.failures = 1
        else:
            generator.failures = 2
            residency.add_later("a", adapter(1))
            await residency.settle("a")
        with pytest.raises(RuntimeError, match="away"):
            async with residency.use("a"):
                raise AssertionError("it is not there")
        async with residency.use("a") as name:
            assert generator.here == {name}
        await until(lambda: not generator.here)

    run(scenario)


def test_those_in_use_come_on_top_of_those_that_stay(tmp_path: Path):
    async def scenario() -> None:
        generator = SlowGenerator()
        residency = Residency(generator, tmp_path, max_resident=2)
        with ExitStack() as shared:
            for i in range(6):
                await residency.add(str(i), adapter(i))
                async with residency.use(str(i)):
                    residency.share(str(i), shared)
            await settled()
            assert len(generator.here) == 6
            for i in range(6, 10):
                await residency.add(str(i), adapter(i))
            await until(lambda: len(generator.here) == 8)
        await until(lambda: len(generator.here) == 2)
        assert {name.partition("#")[0] for name in generator.here} == {"8", "9"}

    run(scenario)


def test_full_disk_keeps_snapshots_in_memory_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Until the next one is published, when it is tried again."""
    failing = True
    write = module._write

    def full(path: Path, weights: Weights) -> None:
        if failing:
            raise OSError("No space left on device")
        write(path, weights)

    monkeypatch.setattr(module, "_write", full)

    async def scenario() -> None:
        nonlocal failing
        generator = SlowGenerator()
        residency = Residency(generator, tmp_path, max_resident=1)
        for name in "ab":
            await residency.add(name, adapter(1))
        for _ in range(5):
            async with residency.use("a"):
                await settled()
        assert len(generator.here) == 2
        assert caplog.text.count("stay in memory") == 1
        failing = False
        await residency.add("c", adapter(1))
        await until(lambda: len(generator.here) == 1)
        assert len(list(tmp_path.iterdir())) == 2

    run(scenario)


def test_spilled_weights_come_back_bit_for_bit(tmp_path: Path):
    async def scenario() -> None:
        generator = SlowGenerator()
        residency = Residency(generator, tmp_path, max_resident=0)
        rng = np.random.default_rng(0)
        weights = adapter(1)
        noise = {k: rng.normal(size=v.shape).astype(np.float32) for k, v in weights.tensors.items()}
        weights = Adapter(lora=weights.lora, tensors=noise, targets=weights.targets)
        await residency.add("a", weights)
        wanted = bigram.load(MODEL).logprobs(weights)
        await until(lambda: not generator.here)
        async with residency.use("a") as name:
            np.testing.assert_array_equal(generator._snapshots[name], wanted)

    run(scenario)
