"""How one token is drawn from logits: the reference for every generator. Pure.

A sample's random numbers come from its own stream, keyed by its seed, and the number for a position depends on
nothing else: tokens are the same whatever is sampled beside them. Alternatives to a prompt's tokens have a stream of
their own, so that asking for them changes no sample.

Truncation applies in the order temperature, top_k, top_p (of what top_k left), min_p, as in SGLang on GPUs. (vLLM has
min_p before the other two, so there top_p is of less.)

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from backend.generator.base import SampleCall, Topk

Array = np.ndarray

ABSENT_LOGPROB = -99999.0
MAX_ALTERNATIVES = 128

_BLOCK = 128
_NUMBERS_AT_ONCE = 256
_NUMBERS_PER_COUNT = 4  # what Philox4x64 gives for each step of its counter


class TokenStream:
    """The uniform numbers in [0, 1) of one sample, by position. Any seed, taken modulo 2^64."""

    def __init__(self, seed: int) -> None:
        self._seed = seed % 2**64
        self._block = -1
        self._numbers = np.empty(0)

    def uniform(self, position: int) -> float:
        block, offset = divmod(position, _NUMBERS_AT_ONCE)
        if block != self._block:
            # Counter-based, so that a block is reached without drawing those before it.
            philox = np.random.Philox(key=self._seed, counter=[0, 0, 0, block])
            self._numbers, self._block = np.random.Generator(philox).random(_NUMBERS_AT_ONCE), block
        return float(self._numbers[offset])


def alternative_uniforms(seed: int, start: int, stop: int, num: int) -> Array:
    """The numbers in [0, 1) that draw alternatives at positions start to stop: float64 (stop - start, num).

    Number j of a position depends on seed, position and j alone. The second word of the generator's key sets the
    stream apart from that of `TokenStream`.
    """
    assert num <= MAX_ALTERNATIVES
    first = start * MAX_ALTERNATIVES // _NUMBERS_PER_COUNT
    key = np.array([seed % 2**64, 1], np.uint64)
    philox = np.random.Philox(key=key, counter=[first, 0, 0, 0])
    numbers = np.random.Generator(philox).random((stop - start, MAX_ALTERNATIVES))
    return numbers[:, :num]


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """How each row is drawn: temperature float64 (B,), top_k int64 (B,), top_p float64 (B,), min_p float64 (B,).

    Temperature 0 takes the likeliest token, the lowest id among equals. top_k of 0 or below keeps all, and so do top_p
    of 1 and min_p of 0.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array

    @classmethod
    def of(cls, calls: list[SampleCall]) -> Controls:
        """One row for each call."""
        return cls(
            temperature=np.array([c.temperature for c in calls], np.float64),
            top_k=np.array([c.top_k for c in calls], np.int64),
            top_p=np.array([c.top_p for c in calls], np.float64),
            min_p=np.array([c.min_p for c in calls], np.float64),
        )

    def rows(self, rows: Array) -> Controls:
        """Of these rows alone."""
        return Controls(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
        )

    def truncates(self, vocab_size: int) -> Array:
        """Which rows may lose tokens: bool (B,)."""
        has_top_k = (self.top_k > 0) & (self.top_k < vocab_size)
        return has_top_k | (self.top_p < 1) | (self.min_p > 0)


def draw(logits: Array, controls: Controls, uniforms: Array) -> tuple[Array, Array]:
    """Draws a token from each row of logits, floating (B, V), by the row's number in [0, 1).

    Tokens keep the order of their ids in the cumulative distribution, so that keeping all of them is
    the same as not truncating.

    Returns:
        tokens int64 (B,), and their logprobs float64 (B,) under the untempered, untruncated
        distribution. A row that holds NaN or +inf, or nothing above -inf, gives token 0 and
        logprob NaN.
    """
    peaks = logits.max(axis=1)
    is_sound = np.isfinite(peaks)
    if not is_sound.all():
        logits = np.where(is_sound[:, None], logits, logits.dtype.type(0))
        peaks = np.where(is_sound, peaks, peaks.dtype.type(0))
    shifted = logits - peaks[:, None]
    masses = np.exp(shifted)
    tokens = np.empty(len(logits), np.int64)
    log_totals = np.empty(len(logits), np.float64)
    truncates = controls.truncates(logits.shape[1])
    for row in range(len(logits)):
        tokens[row], log_totals[row] = _draw_row(
            shifted[row], masses[row], controls, row, truncates[row], uniforms[row]
        )
    logprobs = shifted[np.arange(len(tokens)), tokens] - log_totals
    return np.where(is_sound, tokens, 0), np.where(is_sound, logprobs, np.nan)


