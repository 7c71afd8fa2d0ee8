"""One sample of a call, over however many requests it takes.

More than one where the server stops at a token that the call did not name (SGLang adds the model's own EOS tokens to
every list), where weights move under a call that follows them, and where the server had to be started again.

When it ends is decided here, from its tokens, by the same rules as everywhere: SGLang looks for a stop string in about
as many of the last tokens as the string itself has, and misses one that was sampled in smaller pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from backend.generator.base import SampleCall, SampledSequence, Segment, Stop, Topk
from backend.generator.sglang.adapters import LoraSnapshot
from backend.generator.sglang.client import unreadable
from backend.generator.sglang.full_directories import FullSnapshot
from backend.generator.sglang.replies import Sampled, padded
from backend.generator.stopping import Decode, StopMatcher
from together_post_training.errors import Reason, fail

Array = np.ndarray


# None: the base model.
RunWeights = LoraSnapshot | FullSnapshot | None


class SampleRun:
    """Owned by the event loop; `take` may run in another thread while nobody else looks.

    snapshot, weights: what it goes on under. held: keeps that, for as long as the call runs.
    request: the id of the one that runs.
    """

    def __init__(
        self,
        call: SampleCall,
        index: int,
        decode: Decode | None,
        weights: RunWeights,
        held: ExitStack,
    ) -> None:
        self.call = call
        self.index = index
        self.snapshot = call.snapshot
        self.weights = weights
        self.request: str | None = None
        self.cached_tokens: int | None = None
        self.is_finished = not call.max_tokens
        self._held = held
        self._decode = decode
        self._parts: list[Sampled] = []
        self._segments: list[Segment] = []
        self._num_tokens = 0
        self._is_moved = False
        self._num_kept: int | None = None

    @property
    def num_left(self) -> int:
        return self.call.max_tokens - self._num_tokens

    @property
    def is_long_to_take(self) -> bool:
        """Whether text has to be made of its tokens."""
        return bool(self.call.stop.strings)

    @contextmanager
    def requesting(self, rid: str) -> Iterator[None]:
        """A request runs until the end; it may be ended for the sample to move."""
        self.request, self._is_moved = rid, False
        try:
            yield
        finally:
            self.request = None

    def move(self, snapshot: str, weights: RunWeights) -> None:
        hold(self._held, weights)
        self.snapshot, self.weights, self._is_moved = snapshot, weights, True

    def so_far(self) -> list[int]:
        """The prompt and its own tokens."""
        return [*self.call.prompt.tolist(), *self._tokens().tolist()]

    def take(self, part: Sampled, snapshot: str | None) -> None:
        """What a request under a snapshot's weights gave.

        Raises:
            PostTrainingError: UNAVAILABLE for one that somebody else ended.
        """
        if part.end == "abort" and not self._is_moved:
            raise fail(Reason.UNAVAILABLE, "The SGLang server was told by others to end the call.")
        if part.end != "abort" and not len(part.tokens):
            raise unreadable("no tokens")
        if self.cached_tokens is None:
            self.cached_tokens = part.cached_tokens
        if len(part.tokens):
            self._add(part, snapshot)
            stop = stop_length(self._tokens().tolist(), self.call.stop, self._decode)
            self._num_kept = stop
            self.is_finished = stop is not None or not self.num_left

    def result(self) -> SampledSequence:
        assert self.is_finished
        kept = self._num_tokens if self._num_kept is None else self._num_kept
        last = self._parts[-1]
        experts = last.experts
        return SampledSequence(
            tokens=self._tokens()[:kept],
            logprobs=np.concatenate([part.logprobs for part in self._parts])[:kept],
            stop_reason="length" if self._num_kept is None else "stop",
            topk=self._topk(kept),
            segments=self._kept_segments(kept),
            routed_experts=None if experts is None else experts[: len(self.call.prompt) + kept - 1],
        )

    def _add(self, part: Sampled, snapshot: str | None) -> None:
        if not self._segments or self._segments[-1].snapshot != snapshot:
            self._segments.append(Segment(snapshot=snapshot, first_token=self._num_tokens))
        self._parts.append(part)
        self._num_tokens += len(part.tokens)

    def _tokens(self) -> Array:
        return np.concatenate([np.empty(0, np.int32), *(part.tokens for part in self._parts)])

    def _topk(self, kept: int) -> Topk | None:
        tops = [part.topk for part in self._parts if part.topk is not None]
        if not tops:
            return None
        whole = Topk(
            token_ids=np.concatenate([top.token_ids for top in tops])[:kept],
            logprobs=np.concatenate([top.logprobs for top in tops])[:kept],
        )
        return padded(whole, self.call.topk_sample_logprobs)

    def _kept_segments(self, kept: int) -> tuple[Segment, ...]:
        """None for what was sampled as the call asked from the first token to the last."""
        segments = tuple(s for s in self._segments if s.first_token < kept)
        whole = (Segment(snapshot=self.call.snapshot),)
        return () if segments == whole else segments


def hold(held: ExitStack, weights: RunWeights) -> None:
    if weights is not None:
        held.enter_context(weights.held.hold())


def stop_length(tokens: list[int], stop: Stop, decode: Decode | None) -> int | None:
    """How many of the tokens a sample has that ends where it should; None: it goes on."""
    named = frozenset(stop.tokens)
    found = next((i + 1 for i, token in enumerate(tokens) if token in named), None)
    strings = [string for string in stop.strings if string]
    if not strings or decode is None:
        return found
    # Most often no string is there at all, which is seen at once.
    before = tokens[:found]
    text = decode(before)
    if any(string in text for string in strings):
        matcher = StopMatcher(Stop(strings=tuple(strings)), decode)
        return next((i + 1 for i, token in enumerate(before) if matcher.push(token)), found)
    return found
