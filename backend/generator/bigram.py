"""Samples from bigram models: exact, behind the generator's Protocol.

Everything happens on the event loop, which is let go between any two steps: one token of a few samples of one call.
Calls take turns at it, however many there are, and a cancelled call ends at its next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backend.generator.base import SampleCall, SampledSequence, SampleResult, Segment
from backend.generator.prompt_scores import NumpyRows, PromptScores
from backend.generator.sampling import Controls, TokenStream, draw, topk
from backend.generator.stopping import StopMatcher
from backend.trainer.base import Array, FullWeights, ModelInfo, Weights
from backend.trainer.bigram import HEAD, BigramModel
from backend.trainer.checks import check_full_weights
from together_post_training.errors import Reason, fail

# Of one call, in one step.
_STEP_SAMPLES = 32
_STEP_SCORES = 64


# From a token of a sequence on.
_Part = tuple[Segment, Array]


@dataclass(slots=True, kw_only=True, eq=False)
class _Weights:
    """What a call is sampled from now."""

    snapshot: str | None
    table: Array


class BigramGenerator:
    """See `backend.generator.base.Generator`. A snapshot is its table of log-probabilities, [i, j] = log p(j | i)."""

    def __init__(self, model: BigramModel) -> None:
        self._model = model
        self._base = model.logprobs(None)
        self._snapshots: dict[str, Array] = {}
        self._following: set[_Weights] = set()
        self._is_closed = False
        # One step at a time: the loop looks at everything else before the next one.
        self._step = asyncio.Lock()

    @property
    def model(self) -> ModelInfo:
        return self._model.info

    async def add_snapshot(self, snapshot: str, weights: Weights) -> None:
        if isinstance(weights, FullWeights):
            check_full_weights(weights, {HEAD: self._model.head.shape})
        assert snapshot not in self._snapshots, f"snapshot {snapshot!r} exists: a name is used once"
        self._snapshots[snapshot] = self._model.logprobs(weights)

    def drop_snapshot(self, snapshot: str) -> None:
        self._table(snapshot)
        del self._snapshots[snapshot]

    def move(self, old: str, new: str) -> None:
        table = self._table(new)
        for weights in self._following:
            if weights.snapshot == old:
                weights.snapshot, weights.table = new, table

    async def sample(self, call: SampleCall) -> SampleResult:
        if self._is_closed:
            raise fail(Reason.UNAVAILABLE, "The generator was closed.")
        weights = _Weights(snapshot=call.snapshot, table=self._table(call.snapshot))
        if call.follows:
            self._following.add(weights)
        try:
            scores = await self._score_prompt(weights.table, call)
            sequences = await self._continue(weights, call) if call.max_tokens else []
        finally:
            self._following.discard(weights)
        return scores.result(sequences)

    async def close(self) -> None:
        self._is_closed = True
        self._snapshots.clear()

    def _table(self, snapshot: str | None) -> Array:
        table = self._base if snapshot is None else self._snapshots.get(snapshot)
        if table is None:
            raise fail(
                Reason.SNAPSHOT_NOT_FOUND, f"Unknown snapshot {snapshot!r}.", snapshot=snapshot
            )
        return table

    async def _score_prompt(self, table: Array, call: SampleCall) -> PromptScores:
        scores = PromptScores(call)
        while not scores.is_complete:
            stop = min(scores.next + _STEP_SCORES, scores.num_tokens)
            async with self._step:
                await _let_others()
                scores.add(NumpyRows(table[call.prompt[scores.next - 1 : stop - 1]]), stop)
        return scores

    async def _continue(self, weights: _Weights, call: SampleCall) -> list[SampledSequence]:
        streams = [TokenStream(call.seed + i) for i in range(call.num_samples)]
        matchers = [StopMatcher(call.stop, self._model.decode) for _ in streams]
        tokens: list[list[int]] = [[] for _ in streams]
        parts: list[list[_Part]] = [[] for _ in streams]
        running, stopped = list(range(call.num_samples)), set()
        for position in range(call.max_tokens):
            for start in range(0, len(running), _STEP_SAMPLES):
                some = running[start : start + _STEP_SAMPLES]
                async with self._step:
                    await _let_others()
                    last = [tokens[i][-1] if position else int(call.prompt[-1]) for i in some]
                    uniforms = np.array([streams[i].uniform(position) for i in some])
                    table = weights.table
                    drawn, _ = draw(table[last], Controls.of([call] * len(some)), uniforms)
                    segment = Segment(snapshot=weights.snapshot, first_token=position)
                for i, token in zip(some, drawn.tolist(), strict=True):
                    tokens[i].append(token)
                    if not parts[i] or parts[i][-1][1] is not table:
                        parts[i].append((segment, table))
                    if matchers[i].push(token):
                        stopped.add(i)
            running = [i for i in running if i not in stopped]
            if not running:
                break
        return [_sequence(parts[i], call, tokens[i], i in stopped) for i in range(call.num_samples)]


async def _let_others() -> None:
    """gRPC needs three rounds of the loop to take in a call. With one between steps, a busy server would answer calls
    faster than it takes them in, and heartbeats would wait outside with all that arrives."""
    for _ in range(3):
        await asyncio.sleep(0)


def _sequence(
    parts: Sequence[_Part], call: SampleCall, tokens: list[int], is_stopped: bool
) -> SampledSequence:
    rows = _rows(parts, np.array([call.prompt[-1], *tokens[:-1]], np.int64))
    return SampledSequence(
        tokens=np.array(tokens, np.int32),
        logprobs=rows[np.arange(len(tokens)), tokens].astype(np.float32),
        stop_reason="stop" if is_stopped else "length",
        topk=topk(rows, call.topk_sample_logprobs) if call.topk_sample_logprobs else None,
        segments=tuple(segment for segment, _ in parts),
    )


def _rows(parts: Sequence[_Part], contexts: Array) -> Array:
    """The distributions after each context, (len(contexts), V), by the weights of its own time."""
    ends = [segment.first_token for segment, _ in parts[1:]] + [len(contexts)]
    return np.concatenate(
        [table[contexts[s.first_token : end]] for (s, table), end in zip(parts, ends, strict=True)]
    )
