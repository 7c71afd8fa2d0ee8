"""A model resource: one base model, loaded once, with its trainer, its generator and the executor of its sessions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backend.checkpoints.store import CheckpointStore
from backend.generator.base import Generator
from backend.generator.turns import Turns
from backend.operations.actions import TrainerActions
from backend.operations.ended import timestamp
from backend.operations.executor import Executor
from backend.operations.publishing import Publisher
from backend.operations.registry import OperationRegistry
from backend.operations.trainer_thread import TrainerThread
from backend.resources.catalog import ModelSpec
from backend.resources.engines import OpenEngines
from backend.resources.residency import Residency
from backend.trainer.base import ModelInfo, Trainer
from together_post_training.v1 import model_resources_pb2 as pb


@dataclass(slots=True, kw_only=True, eq=False)
class Resource:
    """Owned by the event loop; the trainer by its thread."""

    name: str
    trainer: Trainer
    generator: Generator
    turns: Turns
    num_generator_replicas: int
    thread: TrainerThread
    executor: Executor
    residency: Residency
    tokenizer_dir: Path | None
    create_time_s: float
    num_sessions: int = 0
    full_weights_session: str = ""

    @property
    def model(self) -> ModelInfo:
        return self.trainer.model

    @property
    def id(self) -> str:
        return resource_id(self.name)

    def message(self) -> pb.ModelResource:
        return pb.ModelResource(
            id=self.id,
            base_model=self.name,
            state=pb.MODEL_RESOURCE_STATE_READY,
            create_time=timestamp(self.create_time_s),
            max_lora_rank=self.model.max_lora_rank,
            max_seq_length=self.model.limits.max_seq_length,
            vocab_size=self.model.limits.vocab_size,
            num_sessions=self.num_sessions,
            full_weights_session=self.full_weights_session,
            num_generator_replicas=self.num_generator_replicas,
        )

    async def close(self) -> None:
        self.thread.close()
        await self.generator.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceFactory:
    """Opens resources.

    max_resident: snapshots in memory per resource. deterministic: passes of several sessions never run together.
    on_death: called when the executor of one runs nothing any more.
    clock: seconds since 1970.
    """

    open_engines: OpenEngines
    registry: OperationRegistry
    checkpoints: CheckpointStore
    spill_dir: Path
    max_resident: int
    deterministic: bool
    on_death: Callable[[], None]
    clock: Callable[[], float]

    async def open(self, spec: ModelSpec, publisher: Publisher) -> Resource:
        """Loads the model on the thread that will own its trainer. Raises what the engines refuse."""
        thread = TrainerThread(spec.name)
        try:
            engines = await thread.call(self.open_engines, spec.name, spec.path)
        except BaseException:
            thread.close()
            raise
        actions = TrainerActions(engines.trainer, thread, publisher, self.checkpoints, self.clock)
        executor = Executor(
            actions,
            self.registry,
            self.on_death,
            merge_tokens=0 if self.deterministic else engines.trainer.merge_tokens,
        )
        executor.start()
        return Resource(
            name=spec.name,
            trainer=engines.trainer,
            generator=engines.generator,
            turns=Turns(engines.max_sampling),
            num_generator_replicas=engines.num_generator_replicas,
            thread=thread,
            executor=executor,
            residency=Residency(engines.generator, self.spill_dir, self.max_resident),
            tokenizer_dir=engines.tokenizer_dir,
            create_time_s=self.clock(),
        )


def resource_id(base_model: str) -> str:
    return "resource-" + hashlib.sha256(base_model.encode()).hexdigest()[:12]
