"""A core is left to others while passes of several sessions run, and only then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from backend.trainer import threads
from backend.trainer.base import LoraConfig, Pass
from backend.trainer.running_pass import RunningPass
from backend.trainer.threads import leaving_a_core
from backend.trainer.torch_trainer import TorchTrainer
from tests.conformance.data import random_sample


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("cores", "inside"), [(2, 1), (1, 1), (4, 2)])
def test_a_thread_less_where_all_cores_would_be_taken(monkeypatch, cores, inside):
    monkeypatch.setattr(threads, "num_cores", lambda: cores)
    used: list[int] = []

    def fails() -> None:
        with leaving_a_core():
            used.append(torch.get_num_threads())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert used == [inside]
    assert torch.get_num_threads() == 2


def test_only_passes_of_several_sessions_leave_a_core(base_of, monkeypatch):
    monkeypatch.setattr(threads, "num_cores", lambda: 2)
    trainer = TorchTrainer(base_of("llama"))
    used: list[int] = []
    record = RunningPass.record

    def watched(self, *args):
        used.append(torch.get_num_threads())
        return record(self, *args)

    monkeypatch.setattr(RunningPass, "record", watched)
    works = []
    for name in ("a", "b"):
        trainer.create_session(name, LoraConfig(rank=2, alpha=4, seed=0))
        works.append(Pass(session=name, samples=[random_sample(0, 128, 8)], backward=True))
    trainer.run_batch(works)
    trainer.run(works[0])
    assert used == [1, 1, 2]
