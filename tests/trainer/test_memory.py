"""What rows take in memory, what there is, and what happens when it is not enough."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from backend.trainer import adapter_slot, free_memory, head, running_pass
from backend.trainer.base import AdamParams, LoraConfig, Pass, PassResult
from backend.trainer.flat_layout import FlatLayout
from backend.trainer.memory import Memory
from backend.trainer.out_of_memory import guarded, is_out_of_memory
from backend.trainer.row_cost import Cost
from backend.trainer.torch_trainer import TorchTrainer
from tests import models
from tests.conformance.data import random_sample
from tests.trainer.sessions import take_gradient
from together_post_training.errors import PostTrainingError, Reason, fail

CPU = torch.device("cpu")
COST = Cost(fixed=1000, stored=100, layer=20, inputs=10, ends=5)
LORA = LoraConfig(rank=4, alpha=8, seed=0)
# More than any machine has: torch's own allocator refuses it.
TOO_MANY = 2**55


def limits(free: int, **options) -> Memory:
    return Memory(CPU, COST, available=lambda device: free, **options)


def child(module: str, *arguments: object) -> list:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


# What a row takes


@pytest.mark.parametrize("how", ["stored", "recomputed"])
def test_estimate_is_near_what_the_system_shows(tmp_path, how):
    """Within a quarter, as seen from outside: the resident set at its peak."""
    directory = models.rand(
        tmp_path / "model",
        "qwen3",
        vocab_size=8192,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        head_dim=32,
        initializer_range=0.1,
        max_position_embeddings=4096,
    )
    peak, estimate = child("tests.trainer.measure_peak", directory, 1200, how)
    assert peak > 50 * 2**20, "too little to measure"
    assert 0.75 < estimate / peak < 1.25


def test_bfloat16_halves_the_inputs_that_are_kept(directory_of):
    from backend.trainer import base_model

    where = str(directory_of("llama"))
    half = base_model.load("m", where, dtype="bfloat16", compute="bfloat16")
    wide = base_model.load("m", where)
    costs = [TorchTrainer(base)._packed.cost for base in (half, wide)]
    assert costs[0].inputs * 2 == costs[1].inputs
    assert costs[0].stored < costs[1].stored


# What follows from what there is


def test_micro_batches_are_as_large_as_speed_wants_where_memory_is_plenty():
    assert limits(2**40).token_budget == 1024


def test_micro_batches_shrink_with_memory():
    """Half of 60,000 bytes less the fixed 1,000, at 105 bytes a token: 276."""
    assert limits(60_000).token_budget == 276
    assert limits(60_000).recompute_above == 276
    assert limits(2000).token_budget == 64, "smaller ones would only be slow"


def test_options_win_over_what_is_free():
    chosen = limits(60_000, token_budget=50, activation_bytes=11_500)
    assert chosen.token_budget == 50
    assert chosen.recompute_above == 100


def test_long_rows_are_recomputed_and_longer_ones_refused():
    """Of 60,000 bytes 54,000 may be used: 1000 + 35 T, so T = 1514 at most."""
    budget = limits(60_000)
    assert not budget.must_recompute(COST, 276, for_backward=True)
    assert budget.must_recompute(COST, 277, for_backward=True)
    assert budget.must_recompute(COST, 1514, for_backward=True)
    with pytest.raises(PostTrainingError) as error:
        budget.must_recompute(COST, 1515, for_backward=True)
    assert error.value.reason is Reason.OUT_OF_MEMORY
    assert error.value.metadata == {
        "num_tokens": "1515",
        "needed_bytes": str(1000 + 35 * 1515),
        "available_bytes": "54000",
    }
    assert "shorter samples" in error.value.message


def test_scoring_needs_no_room_for_backward():
    """1000 + 25 T bytes: more tokens fit, and nothing is ever computed again."""
    budget = limits(60_000)
    assert not budget.must_recompute(COST, 2000, for_backward=False)
    with pytest.raises(PostTrainingError, match="2200 tokens"):
        budget.must_recompute(COST, 2200, for_backward=False)


def test_memory_that_others_took_meanwhile_counts():
    free = [60_000]
    budget = Memory(CPU, COST, available=lambda device: free[0])
    assert not budget.must_recompute(COST, 200, for_backward=True)
    free[0] = 20_000
    assert budget.must_recompute(COST, 200, for_backward=True)


# What there is


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(str(text))


def cgroups(tmp_path: Path, line: str) -> list[int]:
    (tmp_path / "self").write_text(f"9:name=systemd:/\n{line}\n")
    return list(free_memory._cgroup_bytes(tmp_path / "fs", tmp_path / "self"))


def test_every_cgroup_above_the_process_limits_it(tmp_path):
    """Version 2. Cached files are counted as used there, and go when memory is wanted."""
    root = tmp_path / "fs"
    write(root / "a/b", memory__max="max\n", memory__current="700\n", memory__stat="")
    stat = "anon 5\ninactive_file 100\n"
    write(root / "a", memory__max="1000\n", memory__current="800\n", memory__stat=stat)
    assert cgroups(tmp_path, "0::/a/b") == [300]


def test_first_version_of_cgroups_is_read_too(tmp_path):
    root = tmp_path / "fs/memory/jobs"
    write(
        root,
        memory__limit_in_bytes=5000,
        memory__usage_in_bytes=4000,
        memory__stat="total_inactive_file 50",
    )
    assert cgroups(tmp_path, "4:cpu,memory:/jobs") == [1050]


def test_cgroup_of_another_namespace_says_nothing(tmp_path):
    assert cgroups(tmp_path, "0::/not/here") == []


def test_a_machine_has_memory():
    assert 2**20 < free_memory.available_bytes(CPU) < 2**50


# When it runs out


def test_torchs_own_errors_are_recognised():
    with pytest.raises(RuntimeError) as error:
        torch.empty(TOO_MANY)
    assert is_out_of_memory(error.value)
    with pytest.raises(MemoryError) as numpys:
        np.empty(TOO_MANY)
    assert is_out_of_memory(numpys.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize("is_memory", [True, False])
def test_failure_holds_on_to_nothing_that_was_computed(is_memory):
    held = []

    def compute() -> None:
        tensor = torch.zeros(10)
        held.append(weakref.ref(tensor))
        if is_memory:
            torch.empty(TOO_MANY)
        raise fail(Reason.NON_FINITE_LOSS, "not finite")

    with pytest.raises(PostTrainingError) as error:
        guarded(compute, CPU)
    kept = error.value
    assert held[0]() is None
    assert kept.reason is (Reason.OUT_OF_MEMORY if is_memory else Reason.NON_FINITE_LOSS)


def test_other_faults_are_not_called_lack_of_memory():
    with pytest.raises(RuntimeError, match="shapes"):
        guarded(lambda: torch.zeros(2, 3) @ torch.zeros(2, 3), CPU)


def test_pass_that_runs_out_of_memory_fails_alone(trainer: TorchTrainer, monkeypatch):
    """In the middle of the second micro-batch; what the window had before, and what comes after, is untouched."""
    first, second = [random_sample(1, 128, 30)], [random_sample(i, 128, 40) for i in (2, 3)]
    trainer._memory.token_budget = 64
    for session in ("s", "control"):
        trainer.create_session(session, LORA)
        trainer.run(Pass(session=session, samples=first, backward=True))
    plain = head.Head._sweep
    calls = []

    def runs_out(self, *arguments):
        calls.append(1)
        return torch.empty(TOO_MANY) if len(calls) == 2 else plain(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(head.Head, "_sweep", runs_out)
        with pytest.raises(PostTrainingError, match="the session can go on") as error:
            trainer.run(Pass(session="s", samples=second, backward=True))
    assert error.value.reason is Reason.OUT_OF_MEMORY
    for session in ("s", "control"):
        trainer.run(Pass(session=session, samples=second, backward=True))
    got, wanted = take_gradient(trainer, "s"), take_gradient(trainer, "control")
    assert all(np.array_equal(got[name], wanted[name]) for name in wanted)


def test_row_that_is_too_large_for_all_is_computed_for_each(trainer: TorchTrainer, monkeypatch):
    """Of three sessions in one batch, the two whose own rows fit succeed."""
    sizes = {"a": 20, "b": 30, "c": 60}
    works = []
    for session, n in sizes.items():
        trainer.create_session(session, LORA)
        works.append(Pass(session=session, samples=[random_sample(n, 128, n)], backward=True))
    alone = [trainer.run(work) for work in works[:2]]
    plain = running_pass.pack

    def pack(samples, *more):
        if sum(sample.num_tokens for sample in samples) > 50:
            torch.empty(TOO_MANY)
        return plain(samples, *more)

    monkeypatch.setattr(running_pass, "pack", pack)
    results = trainer.run_batch(works)
    for got, wanted in zip(results[:2], alone, strict=True):
        assert isinstance(got, PassResult)
        assert np.array_equal(got.logprobs[0], wanted.logprobs[0])
    assert isinstance(results[2], PostTrainingError)
    assert results[2].reason is Reason.OUT_OF_MEMORY


def test_sample_that_cannot_fit_is_refused_before_anything_is_computed(trainer: TorchTrainer):
    trainer.create_session("s", LORA)
    enough = trainer._packed.cost.recomputing(40)
    trainer._memory._available = lambda device: int(enough / 0.9) + 1
    with pytest.raises(PostTrainingError, match="60 tokens at a time") as error:
        trainer.run(Pass(session="s", samples=[random_sample(0, 128, 60)], backward=True))
    assert error.value.reason is Reason.OUT_OF_MEMORY
    assert not trainer.has_gradients("s")
    trainer.run(Pass(session="s", samples=[random_sample(0, 128, 20)], backward=True))
    assert trainer.has_gradients("s")


def test_step_that_runs_out_of_memory_changes_nothing(trainer: TorchTrainer, monkeypatch):
    """A step asks for all it needs before it changes anything."""
    trainer.create_session("s", LORA)
    work = Pass(session="s", samples=[random_sample(1, 128, 30)], backward=True)
    trainer.run(work)
    before = trainer.weights("s").tensors
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda *_, **__: torch.empty(TOO_MANY))
        with pytest.raises(PostTrainingError) as error:
            trainer.optim_step("s", AdamParams(learning_rate=0.1))
    assert error.value.reason is Reason.OUT_OF_MEMORY
    assert all(np.array_equal(before[n], t) for n, t in trainer.weights("s").tensors.items())
    assert trainer.optimizer_state("s").num_steps == 0
    trainer.run(work)
    assert trainer.optim_step("s", AdamParams(learning_rate=0.1))["step:max"] == 1


def test_sessions_and_copies_that_memory_does_not_hold_fail_by_name(
    trainer: TorchTrainer, monkeypatch
):
    """Also loads, whose checks need some: nothing of the session changes, and a name stays free."""
    trainer.create_session("s", LORA)
    before, state = trainer.weights("s"), trainer.optimizer_state("s")

    def runs_out(*_: object, **__: object) -> torch.Tensor:
        return torch.empty(TOO_MANY)

    with monkeypatch.context() as patch:
        patch.setattr(adapter_slot, "FlatOptimizer", runs_out)
        patch.setattr(adapter_slot, "check_adapter", runs_out)
        patch.setattr(FlatLayout, "copies", runs_out)
        for needs_memory in (
            lambda: trainer.create_session("new", LORA),
            lambda: trainer.weights("s"),
            lambda: trainer.optimizer_state("s"),
            lambda: trainer.load("s", before, state),
        ):
            with pytest.raises(PostTrainingError) as error:
                needs_memory()
            assert error.value.reason is Reason.OUT_OF_MEMORY
    trainer.create_session("new", LORA)
    for name, tensor in trainer.weights("s").tensors.items():
        assert np.array_equal(tensor, before.tensors[name])


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_process_survives_running_out_of_memory(tmp_path):
    """For real: the system gives a process 4 MiB more, and a pass wants more than 100."""
    directory = models.rand(
        tmp_path / "model",
        vocab_size=4096,
        hidden_size=64,
        initializer_range=0.2,
        max_position_embeddings=8192,
    )
    reason, kept, loss = child("tests.trainer.memory_limit", directory)
    assert reason == "OUT_OF_MEMORY"
    assert kept is False
    assert math.isfinite(loss)
