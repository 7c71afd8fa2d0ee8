"""What the engine works on: calls, and the samples that they ask for."""

from __future__ import annotations

import math
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from backend.generator.base import (
    SampleCall,
    SampledSequence,
    SampleResult,
    Segment,
    Stop,
    Topk,
)
from backend.generator.expert_trace import ExpertTrace
from backend.generator.kv_cache import Row
from backend.generator.lora import SnapshotWeights
from backend.generator.prompt_scores import PromptScores
from backend.generator.sampling import TokenStream
from backend.generator.stopping import Decode, StopMatcher
from together_post_training.errors import PostTrainingError, Reason, fail


class Job:
    """One call, from when it is accepted until its result is set.

    Owned by the engine's thread once it is submitted; only `future` may be cancelled from anywhere, which makes the
    engine forget the job.

    number: the order of arrival; smaller is older. flow: whose turn it takes. members: those that need a row, its
    samples; one that samples nothing where the prompt is only scored. trace: of the prompt, if the call asks for
    experts. num_hits: of the prompt, the tokens that were not read when the others were; None before.
    """

    def __init__(
        self, call: SampleCall, weights: SnapshotWeights | None, decode: Decode | None
    ) -> None:
        self.number = -1
        self.call = call
        self.flow = call.snapshot or ""
        self.weights = weights
        self.future: Future[SampleResult] = Future()
        self.prompt = torch.tensor(call.prompt, dtype=torch.int64, device="cpu")
        self.scores = PromptScores(call)
        self.trace = ExpertTrace()
        self.num_hits: int | None = None
        num_samples = call.num_samples if call.max_tokens else 0
        self.samples = [Sample(self, i, StopMatcher(call.stop, decode)) for i in range(num_samples)]
        self.members = self.samples or [Sample(self, 0, StopMatcher(Stop(), None))]
        self.num_unfinished = num_samples

    @property
    def is_done(self) -> bool:
        return not self.num_unfinished and self.scores.is_complete

    @property
    def num_reusable(self) -> int:
        """Of the prompt, the tokens whose hidden states nobody asks for: they may come from a cache."""
        if self.call.return_routed_experts:
            return 0
        return len(self.prompt) - 1 if self.scores.is_complete else self.scores.next - 1

    def move(self, snapshot: str | None, weights: SnapshotWeights | None) -> None:
        """Its samples go on under other weights, which read again all that they have; they hold no rows."""
        self.weights = weights
        if not self.scores.is_complete:
            self.scores = PromptScores(self.call)
        if not any(sample.tokens for sample in self.samples):
            self.trace = ExpertTrace()  # Nothing came of what has been read.
        for sample in self.samples:
            sample.move(snapshot)

    def finish(self) -> None:
        assert self.is_done
        if not self.scores.are_finite:
            self.fail(non_finite_logits())
            return
        result = self.scores.result([sample.result() for sample in self.samples])
        with suppress(InvalidStateError):  # cancelled at this very moment
            self.future.set_result(replace(result, cache_hit_tokens=self.num_hits or 0))

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class Sample:
    """One continuation of a job's prompt.

    row: the keys and values of all its tokens but the last; None while it waits, and in the end.
    has_waited: for another prompt that begins alike to be read.
    """

    def __init__(self, job: Job, index: int, matcher: StopMatcher) -> None:
        self.job = job
        self.index = index
        self.row: Row | None = None
        self.tokens: list[int] = []
        self.is_finished = False
        self.has_waited = False
        self._stream = TokenStream(job.call.seed + index)
        self._matcher = matcher
        self._logprobs: list[float] = []
        self._topk: list[Topk] = []
        self._is_stopped = False
        self._segments = [Segment(snapshot=job.call.snapshot)]
        self._trace = ExpertTrace(first=len(job.prompt))

    @property
    def held_row(self) -> Row:
        assert self.row is not None
        return self.row

    @property
    def num_tokens(self) -> int:
        """The prompt's and its own."""
        return len(self.job.prompt) + len(self.tokens)

    @property
    def num_left(self) -> int:
        return self.job.call.max_tokens - len(self.tokens)

    def all_tokens(self) -> Tensor:
        if not self.tokens:
            return self.job.prompt
        return torch.cat([self.job.prompt, torch.tensor(self.tokens, device="cpu")])

    def next_uniform(self) -> float:
        return self._stream.uniform(len(self.tokens))

    def move(self, snapshot: str | None) -> None:
        """What it samples from now on is this snapshot's."""
        if self.is_finished:
            return
        if self._segments[-1].first_token == len(self.tokens):
            self._segments.pop()
        self._segments.append(Segment(snapshot=snapshot, first_token=len(self.tokens)))

    def push(self, token: int, logprob: float, topk: Topk | None) -> None:
        """Takes the next token. topk: one row, if the call asks for it.

        Raises:
            PostTrainingError: NON_FINITE_LOGITS.
        """
        if not math.isfinite(logprob):
            raise non_finite_logits()
        self.tokens.append(token)
        self._logprobs.append(logprob)
        if topk is not None:
            self._topk.append(topk)
        self._is_stopped = self._matcher.push(token)
        self.is_finished = self._is_stopped or not self.num_left

    def trace(self, start: int, experts_TLK: np.ndarray) -> None:
        """Takes the experts of its tokens from position `start` on, the prompt's counted; int16 (T, layers, K)."""
        num_prompt = max(0, len(self.job.prompt) - start)
        if num_prompt:
            self.job.trace.add(start, experts_TLK[:num_prompt])
        self._trace.add(start + num_prompt, experts_TLK[num_prompt:])

    def result(self) -> SampledSequence:
        experts = [*self.job.trace.experts(), *self._trace.experts()]
        return SampledSequence(
            tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            stop_reason="stop" if self._is_stopped else "length",
            topk=_stacked(self._topk) if self._topk else None,
            segments=tuple(self._segments),
            routed_experts=np.concatenate(experts) if experts else None,
        )


@dataclass(slots=True, eq=False)
class Prefill:
    """Tokens that are read, at once or in parts: a prompt, or all that a sample had when it lost its row.

    samples: those that go on from there, with rows of their own; the first one's is read into.
    start, stop: what is read in this step; all before is in the row.
    """

    job: Job
    tokens: Tensor
    samples: list[Sample]
    start: int
    stop: int = 0

    @property
    def is_last_part(self) -> bool:
        return self.stop == len(self.tokens)

    @property
    def row(self) -> Row:
        return self.samples[0].held_row

    @property
    def part(self) -> Tensor:
        return self.tokens[self.start : self.stop]

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.start


def non_finite_logits() -> PostTrainingError:
    return fail(
        Reason.NON_FINITE_LOGITS,
        "The model's logits are not finite: these weights overflow float32. Go back to an earlier checkpoint, and "
        "train on with a smaller learning rate or with grad_clip_norm.",
    )


def _stacked(rows: list[Topk]) -> Topk:
    return Topk(
        token_ids=np.concatenate([row.token_ids for row in rows]),
        logprobs=np.concatenate([row.logprobs for row in rows]),
    )
