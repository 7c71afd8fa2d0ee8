"""What each kind of operation does with the trainer, the snapshots and the checkpoints of its resource."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from backend.checkpoints.manifest import FOLDERS, Manifest
from backend.checkpoints.store import CheckpointStore, LoadedCheckpoint
from backend.operations import notices
from backend.operations.publishing import Publisher
from backend.operations.session import Operation, Session
from backend.operations.trainer_thread import TrainerThread
from backend.operations.work import (
    LoadCheckpointWork,
    OptimStepWork,
    PassWork,
    SaveCheckpointWork,
    SyncType,
    WeightsSyncWork,
)
from backend.trainer.base import (
    LoraConfig,
    OptimizerState,
    OptimParams,
    Pass,
    PassResult,
    Trainer,
    Weights,
)
from together_post_training import tensors
from together_post_training.alignment import inspect
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.names import CheckpointPath
from together_post_training.v1 import operations_pb2 as pb

# A pass's operation, and what its caller should know.
Shown = tuple[pb.Operation, notices.Notices]


class TrainerActions:
    """See `backend.operations.executor.Actions`. `clock`: seconds since 1970."""

    def __init__(
        self,
        trainer: Trainer,
        thread: TrainerThread,
        publisher: Publisher,
        checkpoints: CheckpointStore,
        clock: Callable[[], float],
    ) -> None:
        self._trainer = trainer
        self._thread = thread
        self._publisher = publisher
        self._checkpoints = checkpoints
        self._clock = clock

    async def clear_gradients(self, session: str) -> None:
        await self._thread.call(self._trainer.clear_gradients, session)

    async def run(self, operation: Operation) -> pb.Operation:
        session, work = operation.session, operation.work
        match work:
            case OptimStepWork():
                return await self._optim_step(session, work.params)
            case WeightsSyncWork():
                return await self._weights_sync(session, operation.sequence, work.type)
            case SaveCheckpointWork():
                return await self._save(session, work)
            case LoadCheckpointWork():
                return await self._load(session, work)
            case PassWork() | None:
                raise AssertionError(f"{operation.header.name} is not run this way")

    async def run_passes(
        self, operations: Sequence[Operation]
    ) -> list[pb.Operation | PostTrainingError]:
        works = [_pass(operation) for operation in operations]
        ended = await self._thread.call(_run_passes, self._trainer, works)
        return [
            _noticed(operation.session, one)
            for operation, one in zip(operations, ended, strict=True)
        ]

    async def _optim_step(self, session: Session, params: OptimParams) -> pb.Operation:
        metrics = await self._thread.call(_step, self._trainer, session.id, params)
        version = session.policy_version + (metrics is not None)
        shown = {"empty_window:max": 1.0} if metrics is None else metrics
        done = pb.Operation(optim_step=pb.OptimStepResult(policy_version=version, metrics=shown))
        notices.give(session, done, notices.notices_of_step(params))
        return done

    async def _weights_sync(self, session: Session, sequence: int, sync: SyncType) -> pb.Operation:
        await self._publisher.settle(session)
        weights = await self._thread.call(self._trainer.weights, session.id)
        published = await self._publisher.publish(session, sequence, weights, sync)
        result = pb.WeightsSyncResult(
            snapshot=published.snapshot,
            policy_version=session.policy_version,
            is_pending=published.is_pending,
        )
        done = pb.Operation(weights_sync=result)
        notices.give(session, done, published.notices)
        return done

    async def _save(self, session: Session, work: SaveCheckpointWork) -> pb.Operation:
        path = CheckpointPath(session=session.id, folder=FOLDERS[work.kind], name=work.name)
        if not work.overwrite:
            await asyncio.to_thread(self._checkpoints.check_free, path)
        with_optimizer = work.kind == "training"
        weights, optimizer = await self._thread.call(
            _copy_state, self._trainer, session.id, with_optimizer
        )
        manifest = self._manifest(session, work)
        await asyncio.to_thread(
            self._checkpoints.save,
            manifest,
            weights,
            optimizer,
            overwrite=work.overwrite,
            base_location=self._trainer.model.location,
            age_recipients=work.age_recipients,
        )
        return pb.Operation(
            save_checkpoint=pb.SaveCheckpointResult(
                path=str(path), policy_version=manifest.policy_version
            )
        )

    def _manifest(self, session: Session, work: SaveCheckpointWork) -> Manifest:
        now = self._clock()
        return Manifest(
            session=session.id,
            name=work.name,
            kind=work.kind,
            base_model=session.shown.base_model,
            weights=session.weights,
            optimizer=session.optimizer,
            policy_version=session.policy_version,
            create_time_s=now,
            expire_time_s=None if work.ttl_s is None else now + work.ttl_s,
            user_metadata=work.user_metadata,
        )

    async def _load(self, session: Session, work: LoadCheckpointWork) -> pb.Operation:
        loaded = await asyncio.to_thread(
            self._checkpoints.load, work.path, optimizer=work.optimizer
        )
        check_base_model(loaded, session.shown.base_model)
        _check_kind(loaded, session)
        await self._thread.call(self._trainer.load, session.id, loaded.weights, loaded.optimizer)
        return pb.Operation(
            load_checkpoint=pb.LoadCheckpointResult(
                path=str(work.path), policy_version=policy_version_after(loaded)
            )
        )


def _check_kind(loaded: LoadedCheckpoint, session: Session) -> None:
    """Raises INCOMPATIBLE_CHECKPOINT for full weights and a LoRA session, and the other way round."""
    saved, trained = (
        "a LoRA adapter" if isinstance(weights, LoraConfig) else "full weights"
        for weights in (loaded.manifest.weights, session.weights)
    )
    if saved != trained:
        path = loaded.manifest.path
        raise fail(
            Reason.INCOMPATIBLE_CHECKPOINT,
            f"Checkpoint {str(path)!r} holds {saved}, this session trains {trained}: resume a session from it, or load "
            f"it into one that trains {saved}.",
            path=path,
            holds=saved,
            trains=trained,
        )


def policy_version_after(loaded: LoadedCheckpoint) -> int:
    """With the optimiser the run goes on, without it another one begins."""
    return 0 if loaded.optimizer is None else loaded.manifest.policy_version


def check_base_model(loaded: LoadedCheckpoint, base_model: str) -> None:
    """Raises INCOMPATIBLE_CHECKPOINT."""
    manifest = loaded.manifest
    if manifest.base_model != base_model:
        raise fail(
            Reason.INCOMPATIBLE_CHECKPOINT,
            f"Checkpoint {str(manifest.path)!r} was trained on {manifest.base_model!r}, not on {base_model!r}.",
            path=manifest.path,
            base_model=manifest.base_model,
            expected=base_model,
        )


def _pass(operation: Operation) -> Pass:
    assert isinstance(operation.work, PassWork)
    return operation.work.work


def _noticed(
    session: Session, ended: Shown | PostTrainingError
) -> pb.Operation | PostTrainingError:
    if isinstance(ended, PostTrainingError):
        return ended
    operation, found = ended
    notices.give(session, operation, found)
    return operation


def _run_passes(trainer: Trainer, works: Sequence[Pass]) -> list[Shown | PostTrainingError]:
    if len(works) == 1:
        return [_shown(works[0], trainer.run(works[0]))]
    results = trainer.run_batch(works)
    return [
        result if isinstance(result, PostTrainingError) else _shown(work, result)
        for work, result in zip(works, results, strict=True)
    ]


def _shown(work: Pass, result: PassResult) -> Shown:
    operation = pb.Operation()
    shown = operation.forward_backward
    for logprobs in result.logprobs:
        tensors.encode_into(shown.loss_fn_outputs.add().tensors["logprobs"], logprobs)
    shown.metrics.update(result.metrics)
    alignment = inspect(work.samples, result.logprobs)
    shown.metrics.update(alignment.metrics)
    return operation, notices.notices_of(work, alignment)


def _step(trainer: Trainer, session: str, params: OptimParams) -> dict[str, float] | None:
    """None: there was nothing to step from."""
    if not trainer.has_gradients(session):
        return None
    return trainer.optim_step(session, params)


def _copy_state(
    trainer: Trainer, session: str, with_optimizer: bool
) -> tuple[Weights, OptimizerState | None]:
    optimizer = trainer.optimizer_state(session) if with_optimizer else None
    return trainer.weights(session), optimizer
