"""`sampling.draw`, `draw_many` and `topk` on torch tensors: the same tokens, faster.

Shapes: B rows, V vocabulary, n draws of one row, blocks of _BLOCK tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from backend.generator import sampling
from backend.generator.base import Topk
from backend.generator.sampling import Controls
from backend.generator.truncation import draw_among_likeliest, truncate

Array = np.ndarray

_BLOCK = 256
_LOWEST_TEMPERATURE = 1e-30
_DRAWS_AT_ONCE = 16
# 32 MB of float64.
_TRUNCATED_AT_ONCE = 2**22


def draw(logits_BV: Tensor, controls: Controls, uniforms: Array) -> tuple[Array, Array]:
    """See `sampling.draw`."""
    shifted, is_sound = _shifted(logits_BV)
    masses = _blocks(shifted.exp())
    sums = masses.sum(dim=2, dtype=torch.float64)
    tokens = _draw_tokens(shifted, masses, sums, controls, uniforms)
    chosen = shifted.gather(1, tokens[:, None])
    logprobs = chosen.double() - sums.sum(dim=1, keepdim=True).log()
    logprobs = logprobs.where(is_sound, torch.nan)
    return tokens.where(is_sound[:, 0], 0).cpu().numpy(), logprobs[:, 0].cpu().numpy()


def draw_many(logits_BV: Tensor, temperature: float, uniforms: Array) -> Array:
    """See `sampling.draw_many`."""
    shifted, is_sound = _shifted(logits_BV)
    if temperature == 0:
        best = shifted.argmax(dim=1, keepdim=True)
        return best.expand(uniforms.shape).cpu().numpy()
    masses = _tempered(shifted, np.full(len(shifted), temperature))
    sums = masses.sum(dim=2, dtype=torch.float64)
    parts = _numbers(uniforms, shifted).split(_DRAWS_AT_ONCE, dim=1)
    drawn = torch.cat([_invert(masses, sums, part.contiguous()) for part in parts], dim=1)
    return drawn.where(is_sound, 0).cpu().numpy()


def apart(logits_BV: Tensor) -> Iterator[Tensor]:
    """Each row for itself, (1, V), laid out alike: what is computed of it depends on no other row."""
    return (row.clone() for row in logits_BV.split(1))


def topk(logits_NV: Tensor, k: int) -> Topk:
    """See `sampling.topk`, which ranks the rows that hold ties."""
    num_kept = min(k + 1, logits_NV.shape[1])
    values, ids = logits_NV.topk(num_kept, dim=1)
    logprobs = values - logits_NV.logsumexp(dim=1, keepdim=True)
    token_ids = np.zeros((len(ids), k), np.int32)
    best = np.full((len(ids), k), sampling.ABSENT_LOGPROB, np.float32)
    token_ids[:, :num_kept] = ids[:, :k].cpu().numpy()
    best[:, :num_kept] = logprobs[:, :k].cpu().numpy()
    tied = (values[:, 1:] == values[:, :-1]).any(dim=1).cpu().numpy()
    if tied.any():
        exact = sampling.topk(logits_NV.cpu().numpy()[tied], k)
        token_ids[tied], best[tied] = exact.token_ids, exact.logprobs
    return Topk(token_ids=token_ids, logprobs=best)


def _shifted(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Logits less each row's maximum, and which rows are sound: bool (B, 1). Others are all 0."""
    peaks = logits_BV.amax(dim=1, keepdim=True)
    is_sound = torch.isfinite(peaks)
    if not bool(is_sound.all()):
        logits_BV, peaks = logits_BV.where(is_sound, 0), peaks.where(is_sound, 0)
    return logits_BV - peaks, is_sound


