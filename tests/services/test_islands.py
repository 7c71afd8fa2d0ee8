"""Laws 4, 6, 8 and 9 through the whole service: what a session gets does not depend on what others do meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend import cli
from backend.generator.embedded import EmbeddedGenerator
from backend.resources.catalog import ModelSpec
from backend.resources.engines import Engines
from backend.trainer import base_model, bigram, bigram_trainer
from backend.trainer.base import Weights
from backend.trainer.torch_trainer import TorchTrainer
from tests import models
from tests.services.harness import MODEL, Run, Running, serving
from tests.services.programs import (
    Operation,
    Program,
    calls_together,
    ends,
    orders,
    programs,
    resource,
    run_alone,
    run_together,
    stop,
    weights,
)
from together_post_training.v1 import operations_pb2 as pb

# One float32 pass differs from another in the order of its sums; the weights are of the order of 1.
TOLERANCE = 1e-5


class MergingBigram(bigram_trainer.BigramTrainer):
    @property
    def merge_tokens(self) -> int:
        return 120


class MergingTorch(TorchTrainer):
    """Also where it would not pay."""

    @property
    def merge_tokens(self) -> int:
        return 120


def engines(name: str, path: str) -> Engines:
    if path == MODEL:
        model = bigram.load(path)
        return Engines(
            trainer=MergingBigram(model), generator=model.generator(), tokenizer_dir=None
        )
    base = base_model.load(name, path)
    return Engines(
        trainer=MergingTorch(base), generator=EmbeddedGenerator(base), tokenizer_dir=None
    )


@pytest.fixture(scope="module")
def bigrams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("store"), engines=engines) as running:
        yield running


@pytest.fixture(scope="module")
def torches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """With two models, both of random weights."""
    scratch = tmp_path_factory.mktemp("torches")
    with serving(scratch / "store", models=_torch_models(scratch), engines=engines) as running:
        yield running


@pytest.fixture(scope="module")
def deterministic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    scratch = tmp_path_factory.mktemp("deterministic")
    with serving(scratch / "store", models=_torch_models(scratch), deterministic=True) as running:
        yield running


def _torch_models(scratch: Path) -> tuple[ModelSpec, ...]:
    rand = models.rand(scratch / "rand", "qwen3")
    tiny = ModelSpec(name="builtin:tiny", path="builtin:tiny")
    return (tiny, ModelSpec(name="rand", path=str(rand)))


def assert_islands(
    running: Running,
    base_model: str,
    made: Sequence[Program],
    order: Sequence[int],
    *,
    tolerance: float,
) -> None:
    """Each session ends as it does alone: its operations, its weights."""
    together = run_together(running, base_model, made, order)
    alone = [run_alone(running, base_model, program) for program in made]
    for got, expected in zip(together, alone, strict=True):
        assert ends(got) == ends(expected)
        assert_same(
            weights(running, base_model, got), weights(running, base_model, expected), tolerance
        )
    stop([*together, *alone])


def assert_same(got: Weights, expected: Weights, tolerance: float) -> None:
    assert got.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        np.testing.assert_allclose(got.tensors[name], tensor, rtol=0, atol=tolerance, err_msg=name)


def test_law_9_sessions_that_train_together_end_as_they_do_alone(bigrams: Running):
    """With ranks, losses, failures and steps in any order; to the bit, where each pass computes by itself."""

    @settings(max_examples=25, deadline=None)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        made = data.draw(programs(targets=False))
        assert_islands(bigrams, MODEL, made, data.draw(orders(made)), tolerance=0)

    with calls_together(resource(bigrams, MODEL)) as sizes:
        holds()
    assert max(sizes) > 2


@pytest.mark.parametrize("base_model", ["builtin:tiny", "rand"])
def test_law_4_passes_of_several_sessions_in_one_row_give_each_what_it_gets_alone(
    torches: Running, base_model: str
):
    @settings(max_examples=5, deadline=None)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        made = data.draw(programs(targets=True))
        assert_islands(torches, base_model, made, data.draw(orders(made)), tolerance=TOLERANCE)

    with calls_together(resource(torches, base_model)) as sizes:
        holds()
    assert max(sizes) > 2


def test_law_9_sessions_of_a_deterministic_server_end_to_the_bit_as_they_do_alone(
    deterministic: Running,
):
    @settings(max_examples=5, deadline=None)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        made = data.draw(programs(targets=True))
        assert_islands(deterministic, "rand", made, data.draw(orders(made)), tolerance=0)

    with calls_together(resource(deterministic, "rand")) as sizes:
        holds()
    assert not sizes


def test_law_9_three_sessions_of_a_deterministic_server_end_to_the_bit_as_they_do_alone(
    deterministic: Running,
):
    made = three_programs()
    order = [i for _ in made[0].operations for i in range(3)]
    assert_islands(deterministic, "builtin:tiny", made, order, tolerance=0)


@pytest.mark.parametrize(("given_options", "expected"), [((), False), (("--deterministic",), True)])
def test_serve_is_deterministic_when_it_is_told_to_be(given_options: Sequence[str], expected: bool):
    options = cli._parser().parse_args(["serve", "--model", MODEL, *given_options])
    assert cli._config(options).deterministic is expected


def test_law_9_three_sessions_that_train_together_end_as_they_do_alone(torches: Running):
    made = three_programs()
    order = [i for _ in made[0].operations for i in range(3)]
    with calls_together(resource(torches, "builtin:tiny")) as sizes:
        assert_islands(torches, "builtin:tiny", made, order, tolerance=TOLERANCE)
    # The first session's first pass began before the others had come.
    assert sizes == [3, 3, 3, 3, 3, 2]


def three_programs() -> list[Program]:
    """Six passes and three steps each."""
    return [
        Program(
            operations=tuple(
                Operation(kind="step" if n % 3 == 2 else "pass", seed=10 * i + n, loss=loss)
                for n in range(9)
            ),
            lora={"rank": 2 + i, "seed": i},
        )
        for i, loss in enumerate(("cross_entropy", "ppo", "dro"))
    ]


def test_law_9_an_idle_session_does_not_move(bigrams: Running):
    """Its gradient neither: what it was sent before counts as if nothing had come between."""
    before = Program(operations=(Operation(kind="pass", seed=1),), lora={"rank": 2, "seed": 5})
    idle = run_alone(bigrams, MODEL, before)
    start = weights(bigrams, MODEL, idle)
    busy = Program(
        operations=(Operation(kind="pass", seed=2), Operation(kind="step", seed=2)),
        lora={"rank": 4, "seed": 6},
    )
    runs = run_together(bigrams, MODEL, [busy, busy, busy], [0, 1, 2, 0, 1, 2])
    assert_same(weights(bigrams, MODEL, idle), start, 0)
    step = Operation(kind="step", seed=3)
    method, fields = step.request()
    assert idle.do(method, **fields).state == pb.OPERATION_STATE_SUCCEEDED
    whole = run_alone(
        bigrams, MODEL, Program(operations=(*before.operations, step), lora=before.lora)
    )
    assert_same(weights(bigrams, MODEL, idle), weights(bigrams, MODEL, whole), 0)
    stop([idle, whole, *runs])


def test_law_6_two_half_batches_are_one_batch_also_among_others(torches: Running):
    first, second = (Operation(kind="pass", seed=n) for n in (4, 5))
    step = Operation(kind="step", seed=6)
    halves = Program(operations=(first, second, step), lora={"rank": 4, "seed": 1})
    other = Program(
        operations=(Operation(kind="pass", seed=7, loss="ppo"), first), lora={"rank": 2, "seed": 2}
    )
    runs = run_together(torches, "rand", [halves, other], [0, 1, 0, 1, 0])
    whole = _whole_batch(torches, first, second, step)
    assert_same(weights(torches, "rand", runs[0]), weights(torches, "rand", whole), TOLERANCE)
    stop([*runs, whole])


def _whole_batch(running: Running, first: Operation, second: Operation, step: Operation) -> Run:
    run = Program(operations=(), lora={"rank": 4, "seed": 1}).start(running, "rand")
    (method, fields), (_, more) = first.request(), second.request()
    fields["samples"] = [*fields["samples"], *more["samples"]]
    assert run.do(method, **fields).state == pb.OPERATION_STATE_SUCCEEDED
    method, fields = step.request()
    assert run.do(method, **fields).state == pb.OPERATION_STATE_SUCCEEDED
    return run


def test_law_8_a_session_that_fails_voids_its_own_window_alone(bigrams: Running):
    kinds = {
        "fails": ("pass", "overflowing", "step", "pass", "step"),
        "is refused": ("refused", "pass", "step", "pass", "step"),
        "is well": ("pass", "pass", "step", "pass", "step"),
    }
    made = [
        Program(
            operations=tuple(Operation(kind=kind, seed=n) for n, kind in enumerate(of_one)),
            lora={"rank": 4, "seed": 9},
        )
        for of_one in kinds.values()
    ]
    runs = run_together(bigrams, MODEL, made, [i for _ in range(5) for i in range(3)])
    last_window = Program(operations=made[0].operations[3:], lora={"rank": 4, "seed": 9})
    clean = run_alone(bigrams, MODEL, last_window)
    well = run_alone(bigrams, MODEL, made[2])
    for run, expected in zip(runs, (clean, clean, well), strict=True):
        assert_same(weights(bigrams, MODEL, run), weights(bigrams, MODEL, expected), 0)
    stop([*runs, clean, well])
