"""A pass on its way through the model, and how passes of several sessions go through it together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from backend.trainer.base import Pass, PassResult
from backend.trainer.dropout import SampleRows
from backend.trainer.free_memory import frugally
from backend.trainer.lora import Segment
from backend.trainer.memory import Memory
from backend.trainer.objective import Objective
from backend.trainer.packed_model import PackedRow, pack
from backend.trainer.packing import plan
from backend.trainer.slot import RowModel, Slot
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.samples import Sample

Array = np.ndarray


class RunningPass:
    """What a pass has computed so far, or why it failed. What it does wrong is its own: nothing here raises."""

    def __init__(self, work: Pass, slot: Slot) -> None:
        """Raises PostTrainingError for parameters that its loss refuses."""
        self.work = work
        self._slot = slot
        self._objective = Objective(work)
        self._logprobs: dict[int, Array] = {}
        self.error: PostTrainingError | None = None
        if work.backward:
            slot.begin_pass()

    @property
    def is_linear(self) -> bool:
        return self._objective.is_linear

    def samples(self, chosen: Sequence[int]) -> list[Sample]:
        return [self.work.samples[i] for i in chosen]

    def routed_experts(self, chosen: Sequence[int]) -> list[Array | None]:
        routed = self.work.routed_experts
        return [None if routed is None else routed[i] for i in chosen]

    def segment(self, start: int, chosen: Sequence[int]) -> Segment:
        rows = [SampleRows(number=i, num_tokens=self.work.samples[i].num_tokens) for i in chosen]
        return self._slot.segment(start, rows, for_backward=self.work.backward)

    def linear_derivative(self, chosen: Sequence[int]) -> Array:
        """d objective / d logprob of these samples, flat; 0 from when the pass has failed on."""
        try:
            return self._flat(self._objective.linear_derivative(chosen), chosen)
        except PostTrainingError as error:
            return self._failed(error, chosen)

    def record(self, chosen: Sequence[int], logprobs: Array) -> Array:
        """Takes the flat logprobs of these samples; returns what `linear_derivative` does."""
        samples = self.samples(chosen)
        ends = np.cumsum([_num_targets(sample) for sample in samples])
        shaped = [
            part.reshape(sample.inputs["target_tokens"].shape).copy()
            for part, sample in zip(np.split(logprobs, ends[:-1]), samples, strict=True)
        ]
        self._logprobs.update(zip(chosen, shaped, strict=True))
        try:
            return self._flat(self._objective.evaluate(chosen, shaped), chosen)
        except PostTrainingError as error:
            return self._failed(error, chosen)

    def finish(self) -> PassResult | PostTrainingError:
        """Commits the gradient of a pass that has not failed."""
        if self.error is not None:
            return self.error
        try:
            metrics = self._objective.metrics()
            if self.work.backward:
                self._slot.commit_pass(len(self.work.samples))
        except PostTrainingError as error:
            return error
        logprobs = [self._logprobs[i] for i in range(len(self.work.samples))]
        return PassResult(logprobs=logprobs, metrics=metrics)

    def _flat(self, derivatives: Sequence[Array], chosen: Sequence[int]) -> Array:
        flat = np.concatenate([d.reshape(-1) for d in derivatives]).astype(np.float32)
        if self.work.gradients is not None and not np.isfinite(flat).all():
            (first, *_) = (i for i in chosen if not np.isfinite(self.work.gradients[i]).all())
            raise fail(
                Reason.NON_FINITE_LOSS,
                f"The gradient of sample {first} is not finite.",
                sample=first,
            )
        return flat

    def _failed(self, error: PostTrainingError, chosen: Sequence[int]) -> Array:
        self.error = self.error or error
        return np.zeros(sum(_num_targets(s) for s in self.samples(chosen)), np.float32)


def run_together(model: RowModel, passes: Sequence[RunningPass], memory: Memory) -> None:
    """Takes passes of different sessions, all with backward or all without, through the model in shared rows.

    Those that have failed are left out of the rows that follow.

    Raises:
        PostTrainingError: OUT_OF_MEMORY for a row that does not fit in memory.
    """
    lengths = [[sample.num_tokens for sample in p.work.samples] for p in passes]
    for micro_batch in plan(lengths, memory.token_budget):
        parts = [(passes[part.work], part.samples) for part in micro_batch]
        running = [(p, chosen) for p, chosen in parts if p.error is None]
        if running:
            _run_row(model, running, memory)


def _run_row(
    model: RowModel, parts: Sequence[tuple[RunningPass, Sequence[int]]], memory: Memory
) -> None:
    backward = parts[0][0].work.backward
    row = pack(
        [sample for p, chosen in parts for sample in p.samples(chosen)],
        memory.device,
        [routed for p, chosen in parts for routed in p.routed_experts(chosen)],
    )
    recompute = memory.must_recompute(model.cost, row.num_tokens, for_backward=backward)
    segments: list[Segment] = []
    for p, chosen in parts:
        segments.append(p.segment(segments[-1].stop if segments else 0, chosen))
    with frugally() if recompute else nullcontext():
        _compute_row(model, row, parts, segments, memory.device, recompute=recompute)


def _compute_row(
    model: RowModel,
    row: PackedRow,
    parts: Sequence[tuple[RunningPass, Sequence[int]]],
    segments: Sequence[Segment],
    device: torch.device,
    *,
    recompute: bool,
) -> None:
    backward = parts[0][0].work.backward
    forward = model.forward(row, segments, for_backward=backward, recompute=recompute)
    if backward and all(p.is_linear for p, _ in parts):
        gradient = _join([p.linear_derivative(chosen) for p, chosen in parts], device)
        _record(parts, forward.score_and_backward(gradient))
        return
    derivatives = _record(parts, forward.logprobs())
    if backward:
        forward.backward(_join(derivatives, device))


def _record(parts: Sequence[tuple[RunningPass, Sequence[int]]], logprobs: Tensor) -> list[Array]:
    """Gives each pass its logprobs; returns each one's derivative."""
    sizes = [sum(_num_targets(s) for s in p.samples(chosen)) for p, chosen in parts]
    shares = np.split(logprobs.cpu().numpy(), np.cumsum(sizes)[:-1])
    return [p.record(chosen, share) for (p, chosen), share in zip(parts, shares, strict=True)]


def _join(derivatives: Sequence[Array], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(derivatives)).to(device)


def _num_targets(sample: Sample) -> int:
    return math.prod(sample.inputs["target_tokens"].shape)
