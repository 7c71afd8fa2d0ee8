"""How one token is drawn from logits: the reference for every generator. Pure.

A sample's random numbers come from its own stream, keyed by its seed, and the number for a position depends on
nothing else: tokens are the same whatever is sampled beside them.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backend.generator.base import SampleCall, Topk

Array = np.ndarray

ABSENT_LOGPROB = -99999.0
_BLOCK = 256


class TokenStream:
    """The uniform numbers in [0, 1) of one sample, by position. Any seed, taken modulo 2^64."""

    def __init__(self, seed: int) -> None:
        self._seed = seed % 2**64
        self._block = -1
        self._numbers = np.empty(0)

    def uniform(self, position: int) -> float:
        block, offset = divmod(position, _BLOCK)
        if block != self._block:
            # Counter-based, so that a block is reached without drawing those before it.
            philox = np.random.Philox(key=self._seed, counter=[0, 0, 0, block])
            self._numbers, self._block = np.random.Generator(philox).random(_BLOCK), block
        return float(self._numbers[offset])


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """How each row is drawn: temperature float64 (B,), top_k int64 (B,), top_p float64 (B,).

    Temperature 0 takes the likeliest token, the lowest id among equals. top_k of 0 or below keeps all.
    """

    temperature: Array
    top_k: Array
    top_p: Array

    @classmethod
    def of(cls, calls: list[SampleCall]) -> Controls:
        """One row for each call."""
        return cls(
            temperature=np.array([c.temperature for c in calls], np.float64),
            top_k=np.array([c.top_k for c in calls], np.int64),
            top_p=np.array([c.top_p for c in calls], np.float64),
        )


def draw(logits: Array, controls: Controls, uniforms: Array) -> tuple[Array, Array]:
    """Draws a token from each row of logits, floating (B, V), by the row's number in [0, 1).

    Truncation applies in the order temperature, top_k, top_p (of what top_k left). Tokens keep the order of their
    ids in the cumulative distribution, so that keeping all of them is the same as not truncating.

    Returns:
        tokens int64 (B,), and their logprobs float64 (B,) under the untempered, untruncated distribution. A row
        that holds NaN or +inf, or nothing above -inf, gives token 0 and logprob NaN.
    """
    peaks = logits.max(axis=1)
    sound = np.isfinite(peaks)
    if not sound.all():
        logits = np.where(sound[:, None], logits, logits.dtype.type(0))
        peaks = np.where(sound, peaks, peaks.dtype.type(0))
    shifted = logits - peaks[:, None]
    masses = np.exp(shifted)
    totals = masses.sum(axis=1, dtype=np.float64)
    tokens = np.empty(len(logits), np.int64)
    for row in range(len(logits)):
        tokens[row] = _draw_row(shifted[row], masses[row], controls, row, uniforms[row])
    logprobs = shifted[np.arange(len(tokens)), tokens] - np.log(totals)
    return np.where(sound, tokens, 0), np.where(sound, logprobs, np.nan)


def topk(logits: Array, k: int) -> Topk:
    """The k likeliest tokens of each row of logits, floating (B, V); equals by ascending id."""
    num_rows, vocab_size = logits.shape
    kept = min(k, vocab_size)
    token_ids = np.zeros((num_rows, k), np.int32)
    logprobs = np.full((num_rows, k), ABSENT_LOGPROB, np.float32)
    for row, log_norm in enumerate(log_norms(logits)):
        best = likeliest(logits[row], kept)
        token_ids[row, :kept] = best
        logprobs[row, :kept] = logits[row, best] - log_norm
    return Topk(token_ids=token_ids, logprobs=logprobs)


def log_norms(logits: Array) -> Array:
    """log sum exp of each row of logits (B, V): float64 (B,)."""
    peaks = logits.max(axis=1)
    return peaks + np.log(np.exp(logits - peaks[:, None]).sum(axis=1, dtype=np.float64))


def likeliest(scores: Array, k: int) -> Array:
    """The ids of exactly the k largest of scores (V,), best first, equals by ascending id; 1 <= k <= V."""
    edge = np.partition(scores, len(scores) - k)[len(scores) - k]
    above = np.flatnonzero(scores > edge)
    kept = np.union1d(above, np.flatnonzero(scores == edge)[: k - len(above)])
    return kept[np.argsort(-scores[kept], kind="stable")]


def _draw_row(shifted: Array, masses: Array, controls: Controls, row: int, uniform: float) -> int:
    """`shifted`: logits (V,) with maximum 0; `masses`: their exponentials."""
    temperature, k, p = controls.temperature[row], controls.top_k[row], controls.top_p[row]
    if temperature == 0:
        return int(shifted.argmax())
    if temperature != 1:
        # The maximum is 0: whatever the temperature, nothing overflows but to -inf.
        with np.errstate(over="ignore"):
            masses = np.exp(shifted.astype(np.float64) / temperature)
    if 0 < k < len(masses):
        masses = _only(masses, likeliest(masses, int(k)))
    if p < 1:
        masses = _only(masses, _nucleus(masses, float(p)))
    return _invert(masses, uniform)


def _nucleus(masses: Array, p: float) -> Array:
    """The ids of the smallest set of likeliest tokens whose share of the mass reaches p."""
    wanted = p * masses.sum(dtype=np.float64)
    num_tried = 64
    while True:
        num_tried = min(num_tried, len(masses))
        ids = likeliest(masses, num_tried)
        reached = np.cumsum(masses[ids], dtype=np.float64)
        if reached[-1] >= wanted or num_tried == len(masses):
            return ids[: 1 + int(np.searchsorted(reached, wanted))]
        num_tried *= 8


def _only(masses: Array, ids: Array) -> Array:
    kept = np.zeros_like(masses)
    kept[ids] = masses[ids]
    return kept


def _invert(masses: Array, uniform: float) -> int:
    """The first token at which the cumulative mass exceeds `uniform` of the whole."""
    reached = np.cumsum(masses, dtype=np.float64)
    token = int(np.searchsorted(reached, uniform * reached[-1], side="right"))
    if token < len(masses):
        return token
    return int(np.flatnonzero(masses)[-1])  # the product was rounded up to the whole