def _draw_tokens(
    shifted: Tensor, masses: Tensor, sums: Tensor, controls: Controls, uniforms: Array
) -> Tensor:
    """int64 (B,). Rows are drawn together that are drawn in the same way."""
    greedy = controls.temperature == 0
    truncated = controls.truncates(shifted.shape[1]) & ~greedy
    plain = (controls.temperature == 1) & ~truncated
    numbers = _numbers(uniforms, shifted)[:, None]
    if plain.all():
        return _invert(masses, sums, numbers)[:, 0]
    tempered = ~(greedy | truncated | plain)
    tokens = torch.empty(len(shifted), dtype=torch.int64, device=shifted.device)
    if (rows := np.flatnonzero(plain)).size:
        tokens[rows] = _invert(_rows(masses, rows), _rows(sums, rows), numbers[rows])[:, 0]
    if (rows := np.flatnonzero(greedy)).size:
        tokens[rows] = _rows(shifted, rows).argmax(dim=1)
    if (rows := np.flatnonzero(tempered)).size:
        some = _tempered(_rows(shifted, rows), controls.temperature[rows])
        tokens[rows] = _invert(some, some.sum(dim=2, dtype=torch.float64), numbers[rows])[:, 0]
    if (rows := np.flatnonzero(truncated)).size:
        drawn = _truncated(
            _rows(shifted, rows), _rows(sums, rows), controls.rows(rows), uniforms[rows]
        )
        tokens[rows] = _numbers(drawn, shifted)
    return tokens


def _tempered(shifted: Tensor, temperature: Array) -> Tensor:
    """Masses by blocks."""
    # Any lower, and only the maximum has mass, as here; float32 could not hold the quotients.
    divisor = _numbers(np.maximum(temperature, _LOWEST_TEMPERATURE), shifted).float()
    return _blocks(shifted.div(divisor[:, None]).exp_())


def _truncated(shifted: Tensor, sums: Tensor, controls: Controls, uniforms: Array) -> Array:
    """int64 (B,)."""
    totals = sums.sum(dim=1)
    if (rows := np.flatnonzero((controls.top_p < 1) & (controls.temperature != 1))).size:
        some = _tempered(_rows(shifted, rows), controls.temperature[rows])
        totals[rows] = some.sum(dim=2, dtype=torch.float64).sum(dim=1)
    tokens, is_drawn = draw_among_likeliest(shifted, totals.cpu().numpy(), controls, uniforms)
    left = np.flatnonzero(~is_drawn)
    at_once = max(1, _TRUNCATED_AT_ONCE // shifted.shape[1])
    for start in range(0, len(left), at_once):
        rows = left[start : start + at_once]
        some = _rows(shifted, rows)
        tokens[rows] = _truncated_exactly(some, controls.rows(rows), uniforms[rows])
    return tokens


def _truncated_exactly(shifted: Tensor, controls: Controls, uniforms: Array) -> Array:
    """In float64: where the nucleus of a flat distribution ends would be a matter of rounding otherwise."""
    masses = shifted.double()
    if (controls.temperature != 1).any():
        masses.div_(_numbers(controls.temperature, shifted)[:, None])
    truncate(shifted, masses.exp_(), controls)
    blocks = _blocks(masses)
    drawn = _invert(blocks, blocks.sum(dim=2), _numbers(uniforms, shifted)[:, None])
    return drawn[:, 0].cpu().numpy()


def _rows(tensor: Tensor, rows: Array) -> Tensor:
    """Copied, unless it is all of them."""
    return tensor if len(rows) == len(tensor) else tensor[rows]


def _numbers(array: Array, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)


def _blocks(masses_BV: Tensor) -> Tensor:
    """(B, blocks, _BLOCK), the last one filled up with 0."""
    missing = -masses_BV.shape[1] % _BLOCK
    if missing:
        masses_BV = F.pad(masses_BV, (0, missing))
    return masses_BV.unflatten(1, (-1, _BLOCK))


def _invert(masses: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """The first token of each row at which the cumulative mass exceeds its share `uniforms` (B, n) of the whole."""
    reached = sums.cumsum(dim=1)
    wanted = uniforms * reached[:, -1:]
    block = torch.minimum(_first_above(reached, wanted), _last_filled(reached))
    before = (reached - sums).gather(1, block)
    rows = torch.arange(len(masses), device=masses.device)[:, None]
    within = masses[rows, block].double().cumsum(dim=2)
    offset = torch.minimum(
        _first_above(within, (wanted - before)[:, :, None]), _last_filled(within)
    )
    return block * _BLOCK + offset[:, :, 0]


def _first_above(cumulative: Tensor, wanted: Tensor) -> Tensor:
    return torch.searchsorted(cumulative, wanted, right=True)


def _last_filled(cumulative: Tensor) -> Tensor:
    """Where a cumulative sum reaches its whole: what comes after is empty. Guards against rounding."""
    return torch.searchsorted(cumulative, cumulative[..., -1:].contiguous())
