"""`sampling.draw` and `sampling.topk` on torch tensors: the same tokens, faster where rows keep all their tokens.

Shapes: B rows, V vocabulary, blocks of _BLOCK tokens.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from backend.generator import sampling
from backend.generator.base import Topk
from backend.generator.sampling import Controls

Array = np.ndarray

_BLOCK = 256
_LOWEST_TEMPERATURE = 1e-30


def draw(logits_BV: Tensor, controls: Controls, uniforms: Array) -> tuple[Array, Array]:
    """See `sampling.draw`, which also draws the rows that are truncated here, and all if one is not sound."""
    peaks = logits_BV.amax(dim=1, keepdim=True)
    if not bool(torch.isfinite(peaks).all()):
        return sampling.draw(logits_BV.cpu().numpy(), controls, uniforms)
    # In place: a fresh array of this size costs more to map into memory than to compute.
    masses = _blocks((logits_BV - peaks).exp_())
    sums = masses.sum(dim=2, dtype=torch.float64)
    tokens = _draw_tokens(logits_BV, masses, sums, controls, uniforms)
    chosen = (logits_BV.gather(1, tokens[:, None]) - peaks)[:, 0]
    logprobs = chosen.double() - sums.sum(dim=1).log()
    return tokens.cpu().numpy(), logprobs.cpu().numpy()


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


def _draw_tokens(
    logits: Tensor, masses: Tensor, sums: Tensor, controls: Controls, uniforms: Array
) -> Tensor:
    """int64 (B,). Rows are drawn together that are drawn in the same way."""
    vocab_size = logits.shape[1]
    keeps_all = (controls.top_p >= 1) & ((controls.top_k <= 0) | (controls.top_k >= vocab_size))
    greedy = controls.temperature == 0
    plain = keeps_all & (controls.temperature == 1)
    if plain.all():
        return _invert(masses, sums, _numbers(uniforms, logits))
    tempered, truncated = keeps_all & ~plain & ~greedy, ~keeps_all & ~greedy
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if (rows := np.flatnonzero(plain)).size:
        tokens[rows] = _invert(masses[rows], sums[rows], _numbers(uniforms[rows], logits))
    if (rows := np.flatnonzero(greedy)).size:
        tokens[rows] = logits[rows].argmax(dim=1)
    if (rows := np.flatnonzero(tempered)).size:
        tokens[rows] = _tempered(logits[rows], controls.temperature[rows], uniforms[rows])
    if (rows := np.flatnonzero(truncated)).size:
        drawn, _ = sampling.draw(logits[rows].cpu().numpy(), _only(controls, rows), uniforms[rows])
        tokens[rows] = torch.from_numpy(drawn).to(logits.device)
    return tokens


def _tempered(logits: Tensor, temperature: Array, uniforms: Array) -> Tensor:
    # Any lower, and only the maximum has mass, as here; float32 could not hold the quotients.
    divisor = _numbers(np.maximum(temperature, _LOWEST_TEMPERATURE), logits).float()
    shifted = logits - logits.amax(dim=1, keepdim=True)
    masses = _blocks(shifted.div_(divisor[:, None]).exp_())
    sums = masses.sum(dim=2, dtype=torch.float64)
    return _invert(masses, sums, _numbers(uniforms, logits))


def _numbers(array: Array, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)


def _only(controls: Controls, rows: Array) -> Controls:
    return Controls(
        temperature=controls.temperature[rows],
        top_k=controls.top_k[rows],
        top_p=controls.top_p[rows],
    )


def _blocks(masses_BV: Tensor) -> Tensor:
    """(B, blocks, _BLOCK), the last one filled up with 0."""
    missing = -masses_BV.shape[1] % _BLOCK
    if missing:
        masses_BV = F.pad(masses_BV, (0, missing))
    return masses_BV.unflatten(1, (-1, _BLOCK))


def _invert(masses: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """The first token of each row at which the cumulative mass exceeds its share `uniforms` (B,) of the whole."""
    reached = sums.cumsum(dim=1)
    wanted = uniforms[:, None] * reached[:, -1:]
    block = torch.minimum(_first_above(reached, wanted), _last_filled(reached))
    before = (reached - sums).gather(1, block)
    within = masses.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(1)
    offset = torch.minimum(_first_above(within, wanted - before), _last_filled(within))
    return (block * _BLOCK + offset)[:, 0]


def _first_above(cumulative: Tensor, wanted: Tensor) -> Tensor:
    return torch.searchsorted(cumulative, wanted, right=True)


def _last_filled(cumulative: Tensor) -> Tensor:
    """Where a cumulative sum reaches its whole: what comes after is empty. Guards against rounding."""
    return torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
