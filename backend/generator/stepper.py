"""One step of the model: reads prompts, or computes the next token of every running sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.generator import torch_sampling
from backend.generator.attention import Part
from backend.generator.base import Topk
from backend.generator.expert_trace import chosen_by_token
from backend.generator.lora import SnapshotWeights, Span
from backend.generator.model_runner import ModelRunner
from backend.generator.sampling import Controls
from backend.generator.scoring import score_part
from backend.generator.sequences import Job, Prefill, Sample

# 32 MB of float32 logits at a time, when prompts are scored.
_CHUNK_VALUES = 2**23


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sample's next token."""

    sample: Sample
    token: int
    logprob: float
    topk: Topk | None


class Stepper:
    """Owned by the engine's thread. Changes nothing but the cache and the scores of prompts."""

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        self._runner = runner
        self._chunk_rows = max(1, _CHUNK_VALUES // vocab_size)

    def read(self, prefills: Sequence[Prefill]) -> list[Drawn]:
        """Reads the parts that are due of all prefills, stores them in their rows, scores what is to be scored of the
        prompts, and draws the next token of each sample whose tokens have all been read."""
        # Neighbours with one adapter are computed together.
        prefills = sorted(prefills, key=lambda p: id(p.job.weights))
        lengths = [len(p.part) for p in prefills]
        device = self._runner.device
        chosen = _asked(p.job for p in prefills)
        hidden_TH = self._runner.hidden(
            torch.cat([p.part for p in prefills]).to(device),
            torch.cat([torch.arange(p.start, p.stop, device=device) for p in prefills]),
            _spans([p.job.weights for p in prefills], lengths),
            self._runner.prefill_plan([Part(p.row, p.start, len(p.part)) for p in prefills]),
            chosen,
        )
        if chosen:
            _trace([(p.samples, p.start, len(p.part)) for p in prefills], chosen)
        samples, last = [], []
        for prefill, hidden in zip(prefills, hidden_TH.split(lengths), strict=True):
            self._score(prefill, hidden)
            if prefill.is_last_part:
                drawing = [sample for sample in prefill.samples if sample.num_left]
                samples += drawing
                last += [hidden[-1]] * len(drawing)
        return self._draw(samples, torch.stack(last)) if samples else []

    def advance(self, running: Sequence[Sample]) -> list[Drawn]:
        """Draws the next token of every running sample, all of them."""
        running = sorted(running, key=_order)
        lengths = [sample.num_tokens for sample in running]
        device = self._runner.device
        chosen = _asked(sample.job for sample in running)
        hidden_BH = self._runner.hidden(
            torch.tensor([sample.tokens[-1] for sample in running], device=device),
            torch.tensor(lengths, device=device) - 1,
            _spans([sample.job.weights for sample in running], [1] * len(running)),
            self._runner.decode_plan([sample.held_row for sample in running], lengths),
            chosen,
        )
        if chosen:
            _trace([([s], s.num_tokens - 1, 1) for s in running], chosen)
        return self._draw(running, hidden_BH)

    def _score(self, prefill: Prefill, hidden_TH: Tensor) -> None:
        weights = prefill.job.weights
        score_part(
            prefill.job.scores,
            hidden_TH,
            lambda rows: self._runner.logits(rows, _spans([weights], [len(rows)])),
            first_token=prefill.start,
            chunk_rows=self._chunk_rows,
            is_apart=self._runner.draws_apart,
        )

    def _draw(self, samples: Sequence[Sample], hidden_BH: Tensor) -> list[Drawn]:
        spans = _spans([sample.job.weights for sample in samples], [1] * len(samples))
        logits_BV = self._runner.logits(hidden_BH, spans)
        if not self._runner.draws_apart:
            return _drawn(samples, logits_BV)
        rows = zip(samples, torch_sampling.apart(logits_BV), strict=True)
        return [drawn for sample, row in rows for drawn in _drawn([sample], row)]


def _drawn(samples: Sequence[Sample], logits_BV: Tensor) -> list[Drawn]:
    tokens, logprobs = torch_sampling.draw(
        logits_BV,
        Controls.of([sample.job.call for sample in samples]),
        np.array([sample.next_uniform() for sample in samples]),
    )
    topk = _likeliest(samples, logits_BV)
    return [
        Drawn(sample, token, logprob, topk.get(i))
        for i, (sample, token, logprob) in enumerate(
            zip(samples, tokens.tolist(), logprobs.tolist(), strict=True)
        )
    ]


def _asked(jobs: Iterable[Job]) -> list[Tensor] | None:
    """Where a forward puts the experts that it went through; None: no job asks for them."""
    return [] if any(job.call.return_routed_experts for job in jobs) else None


def _trace(
    read: Sequence[tuple[Sequence[Sample], int, int]], chosen_by_layer: Sequence[Tensor]
) -> None:
    """Gives samples the experts of the tokens that were read for them, packed one after the other.

    read: samples with the same tokens, the position of the first of these, and their number.
    """
    experts_TLK = chosen_by_token(chosen_by_layer)
    stop = 0
    for samples, position, num_tokens in read:
        start, stop = stop, stop + num_tokens
        if any(sample.job.call.return_routed_experts for sample in samples):
            own = experts_TLK[start:stop].copy()  # Not a view, which would keep the others'.
            for sample in samples:
                sample.trace(position, own)


def _likeliest(samples: Sequence[Sample], logits_BV: Tensor) -> dict[int, Topk]:
    """By index, for the samples that ask for them."""
    wanted = {
        i: k for i, sample in enumerate(samples) if (k := sample.job.call.topk_sample_logprobs)
    }
    if not wanted:
        return {}
    best = torch_sampling.topk(logits_BV[list(wanted)], max(wanted.values()))
    return {
        i: Topk(
            token_ids=best.token_ids[row : row + 1, :k], logprobs=best.logprobs[row : row + 1, :k]
        )
        for row, (i, k) in enumerate(wanted.items())
    }


def _order(sample: Sample) -> tuple[int, int, int]:
    """Those with one adapter together, and among them the order of the cache, so that nothing has to be moved."""
    row = sample.held_row
    return id(sample.job.weights), row.pool.capacity, row.index


def _spans(weights: Sequence[SnapshotWeights | None], lengths: Sequence[int]) -> list[Span]:
    """Neighbours with the same adapter make one span; those without one make none."""
    spans: list[Span] = []
    stop = 0
    for some, length in zip(weights, lengths, strict=True):
        start, stop = stop, stop + length
        if some is None:
            continue
        if spans and spans[-1].stop == start and spans[-1].weights is some:
            start = spans.pop().start
        spans.append(Span(start, stop, some))
    return spans