def draw_many(logits: Array, temperature: float, uniforms: Array) -> Array:
    """Draws n tokens from each row of logits (B, V), with replacement and without truncation, by its numbers (B, n).

    Returns int64 (B, n).
    """
    peaks = logits.max(axis=1, keepdims=True)
    tokens = np.zeros(uniforms.shape, np.int64)
    for row in np.flatnonzero(np.isfinite(peaks)):
        shifted = logits[row] - peaks[row]
        if temperature == 0:
            tokens[row] = shifted.argmax()
            continue
        masses = _masses(shifted, temperature)
        sums = _block_sums(masses)
        tokens[row] = [_invert(masses, sums, number) for number in uniforms[row].tolist()]
    return tokens


def topk(logits: Array, k: int) -> Topk:
    """The k likeliest tokens of each row of logits, floating (B, V); equals by ascending id."""
    num_rows, vocab_size = logits.shape
    num_kept = min(k, vocab_size)
    token_ids = np.zeros((num_rows, k), np.int32)
    logprobs = np.full((num_rows, k), ABSENT_LOGPROB, np.float32)
    for row, log_norm in enumerate(log_norms(logits)):
        ids = _largest(logits[row], num_kept)
        best = ids[np.argsort(-logits[row, ids], kind="stable")]
        token_ids[row, :num_kept] = best
        logprobs[row, :num_kept] = logits[row, best] - log_norm
    return Topk(token_ids=token_ids, logprobs=logprobs)


def log_norms(logits: Array) -> Array:
    """log sum exp of each row of logits (B, V): float64 (B,)."""
    peaks = logits.max(axis=1)
    return peaks + np.log(np.exp(logits - peaks[:, None]).sum(axis=1, dtype=np.float64))


def _draw_row(
    shifted: Array, masses: Array, controls: Controls, row: int, truncates: bool, uniform: float
) -> tuple[int, float]:
    """(token, log of the untempered total). `shifted`: logits (V,) with maximum 0; `masses`: their exponentials."""
    sums = _block_sums(masses)
    log_total = math.log(sums.sum())
    temperature = controls.temperature[row]
    if temperature == 0:
        return int(shifted.argmax()), log_total
    if temperature == 1 and not truncates:
        return _invert(masses, sums, uniform), log_total
    masses = _masses(shifted, temperature)
    if truncates:
        ids = _kept(shifted, masses, controls, row)
        masses = masses[ids]
        return int(ids[_invert(masses, _block_sums(masses), uniform)]), log_total
    return _invert(masses, _block_sums(masses), uniform), log_total


def _masses(shifted: Array, temperature: float) -> Array:
    # The maximum is 0: whatever the temperature, nothing overflows but to -inf.
    with np.errstate(over="ignore"):
        return np.exp(shifted.astype(np.float64) / temperature)


def _kept(shifted: Array, masses: Array, controls: Controls, row: int) -> Array:
    """The ids that are left, ascending. Of equals the lowest come first."""
    k, p, min_p = int(controls.top_k[row]), controls.top_p[row], controls.min_p[row]
    ids = np.argsort(-shifted, kind="stable")
    if k > 0:
        ids = ids[:k]
    if p < 1:
        ids = ids[: nucleus_size(np.cumsum(masses[ids]), p)]
    # The likeliest has mass 1.
    return np.sort(ids[masses[ids] >= min_p])


def nucleus_size(reached: Array, p: float) -> int:
    """How many of the likeliest tokens it takes for a share p; `reached` (n,): their masses added up, best first."""
    return 1 + int(np.searchsorted(reached, p * reached[-1]))


def _largest(scores: Array, k: int) -> Array:
    """The ids, ascending, of exactly the k largest of scores (V,), 1 <= k <= V; of equals the lowest."""
    return _first_above(scores, np.partition(scores, len(scores) - k)[len(scores) - k], k)


def _first_above(scores: Array, edge: float, k: int) -> Array:
    """The first k ids, ascending, of scores not below `edge`, the k-th largest: ties go to the lowest ids."""
    ids = np.flatnonzero(scores >= edge)
    surplus = len(ids) - k
    if not surplus:
        return ids
    return np.delete(ids, np.flatnonzero(scores[ids] == edge)[-surplus:])


def _block_sums(masses: Array) -> Array:
    starts = np.arange(0, len(masses), _BLOCK)
    return np.add.reduceat(masses, starts, dtype=np.float64)


def _invert(masses: Array, sums: Array, uniform: float) -> int:
    """The first token at which the cumulative mass exceeds `uniform` of the whole.

    By blocks: a cumulative sum over the whole vocabulary would cost more than everything else. For
    a float64 `uniform` below 1 the product below is rounded to less than the whole.
    """
    reached = np.cumsum(sums)
    wanted = uniform * reached[-1]
    block = int(np.searchsorted(reached, wanted, side="right"))
    start = block * _BLOCK
    within = np.cumsum(masses[start : start + _BLOCK], dtype=np.float64)
    before = reached[block - 1] if block else 0.0
    offset = int(np.searchsorted(within, wanted - before, side="right"))
    if offset == len(within):  # the two sums of this block were rounded differently
        offset = int(np.flatnonzero(masses[start : start + _BLOCK])[-1])
    return start + offset
