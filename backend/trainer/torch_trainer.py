"""The torch trainer: many LoRA sessions on one frozen base model, numpy in and numpy out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

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
from backend.trainer.checks import check_lora, check_room_for_full_weights
from backend.trainer.full_slot import FullSlot
from backend.trainer.memory import Memory
from backend.trainer.out_of_memory import guarded
from backend.trainer.packed_model import PackedModel
from backend.trainer.param_checks import check_optim
from backend.trainer.running_pass import RunningPass, run_together
from backend.trainer.slot import RowModel, Slot
from backend.trainer.threads import leaving_a_core
from together_post_training.errors import PostTrainingError, Reason, fail

# Passes of up to so many tokens together share rows. On a CPU, with a model of 15 million parameters, 8 passes of 16
# tokens then take less than half the time that they take one by one, 8 of 64 tokens a little less; from 1024 tokens on
# there is nothing left to gain, and every pass of a row waits for all of it.
MERGE_TOKENS = 512


class TorchTrainer:
    """See `backend.trainer.base.Trainer`; for the limits on memory `backend.trainer.memory.Memory`."""

    def __init__(
        self,
        base: BaseModel,
        *,
        token_budget: int | None = None,
        activation_bytes: int | None = None,
    ) -> None:
        self._base = base
        self._info = base.info
        self._packed = PackedModel(base)
        self._memory = Memory(
            base.device,
            self._packed.cost,
            token_budget=token_budget,
            activation_bytes=activation_bytes,
        )
        self._slots: dict[str, Slot] = {}

    @property
    def model(self) -> ModelInfo:
        return self._info

    @property
    def merge_tokens(self) -> int:
        return MERGE_TOKENS

    def create_session(
        self, session: str, weights: WeightsConfig, optimizer: OptimizerConfig = ADAMW
    ) -> None:
        if session in self._slots:
            raise fail(
                Reason.SESSION_EXISTS, f"Session {session!r} exists already.", session=session
            )
        new_slot = partial(self._new_slot, weights, optimizer)
        self._slots[session] = guarded(new_slot, self._memory.device)

    def delete_session(self, session: str) -> None:
        self._slot(session)
        del self._slots[session]

    def run(self, work: Pass) -> PassResult:
        (outcome,) = self.run_batch([work])
        if isinstance(outcome, PostTrainingError):
            raise outcome
        return outcome

    def run_batch(self, works: Sequence[Pass]) -> list[PassResult | PostTrainingError]:
        sessions = [work.session for work in works]
        assert len(set(sessions)) == len(sessions), "passes of one session run one after the other"
        outcomes: dict[str, PassResult | PostTrainingError] = {}
        with leaving_a_core() if len(works) > 1 else nullcontext():
            for model, sharing in self._by_model(works):
                outcomes |= self._run_on(model, sharing)
        unknown = {name: _unknown(name) for name in sessions if name not in self._slots}
        return [(outcomes | unknown)[name] for name in sessions]

    def has_gradients(self, session: str) -> bool:
        return self._slot(session).has_gradients

    def clear_gradients(self, session: str) -> None:
        self._slot(session).clear_gradients()

    def optim_step(self, session: str, params: OptimParams) -> dict[str, float]:
        slot = self._slot(session)
        check_optim(params, slot.optimizer_config)
        return guarded(partial(slot.optim_step, params), self._memory.device)

    def weights(self, session: str) -> Weights:
        return guarded(self._slot(session).copy_weights, self._memory.device)

    def optimizer_state(self, session: str) -> OptimizerState:
        return guarded(self._slot(session).optimizer_state, self._memory.device)

    def load(self, session: str, weights: Weights, optimizer: OptimizerState | None) -> None:
        load = partial(self._slot(session).load, weights, optimizer)
        guarded(load, self._memory.device)

    def _by_model(self, works: Sequence[Pass]) -> list[tuple[RowModel, list[Pass]]]:
        """Those of known sessions, by what computes them: adapters share the base, full weights share nothing."""
        groups: dict[int, tuple[RowModel, list[Pass]]] = {}
        for work in works:
            if work.session in self._slots:
                model = self._slots[work.session].own_model or self._packed
                groups.setdefault(id(model), (model, []))[1].append(work)
        return list(groups.values())

    def _run_on(
        self, model: RowModel, works: Sequence[Pass]
    ) -> dict[str, PassResult | PostTrainingError]:
        started = {work.session: self._start(work) for work in works}
        running = [p for p in started.values() if isinstance(p, RunningPass)]
        try:
            guarded(partial(run_together, model, running, self._memory), self._memory.device)
        except PostTrainingError as error:
            # Not of one pass's own making, like too little memory: alone each needs less.
            if len(works) == 1:
                return {works[0].session: error}
            return {w.session: self._run_on(model, [w])[w.session] for w in works}
        return {
            name: p.finish() if isinstance(p, RunningPass) else p for name, p in started.items()
        }

    def _start(self, work: Pass) -> RunningPass | PostTrainingError:
        try:
            return RunningPass(work, self._slots[work.session])
        except PostTrainingError as error:
            return error

    def _new_slot(self, weights: WeightsConfig, optimizer: OptimizerConfig) -> Slot:
        if isinstance(weights, FullConfig):
            running = [name for name, slot in self._slots.items() if isinstance(slot, FullSlot)]
            check_room_for_full_weights(running, self._info.name)
            return FullSlot(self._base, optimizer)
        check_lora(weights, self._info)
        layers = self._packed.layers(weights)
        return AdapterSlot(weights, layers, optimizer, device=self._memory.device)

    def _slot(self, session: str) -> Slot:
        slot = self._slots.get(session)
        if slot is None:
            raise _unknown(session)
        return slot


def _unknown(session: str) -> PostTrainingError:
    return fail(Reason.SESSION_NOT_FOUND, f"Unknown session {session!r}.", session=session)
