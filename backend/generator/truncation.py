"""Which tokens top_k, top_p and min_p leave, on torch tensors: those that `sampling.draw` keeps.

Vocabularies are not sorted: what is kept are the tokens down to some logit, the edge. A row's edge is among its
likeliest tokens, or, where the distribution is flat, in the bucket of logits in which the nucleus ends.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from backend.generator.sampling import Controls, nucleus_size

Array = np.ndarray

# Most nuclei are no larger.
_NUM_LIKELIEST = 64
_NUM_BUCKETS = 2048
# Buckets end where a token is e^-32 times as likely as the likeliest; the last one has all the others.
_REACH = 32.0
_SMALLEST_RANGE = 1e-30


def truncate(shifted_BV: Tensor, masses_BV: Tensor, controls: Controls) -> None:
    """Sets the masses of tokens that are not kept to 0.

    shifted_BV: float32 logits, less each row's maximum. masses_BV: float64, exp of those over the temperature.
    """
    vocab_size = shifted_BV.shape[1]
    top_k = np.where(controls.top_k > 0, np.minimum(controls.top_k, vocab_size), vocab_size)
    edges, ties = np.full(len(top_k), -np.inf, np.float32), np.full(len(top_k), vocab_size)
    if (rows := np.flatnonzero(top_k < vocab_size)).size:
        edges[rows], ties[rows] = _edges_of_top_k(
            shifted_BV[rows], masses_BV[rows], top_k[rows], controls.top_p[rows]
        )
    if (rows := np.flatnonzero((top_k == vocab_size) & (controls.top_p < 1))).size:
        edges[rows], ties[rows] = _edges_of_top_p(
            shifted_BV[rows],
            masses_BV[rows],
            controls.temperature[rows],
            controls.top_p[rows],
        )
    kept = shifted_BV >= _like(edges, shifted_BV)
    _drop_surplus(kept, shifted_BV, edges, ties)
    if (controls.min_p > 0).any():
        kept &= masses_BV >= _like(controls.min_p, shifted_BV)
    masses_BV.mul_(kept)


def _edges_of_top_k(
    shifted: Tensor, masses: Tensor, top_k: Array, top_p: Array
) -> tuple[Array, Array]:
    """The edge of each row, and how many of the tokens that are equal to it are kept."""
    best, ids = shifted.topk(int(top_k.max()), dim=1)
    best, ordered = best.cpu().numpy(), masses.gather(1, ids).cpu().numpy()
    edges, ties = np.empty(len(top_p), np.float32), np.empty(len(top_p), np.int64)
    for row, (k, p) in enumerate(zip(top_k, top_p, strict=True)):
        size = nucleus_size(np.cumsum(ordered[row, :k]), p) if p < 1 else k
        edges[row], ties[row] = _edge(best[row], size)
    return edges, ties


def _edges_of_top_p(
    shifted: Tensor, masses: Tensor, temperature: Array, top_p: Array
) -> tuple[Array, Array]:
    """The same. Nuclei that end among the likeliest few tokens are found there, others by `_in_buckets`."""
    wanted = top_p * masses.sum(dim=1).cpu().numpy()
    edges, ties = np.empty(len(top_p), np.float32), np.empty(len(top_p), np.int64)
    num_likeliest = min(_NUM_LIKELIEST, shifted.shape[1])
    is_open = np.ones(len(top_p), bool)
    # The likeliest token has mass 1, so none has more.
    if (rows := np.flatnonzero(wanted <= num_likeliest)).size:
        best, ids = shifted[rows].topk(num_likeliest, dim=1)
        best, ordered = best.cpu().numpy(), masses[rows].gather(1, ids).cpu().numpy()
        for row, values, reached in zip(rows, best, ordered.cumsum(axis=1), strict=True):
            if reached[-1] >= wanted[row]:
                size = 1 + int(np.searchsorted(reached, wanted[row]))
                edges[row], ties[row] = _edge(values, size)
                is_open[row] = False
    if (rows := np.flatnonzero(is_open)).size:
        edges[rows], ties[rows] = _in_buckets(
            shifted[rows], masses[rows], temperature[rows], wanted[rows]
        )
    return edges, ties


def _in_buckets(
    shifted: Tensor, masses: Tensor, temperature: Array, wanted: Array
) -> tuple[Array, Array]:
    """Adds masses up by buckets of logits, and sorts the one bucket in which `wanted` (B,) is reached."""
    lowest = -shifted.amin(dim=1, keepdim=True).cpu().numpy()[:, 0]
    span = np.clip(lowest, _SMALLEST_RANGE, np.maximum(_REACH * temperature, _SMALLEST_RANGE))
    scale = _like((_NUM_BUCKETS / span).astype(np.float32), shifted)
    buckets = (shifted * -scale).clamp_(max=_NUM_BUCKETS - 1).long()
    sums = masses.new_zeros(len(masses), _NUM_BUCKETS).scatter_add_(1, buckets, masses)
    reached = sums.cumsum(dim=1).cpu().numpy()
    last = np.minimum((reached < wanted[:, None]).sum(axis=1), _NUM_BUCKETS - 1)
    inside = buckets == _like(last, shifted)
    bounds = inside.sum(dim=1).cumsum(dim=0)[:-1].cpu().numpy()
    values = np.split(shifted[inside].cpu().numpy(), bounds)
    parts = np.split(masses[inside].cpu().numpy(), bounds)
    edges, ties = np.empty(len(wanted), np.float32), np.empty(len(wanted), np.int64)
    for row, (logits, part) in enumerate(zip(values, parts, strict=True)):
        before = reached[row, last[row] - 1] if last[row] else 0.0
        order = np.argsort(-logits)
        size = 1 + int(np.searchsorted(before + np.cumsum(part[order]), wanted[row]))
        edges[row], ties[row] = _edge(logits[order], min(size, len(order)))
    return edges, ties


def _edge(values: Array, size: int) -> tuple[np.float32, int]:
    """The edge of the first `size` of values, which fall, and how many of those are equal to it."""
    edge = values[size - 1]
    return edge, int(np.count_nonzero(values[:size] == edge))


def _drop_surplus(kept: Tensor, shifted: Tensor, edges: Array, ties: Array) -> None:
    """Of tokens equal to the edge, the first are kept, so many."""
    equal = shifted == _like(edges, shifted)
    for row in np.flatnonzero(equal.sum(dim=1).cpu().numpy() > ties):
        surplus = equal[row].nonzero()[ties[row] :, 0]
        kept[row, surplus] = False


def _like(column: Array, tensor: Tensor) -> Tensor:
    """(B, 1), where `tensor` is."""
    return torch.from_numpy(column).to(tensor.device)[:, None]
