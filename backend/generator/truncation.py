"""Draws under top_k, top_p and min_p on torch tensors: the tokens of `sampling.draw`.

Vocabularies are not sorted. What is kept is a row's tokens down to some logit, the edge, and mostly the edge is among
the likeliest few, which are then all that is looked at. Otherwise, as in flat distributions, the masses of the whole
row are added up in buckets of logits, and the bucket in which the nucleus ends is sorted.

Shapes: B rows, V vocabulary, n likeliest tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from backend.generator.sampling import Controls, nucleus_size

Array = np.ndarray

_NUM_LIKELIEST = 128
# Sums of a row's float32 masses are closer than that.
_ROUGHNESS = 1e-6
_NUM_BUCKETS = 2048
# Buckets end where a token is e^-32 times as likely as the likeliest; the last one has all the others.
_REACH = 32.0
_SMALLEST_RANGE = 1e-30


def draw_among_likeliest(
    shifted_BV: Tensor, rough_totals: Array, controls: Controls, uniforms: Array
) -> tuple[Array, Array]:
    """Draws the rows that keep none but their likeliest tokens.

    shifted_BV: float32 logits, less each row's maximum. rough_totals: float64 (B,), the sum of each row's masses, to
        _ROUGHNESS; not looked at where top_k limits a row, or top_p does not.

    Returns:
        tokens int64 (B,), and for which rows they are valid, bool (B,).
    """
    vocab_size = shifted_BV.shape[1]
    best, ids = shifted_BV.topk(min(_NUM_LIKELIEST + 1, vocab_size), dim=1)
    best, ids = best.cpu().numpy(), ids.cpu().numpy()
    with np.errstate(over="ignore"):
        masses = np.exp(best.astype(np.float64) / controls.temperature[:, None])
    sizes, is_known = _sizes(masses, rough_totals, controls, vocab_size)
    return _inverted(ids, masses, sizes, uniforms), is_known & ~_is_tied(best, sizes)


def _sizes(
    masses: Array, rough_totals: Array, controls: Controls, vocab_size: int
) -> tuple[Array, Array]:
    """How many of the likeliest tokens, with masses (B, n), are kept, and where that can be told from them."""
    num_rows, n = masses.shape
    top_k = _limits(controls, vocab_size)
    reached = masses.cumsum(axis=1)
    totals = np.where(
        top_k <= n, reached[np.arange(num_rows), np.minimum(top_k, n) - 1], rough_totals
    )
    wanted = (controls.top_p * totals)[:, None]
    has_nucleus = controls.top_p < 1
    # Where it ends beyond these tokens, this is n + 1.
    nucleus = np.where(has_nucleus, 1 + (reached < wanted).sum(axis=1), vocab_size)
    likely = (masses >= controls.min_p[:, None]) & (masses > 0)  # none is drawn without mass
    num_likely = np.where(likely.all(axis=1), vocab_size, likely.sum(axis=1))
    sizes = np.minimum(np.minimum(top_k, nucleus), num_likely)
    is_close = (np.abs(reached - wanted) <= _ROUGHNESS * wanted).any(axis=1)
    is_unknown = has_nucleus & (top_k > n) & (is_close | (top_k < vocab_size))
    is_known = ~is_unknown & ((sizes < n) | (n == vocab_size))
    return np.minimum(sizes, n), is_known


def _is_tied(best: Array, sizes: Array) -> Array:
    """Whether the first token that is not kept is as likely as the last that is: bool (B,)."""
    rows, n = np.arange(len(best)), best.shape[1]
    return (sizes < n) & (best[rows, sizes - 1] == best[rows, np.minimum(sizes, n - 1)])


def _inverted(ids: Array, masses: Array, sizes: Array, uniforms: Array) -> Array:
    """The tokens that the numbers draw among the first `sizes` of each row, in the order of their ids."""
    rows, n = np.arange(len(ids)), ids.shape[1]
    is_kept = np.arange(n) < sizes[:, None]
    order = np.where(is_kept, ids, np.iinfo(np.int64).max).argsort(axis=1)
    reached = np.take_along_axis(masses * is_kept, order, axis=1).cumsum(axis=1)
    places = (reached <= uniforms[:, None] * reached[:, -1:]).sum(axis=1)
    return ids[rows, order[rows, np.minimum(places, sizes - 1)]]


def truncate(shifted_BV: Tensor, masses_BV: Tensor, controls: Controls) -> None:
    """Sets the masses of tokens that are not kept to 0: the way that serves every row.

    shifted_BV: float32 logits, less each row's maximum. masses_BV: float64, exp of those over the temperature.
    """
    vocab_size = shifted_BV.shape[1]
    top_k = _limits(controls, vocab_size)
    edges = np.full(len(top_k), -np.inf, np.float32)
    num_tied = np.zeros(len(top_k), np.int64)
    if (rows := np.flatnonzero(top_k < vocab_size)).size:
        edges[rows], num_tied[rows] = _edges_of_top_k(
            shifted_BV[rows], masses_BV[rows], top_k[rows], controls.top_p[rows]
        )
    if (rows := np.flatnonzero((top_k == vocab_size) & (controls.top_p < 1))).size:
        is_all = len(rows) == len(top_k)
        edges[rows], num_tied[rows] = _edges_of_top_p(
            shifted_BV if is_all else shifted_BV[rows],
            masses_BV if is_all else masses_BV[rows],
            controls.rows(rows),
        )
    kept = shifted_BV >= _like(edges, shifted_BV)
    for row in np.flatnonzero(num_tied):
        equal = (shifted_BV[row] == float(edges[row])).nonzero()[:, 0]
        kept[row, equal[num_tied[row] :]] = False
    if (controls.min_p > 0).any():
        kept &= masses_BV >= _like(controls.min_p, shifted_BV)
    masses_BV.mul_(kept)


def _edges_of_top_k(
    shifted: Tensor, masses: Tensor, top_k: Array, top_p: Array
) -> tuple[Array, Array]:
    """The edge of each row; and, unless all tokens that are equal to it are kept, how many of those are."""
    num_best = min(int(top_k.max()) + 1, shifted.shape[1])
    best, ids = shifted.topk(num_best, dim=1)
    best, ordered = best.cpu().numpy(), masses.gather(1, ids).cpu().numpy()
    edges, num_tied = np.empty(len(top_k), np.float32), np.empty(len(top_k), np.int64)
    for row, (k, p) in enumerate(zip(top_k, top_p, strict=True)):
        size = nucleus_size(np.cumsum(ordered[row, :k]), p) if p < 1 else k
        edges[row], num_tied[row] = _edge(best[row], size)
    return edges, num_tied


def _edges_of_top_p(shifted: Tensor, masses: Tensor, controls: Controls) -> tuple[Array, Array]:
    """The same, for rows without top_k."""
    wanted = controls.top_p * masses.sum(dim=1).cpu().numpy()
    lowest = -shifted.amin(dim=1).cpu().numpy()
    span = np.clip(
        lowest, _SMALLEST_RANGE, np.maximum(_REACH * controls.temperature, _SMALLEST_RANGE)
    )
    scale = _like((-_NUM_BUCKETS / span).astype(np.float32), shifted)
    buckets = (shifted * scale).clamp_(max=_NUM_BUCKETS - 1).long()
    sums = masses.new_zeros(len(masses), _NUM_BUCKETS).scatter_add_(1, buckets, masses)
    reached = sums.cumsum(dim=1).cpu().numpy()
    last = np.minimum((reached < wanted[:, None]).sum(axis=1), _NUM_BUCKETS - 1)
    rows, ids = (buckets == _like(last, shifted)).nonzero(as_tuple=True)
    bounds = np.searchsorted(rows.cpu().numpy(), np.arange(1, len(last)))
    values = np.split(shifted[rows, ids].cpu().numpy(), bounds)
    parts = np.split(masses[rows, ids].cpu().numpy(), bounds)
    edges, num_tied = np.empty(len(last), np.float32), np.empty(len(last), np.int64)
    for row, (logits, part) in enumerate(zip(values, parts, strict=True)):
        before = reached[row, last[row] - 1] if last[row] else 0.0
        order = np.argsort(-logits)
        size = 1 + int(np.searchsorted(before + np.cumsum(part[order]), wanted[row]))
        edges[row], num_tied[row] = _edge(logits[order], min(size, len(order)))
    return edges, num_tied


def _edge(values: Array, size: int) -> tuple[np.float32, int]:
    """The edge of the first `size` of values, which fall; and, if the next is equal to it, how many of these are."""
    edge = values[size - 1]
    is_tied = size < len(values) and values[size] == edge
    return edge, int(np.count_nonzero(values[:size] == edge)) if is_tied else 0


def _limits(controls: Controls, vocab_size: int) -> Array:
    """top_k with `vocab_size` for all."""
    is_limited = (controls.top_k > 0) & (controls.top_k < vocab_size)
    return np.where(is_limited, controls.top_k, vocab_size)


def _like(column: Array, tensor: Tensor) -> Tensor:
    """(B, 1), where `tensor` is."""
    return torch.from_numpy(column).to(tensor.device)[:, None]
