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

_BLOCK = 256


def draw(
    logits_BV: Tensor, controls: Controls, uniforms: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """See `sampling.draw`. Rows that are truncated or not sound are drawn by it."""
    peaks = logits_BV.amax(dim=1, keepdim=True)
    if not bool(torch.isfinite(peaks).all()):
        return sampling.draw(logits_BV.numpy(), controls, uniforms)
    shifted = logits_BV - peaks
    masses = _blocks(shifted.exp())
    sums = masses.sum(dim=2).double()
    tokens = _draw_tokens(shifted, masses, sums, controls, uniforms)
    chosen = shifted.gather(1, tokens[:, None])[:, 0]
    logprobs = chosen.double() - sums.sum(dim=1).log()
    return tokens.numpy(), logprobs.numpy()


def topk(logits_NV: Tensor, k: int) -> Topk:
    """See `sampling.topk`, which ranks the rows that hold ties."""
    num_kept = min(k + 1, logits_NV.shape[1])
    values, ids = logits_NV.topk(num_kept, dim=1)
    logprobs = values - logits_NV.logsumexp(dim=1, keepdim=True)
    token_ids = np.zeros((len(ids), k), np.int32)
    best = np.full((len(ids), k), sampling.ABSENT_LOGPROB, np.float32)
    token_ids[:, :num_kept] = ids[:, :k].numpy()
    best[:, :num_kept] = logprobs[:, :k].numpy()
    tied = (values[:, 1:] == values[:, :-1]).any(dim=1).numpy()
    if tied.any():
        exact = sampling.topk(logits_NV.numpy()[tied], k)
        token_ids[tied], best[tied] = exact.token_ids, exact.logprobs
    return Topk(token_ids=token_ids, logprobs=best)


def _draw_tokens(
    shifted: Tensor, masses: Tensor, sums: Tensor, controls: Controls, uniforms: np.ndarray
) -> Tensor:
    vocab_size = shifted.shape[1]
    keeps_all = (controls.top_p >= 1) & ((controls.top_k <= 0) | (controls.top_k >= vocab_size))
    is_greedy = controls.temperature == 0
    is_plain = keeps_all & (controls.temperature == 1)
    uniforms_B = torch.from_numpy(uniforms)
    if is_plain.all():
        return _invert(masses, sums, uniforms_B)
    tokens = torch.empty(len(shifted), dtype=torch.int64)
    for kind, pick in (
        (is_greedy, lambda rows: shifted[rows].argmax(dim=1)),
        (is_plain, lambda rows: _invert(masses[rows], sums[rows], uniforms_B[rows])),
        (
            keeps_all & ~is_plain & ~is_greedy,
            lambda rows: _tempered(shifted[rows], controls.temperature[rows], uniforms_B[rows]),
        ),
        (~keeps_all & ~is_greedy, lambda rows: _truncated(shifted, controls, uniforms, rows)),
    ):
        if kind.any():
            rows = torch.from_numpy(np.flatnonzero(kind))
            tokens[rows] = pick(rows)
    return tokens


def _tempered(shifted: Tensor, temperature: np.ndarray, uniforms: Tensor) -> Tensor:
    # Below this, what is not the maximum has no mass in either precision, and float32 still holds the quotient.
    divisor = torch.from_numpy(np.maximum(temperature, 1e-30)).float()
    masses = _blocks((shifted / divisor[:, None]).exp_())
    return _invert(masses, masses.sum(dim=2).double(), uniforms)


def _truncated(shifted: Tensor, controls: Controls, uniforms: np.ndarray, rows: Tensor) -> Tensor:
    chosen = rows.numpy()
    some = Controls(
        temperature=controls.temperature[chosen],
        top_k=controls.top_k[chosen],
        top_p=controls.top_p[chosen],
    )
    tokens, _ = sampling.draw(shifted[rows].numpy(), some, uniforms[chosen])
    return torch.from_numpy(tokens)


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
