"""Intake, executor and a bigram trainer put together without a network."""

from __future__ import annotations

import asyncio
import functools
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import Message

from backend.checkpoints.store import CheckpointStore
from backend.operations.actions import TrainerActions
from backend.operations.executor import Executor
from backend.operations.intake import Intake
from backend.operations.journal import Journal, SessionEntry
from backend.operations.memory_journal import MemoryJournal
from backend.operations.publishing import Published
from backend.operations.registry import OperationRegistry
from backend.operations.sequencer import Sequencer
from backend.operations.session import Session
from backend.operations.trainer_thread import TrainerThread
from backend.operations.work import SyncType
from backend.resources.sample_records import SampleRecords
from backend.services import trainer_requests as parse
from backend.trainer import bigram, bigram_trainer
from backend.trainer.base import ADAMW, LoraConfig, OptimParams, Pass, PassResult, Weights
from together_post_training.errors import PostTrainingError
from together_post_training.v1 import data_pb2, sessions_pb2
from together_post_training.v1 import operations_pb2 as pb
from together_post_training.v1 import trainer_pb2 as t

M = TypeVar("M", bound=Message)

LORA = LoraConfig(rank=4, alpha=16.0, seed=7)
MODEL = "builtin:bigram16"


class WatchedTrainer(bigram_trainer.BigramTrainer):
    """Waits where a test tells it to, fails where a test tells it to, and writes down what it ran."""

    def __init__(self, merge_tokens: int = 0) -> None:
        super().__init__(bigram.load(MODEL))
        self._merge_tokens = merge_tokens
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.raises: BaseException | None = None
        self.step_raises: BaseException | None = None
        self.passes: list[Pass] = []
        # The sessions of each call: ("pass", "a", "b"), ("step", "a").
        self.calls: list[tuple[str, ...]] = []

    @property
    def merge_tokens(self) -> int:
        return self._merge_tokens

    def run(self, work: Pass) -> PassResult:
        self.calls.append(("pass", work.session))
        return self._run(work)

    def run_batch(self, works: Sequence[Pass]) -> list[PassResult | PostTrainingError]:
        self.calls.append(("pass", *(work.session for work in works)))
        return [self._outcome(work) for work in works]

    def optim_step(self, session: str, params: OptimParams) -> dict[str, float]:
        self.calls.append(("step", session))
        if self.step_raises is not None:
            raise self.step_raises
        return super().optim_step(session, params)

    def _outcome(self, work: Pass) -> PassResult | PostTrainingError:
        try:
            return self._run(work)
        except PostTrainingError as error:
            return error

    def _run(self, work: Pass) -> PassResult:
        self.started.set()
        self.gate.wait()
        self.passes.append(work)
        if self.raises is not None:
            raise self.raises
        return super().run(work)


class Publisher:
    async def settle(self, session: Session) -> None:
        pass

    async def publish(
        self, session: Session, sequence: int, weights: Weights, sync: SyncType
    ) -> Published:
        return Published(snapshot=f"snapshots/session:{session.id}:{sequence}")


@dataclass(slots=True, kw_only=True)
class Bench:
    trainer: WatchedTrainer
    intake: Intake
    executor: Executor
    registry: OperationRegistry
    sessions: dict[str, Session]
    deaths: list[bool]

    @property
    def session(self) -> Session:
        return self.sessions["s"]

    async def submit(self, request: Any) -> pb.Operation:
        kind, decode = _KINDS[type(request)]
        model = self.trainer.model
        return await self.intake.submit(
            self.sessions[request.session],
            self.executor,
            kind,
            request,
            request.SerializeToString(),
            lambda: decode(request, model),
        )

    async def ended(self, sequence: int, session: str = "s") -> pb.Operation:
        return await self.registry.wait((session, sequence), 10.0)

    def adapter(self, session: str = "s") -> Weights:
        return self.trainer.weights(session)


@asynccontextmanager
async def bench(
    journal: Journal | None = None,
    *,
    max_held: int = 100,
    sessions: Sequence[str] = ("s",),
    merge_tokens: int = 0,
) -> AsyncIterator[Bench]:
    kept = journal or MemoryJournal()
    trainer, thread = WatchedTrainer(merge_tokens), TrainerThread("test")
    registry = OperationRegistry(kept, lambda: 1000.0)
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = CheckpointStore(Path(directory), lambda: 1000.0)
        actions = TrainerActions(trainer, thread, Publisher(), checkpoints, lambda: 1000.0)
        deaths: list[bool] = []
        executor = Executor(
            actions, registry, lambda: deaths.append(True), merge_tokens=trainer.merge_tokens
        )
        executor.start()
        yield Bench(
            trainer=trainer,
            intake=Intake(registry, kept, lambda: 1000.0),
            executor=executor,
            registry=registry,
            sessions={name: await _session(name, trainer, kept, max_held) for name in sessions},
            deaths=deaths,
        )
        trainer.gate.set()
        await executor.drain(5.0)
        thread.close()


