"""The torch trainer: many LoRA sessions on one frozen base model, numpy in and numpy out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from backend.trainer.adapter_slot import AdapterSlot
from backend.trainer.base import (
    ADAMW,
    FullConfig,
    ModelInfo,
    OptimizerConfig,
    OptimizerState,
    OptimParams,
    Pass,
    PassResult,
    Weights,
    WeightsConfig,
)
from backend.trainer.base_model import BaseModel
from backend.trainer.checks import check_lora, check_optim, check_room_for_full_weights
from backend.trainer.full_slot import FullSlot
from backend.trainer.objective import Objective
from backend.trainer.packed_model import PackedModel, pack
from backend.trainer.packing import DEFAULT_TOKEN_BUDGET, plan
from backend.trainer.slot import Slot
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.samples import Sample

Array = np.ndarray


class TorchTrainer:
    """See `backend.trainer.base.Trainer`."""

    def __init__(self, base: BaseModel, *, token_budget: int = DEFAULT_TOKEN_BUDGET) -> None:
        self._base = base
        self._info = base.info
        self._packed = PackedModel(base)
        self._token_budget = token_budget
        self._slots: dict[str, Slot] = {}

    @property
    def model(self) -> ModelInfo:
        return self._info

    @property
    def merge_tokens(self) -> int:
        return 0

    def create_session(
        self, session: str, weights: WeightsConfig, optimizer: OptimizerConfig = ADAMW
    ) -> None:
        if session in self._slots:
            raise fail(
                Reason.SESSION_EXISTS, f"Session {session!r} exists already.", session=session
            )
        self._slots[session] = self._new_slot(weights, optimizer)

    def delete_session(self, session: str) -> None:
        self._slot(session)
        del self._slots[session]

    def run(self, work: Pass) -> PassResult:
        slot = self._slot(work.session)
        objective = Objective(work)
        logprobs: dict[int, Array] = {}
        slot.begin_pass()
        for batch in plan([sample.num_tokens for sample in work.samples], self._token_budget):
            computed = self._run_batch(batch.samples, work, slot, objective)
            logprobs.update(zip(batch.samples, computed, strict=True))
        metrics = objective.metrics()
        if work.backward:
            slot.commit_pass()
        return PassResult(logprobs=[logprobs[i] for i in range(len(work.samples))], metrics=metrics)

    def run_batch(self, works: Sequence[Pass]) -> list[PassResult | PostTrainingError]:
        return [self._attempt(work) for work in works]

    def has_gradients(self, session: str) -> bool:
        return self._slot(session).has_gradients

    def clear_gradients(self, session: str) -> None:
        self._slot(session).clear_gradients()

    def optim_step(self, session: str, params: OptimParams) -> dict[str, float]:
        slot = self._slot(session)
        check_optim(params, slot.optimizer_config)
        return slot.optim_step(params)

    def weights(self, session: str) -> Weights:
        return self._slot(session).copy_weights()

    def optimizer_state(self, session: str) -> OptimizerState:
        return self._slot(session).optimizer_state()

    def load(self, session: str, weights: Weights, optimizer: OptimizerState | None) -> None:
        self._slot(session).load(weights, optimizer)

    def _attempt(self, work: Pass) -> PassResult | PostTrainingError:
        try:
            return self.run(work)
        except PostTrainingError as error:
            return error

    def _new_slot(self, weights: WeightsConfig, optimizer: OptimizerConfig) -> Slot:
        if isinstance(weights, FullConfig):
            running = [name for name, slot in self._slots.items() if isinstance(slot, FullSlot)]
            check_room_for_full_weights(running, self._info.name)
            return FullSlot(self._base, optimizer)
        check_lora(weights, self._info)
        return AdapterSlot(weights, self._packed.layers(weights), optimizer)

    def _slot(self, session: str) -> Slot:
        slot = self._slots.get(session)
        if slot is None:
            raise fail(Reason.SESSION_NOT_FOUND, f"Unknown session {session!r}.", session=session)
        return slot

    def _run_batch(
        self, chosen: Sequence[int], work: Pass, slot: Slot, objective: Objective
    ) -> list[Array]:
        """The logprobs of these samples, as float32 of their targets' shapes."""
        samples = [work.samples[i] for i in chosen]
        row = pack(samples)
        segment = slot.segment(0, row.input_ids.shape[1])
        model = slot.own_model or self._packed
        forward = model.forward(row, [segment], for_backward=work.backward)
        if work.backward and objective.is_linear:
            derivative = objective.linear_derivative(chosen)
            logprobs = _split(forward.score_and_backward(_join(derivative)), samples)
            objective.evaluate(chosen, logprobs)
            return logprobs
        logprobs = _split(forward.logprobs(), samples)
        derivative = objective.evaluate(chosen, logprobs)
        if work.backward:
            forward.backward(_join(derivative))
        return logprobs


def _join(arrays: Sequence[Array]) -> Tensor:
    """float32, all values one after the other."""
    return torch.from_numpy(np.concatenate([a.reshape(-1) for a in arrays]).astype(np.float32))


def _split(flat: Tensor, samples: Sequence[Sample]) -> list[Array]:
    """What belongs to each sample, of its targets' shape."""
    shapes = [sample.inputs["target_tokens"].shape for sample in samples]
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    parts = np.split(flat.numpy(), ends[:-1])
    return [part.reshape(shape).copy() for part, shape in zip(parts, shapes, strict=True)]
