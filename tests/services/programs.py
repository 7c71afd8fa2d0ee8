"""What sessions may be asked to do, and how they are made to do it at once: strategies and a runner."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from backend.resources.resource import Resource
from backend.trainer.base import Pass, Weights
from tests.services.harness import Run, Running, on_loop, sample
from together_post_training.v1 import data_pb2, operations_pb2, sessions_pb2, trainer_pb2

# Of each loss, the arrays that it reads beside the targets.
_POLICY = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": ("weights",),
    "importance_sampling": _POLICY,
    "ppo": _POLICY,
    "cispo": _POLICY,
    "dro": _POLICY,
}
_PARAMS = {"dro": {"beta": 0.05}}
# Tokens of the smallest model.
_VOCAB_SIZE = 16
_NO_TOKEN = 999_999


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """kind: "pass", "forward", "refused" (an unknown token), "overflowing" (a ratio of e^5000), "step" or "bad step".

    seed: of a pass's data, or of a step's parameters.
    """

    kind: str
    seed: int
    loss: str = "cross_entropy"

    def request(self) -> tuple[str, dict[str, Any]]:
        """The method and its fields."""
        rng = np.random.default_rng(self.seed)
        match self.kind:
            case "step":
                return "OptimStep", {"adam": _adam(learning_rate=float(rng.uniform(0.01, 0.1)))}
            case "bad step":
                return "OptimStep", {"adam": _adam(learning_rate=-1.0)}
            case "refused":
                return "ForwardBackward", _pass([sample([1, 2, _NO_TOKEN])], "cross_entropy")
            case "overflowing":
                bad = sample([1, 2, 4], logprobs=[-5000.0] * 2, advantages=[1.0] * 2)
                return "ForwardBackward", _pass([bad], "importance_sampling")
        samples = [_sample(rng, self.loss) for _ in range(rng.integers(1, 4))]
        method = "Forward" if self.kind == "forward" else "ForwardBackward"
        return method, _pass(samples, self.loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A session's configuration and what it is sent."""

    operations: tuple[Operation, ...]
    lora: dict[str, Any] = field(default_factory=dict)

    def start(self, running: Running, base_model: str) -> Run:
        lora = sessions_pb2.LoraConfig(**self.lora)
        return running.caller.session(base_model=base_model, lora=lora)


@st.composite
def programs(draw: st.DrawFn, *, targets: bool, max_operations: int = 8) -> list[Program]:
    """2 to 6 sessions. `targets`: they also differ in the layers that they train."""
    return [
        Program(
            operations=tuple(draw(st.lists(_operations, min_size=1, max_size=max_operations))),
            lora={
                "rank": draw(st.sampled_from([1, 2, 3, 8])),
                "alpha": draw(st.sampled_from([2.0, 8.0, 32.0])),
                "seed": draw(st.integers(0, 100)),
                **(draw(_targets) if targets else {}),
            },
        )
        for _ in range(draw(st.integers(2, 6)))
    ]


def orders(made: Sequence[Program]) -> st.SearchStrategy[list[int]]:
    """The order of arrival: of whose program the next operation is."""
    return st.permutations([i for i, one in enumerate(made) for _ in one.operations])


_operations = st.builds(
    Operation,
    kind=st.sampled_from(
        ["pass"] * 6 + ["step"] * 4 + ["forward", "refused", "overflowing", "bad step"]
    ),
    seed=st.integers(0, 1000),
    loss=st.sampled_from(sorted(LOSSES)),
)
_targets = st.sampled_from(
    [
        {"train_attn": True, "train_mlp": False, "train_unembed": False},
        {"train_attn": False, "train_mlp": True, "train_unembed": True},
        {"train_attn": True, "train_mlp": True, "train_unembed": True},
        {"target_modules": ["layers.0.self_attn.q_proj", "down_proj"]},
    ]
)


def run_together(
    running: Running, base_model: str, made: Sequence[Program], order: Sequence[int]
) -> list[Run]:
    """All sessions at once: the trainer begins when everything has arrived."""
    runs = [program.start(running, base_model) for program in made]
    left = [iter(program.operations) for program in made]
    with held(resource(running, base_model)):
        last = {i: _submit(runs[i], next(left[i])) for i in order}
    for operation in last.values():
        running.caller.wait(operation)
    return runs


def run_alone(running: Running, base_model: str, program: Program) -> Run:
    (run,) = run_together(running, base_model, [program], [0] * len(program.operations))
    return run


def resource(running: Running, base_model: str) -> Resource:
    found = running.server._resources.ready(base_model)
    assert found is not None
    return found


@contextmanager
def held(of: Resource) -> Iterator[None]:
    """Its trainer does nothing meanwhile."""
    gate = threading.Event()

    async def hold() -> asyncio.Future:
        return of.thread.call(gate.wait)

    on_loop(hold())
    try:
        yield
    finally:
        gate.set()


@contextmanager
def calls_together(of: Resource) -> Iterator[list[int]]:
    """How many passes each call of several had."""
    sizes: list[int] = []
    run_batch = of.trainer.run_batch

    def counting(works: Sequence[Pass]):
        if len(works) > 1:
            sizes.append(len(works))
        return run_batch(works)

    of.trainer.run_batch = counting
    try:
        yield sizes
    finally:
        of.trainer.run_batch = run_batch


def weights(running: Running, base_model: str, run: Run) -> Weights:
    """Of a session that has nothing to do."""

    async def copy() -> Weights:
        of = resource(running, base_model)
        return await of.thread.call(of.trainer.weights, run.id)

    return on_loop(copy())


def ends(run: Run) -> list[tuple[int, str]]:
    """State and reason of each of a session's operations."""
    listed = run.caller.operations.ListOperations(
        operations_pb2.ListOperationsRequest(session=run.id, page_size=1000)
    )
    return [(one.state, one.error.reason) for one in listed.operations]


def stop(runs: Sequence[Run]) -> None:
    for run in runs:
        run.caller.sessions.StopSession(sessions_pb2.StopSessionRequest(id=run.id))


def _submit(run: Run, operation: Operation) -> operations_pb2.Operation:
    method, fields = operation.request()
    return run.submit(method, **fields)


def _pass(samples: list[data_pb2.Sample], loss: str) -> dict[str, Any]:
    config = data_pb2.LossConfig(type=loss, params=_PARAMS.get(loss, {}))
    return {"samples": samples, "loss": config}


def _sample(rng: np.random.Generator, loss: str) -> data_pb2.Sample:
    tokens = rng.integers(0, _VOCAB_SIZE, rng.integers(2, 9)).tolist()
    size = len(tokens) - 1
    arrays = {
        "weights": rng.uniform(-0.5, 2.0, size),
        "logprobs": -rng.uniform(0.1, 4.0, size),
        "advantages": rng.normal(size=size),
    }
    return sample(tokens, **{name: arrays[name].tolist() for name in LOSSES[loss]})


def _adam(learning_rate: float) -> trainer_pb2.AdamParams:
    """With a large eps: without it, rounding decides the direction of elements whose gradient is almost 0."""
    return trainer_pb2.AdamParams(learning_rate=learning_rate, eps=0.1)