async def _session(name: str, trainer: WatchedTrainer, journal: Journal, max_held: int) -> Session:
    trainer.create_session(name, LORA)
    shown = sessions_pb2.Session(id=name, base_model=MODEL)
    await journal.put_session(SessionEntry(session=shown, digest=b""))
    return Session(
        shown=shown,
        weights=LORA,
        sequencer=Sequencer(max_held=max_held, gap_timeout_s=60.0, now=0.0),
        policy_version=0,
        last_request_time=0.0,
    )


def run(test: Callable[[Bench], object], journal: Journal | None = None) -> None:
    async def main() -> None:
        async with bench(journal) as made:
            await test(made)  # pyright: ignore[reportGeneralTypeIssues]

    asyncio.run(main())


def of(session: str, request: M) -> M:
    """The request, made another session's."""
    request.session = session  # pyright: ignore[reportAttributeAccessIssue]
    return request


def sample(tokens: list[int], **floats: list[float]) -> data_pb2.Sample:
    """From a whole sequence: its inputs and targets; the floats are already one for each target."""
    inputs = {"target_tokens": data_pb2.Tensor(ints=data_pb2.Ints(values=tokens[1:]))}
    for key, values in floats.items():
        inputs[key] = data_pb2.Tensor(floats=data_pb2.Floats(values=values))
    text = data_pb2.EncodedText(tokens=tokens[:-1])
    return data_pb2.Sample(
        model_input=data_pb2.ModelInput(chunks=[data_pb2.Chunk(encoded_text=text)]),
        loss_fn_inputs=inputs,
    )


def forward_backward(
    sequence: int, one: data_pb2.Sample, loss: str, fields: Mapping[str, int]
) -> t.ForwardBackwardRequest:
    """`fields`: failures_seen_through, num_chunks."""
    config = data_pb2.LossConfig(type=loss)
    return t.ForwardBackwardRequest(
        session="s", sequence=sequence, loss=config, samples=[one], **fields
    )


def good(sequence: int, **fields: int) -> t.ForwardBackwardRequest:
    """Gradients of different numbers differ in size and direction."""
    n = sequence
    tokens = [n % 16, (n + 1) % 16, (5 * n + 2) % 16, (n + 9) % 16]
    return forward_backward(sequence, sample(tokens), "cross_entropy", fields)


def refused(sequence: int, **fields: int) -> t.ForwardBackwardRequest:
    """Token 16 is not one of this model's."""
    return forward_backward(sequence, sample([1, 2, 16]), "cross_entropy", fields)


def overflowing(sequence: int, **fields: int) -> t.ForwardBackwardRequest:
    """A ratio of e^5000."""
    bad = sample([1, 2, 4], logprobs=[-5000.0, -5000.0], advantages=[1.0, 1.0])
    return forward_backward(sequence, bad, "importance_sampling", fields)


def step(sequence: int, learning_rate: float = 0.1, **fields: int) -> t.OptimStepRequest:
    adam = t.AdamParams(learning_rate=learning_rate, eps=1e-3, grad_clip_norm=0)
    return t.OptimStepRequest(session="s", sequence=sequence, adam=adam, **fields)  # pyright: ignore


_RECORDS = SampleRecords(lambda: 0.0)
decode_pass = functools.partial(parse.pass_work, records=_RECORDS)

_KINDS = {
    t.ForwardRequest: (pb.OPERATION_KIND_FORWARD, decode_pass),
    t.ForwardBackwardRequest: (pb.OPERATION_KIND_FORWARD_BACKWARD, decode_pass),
    t.CustomForwardBackwardRequest: (
        pb.OPERATION_KIND_CUSTOM_FORWARD_BACKWARD,
        functools.partial(parse.custom_work, records=_RECORDS),
    ),
    t.OptimStepRequest: (
        pb.OPERATION_KIND_OPTIM_STEP,
        lambda r, _: parse.optim_step_work(r, ADAMW),
    ),
    t.WeightsSyncRequest: (pb.OPERATION_KIND_WEIGHTS_SYNC, lambda r, _: parse.weights_sync_work(r)),
    t.SaveCheckpointRequest: (
        pb.OPERATION_KIND_SAVE_CHECKPOINT,
        lambda r, _: parse.save_checkpoint_work(r),
    ),
    t.LoadCheckpointRequest: (
        pb.OPERATION_KIND_LOAD_CHECKPOINT,
        lambda r, _: parse.load_checkpoint_work(r),
    ),
}
