"""Products and attention of which no row depends on what is computed beside it, bit for bit.

A library chooses how to add up a row of a product by the number of rows, and another order is another rounding. Here
every product has one of a few numbers of rows (`SIZES` in a forward, `PART_ROWS` where tokens are computed apart, as
under an adapter or by an expert); the last ones are filled up. Attention is computed for each token by itself, with
its own keys and no others: whether it is read in a prompt, in any part of one, or sampled.

What is left to the library is that a row comes out the same in each place, and with each of those numbers of rows. That
is looked at before it is relied on: here for parts, in `invariant_runner` for whole forwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.generator.attention import Part
from backend.generator.kv_cache import Pool
from backend.generator.lora import Products, Span
from backend.trainer import storage
from together_post_training.errors import PostTrainingError, Reason, fail

# Functions are computed for whole vectors of numbers, at most 32 at a time, and for what is left in another way, which
# may be another rounding. In tiles of these sizes nothing is left.
SIZES = (32, 64, 96, 128, 256)
# Nor in these, where the numbers that a token has are divisible by FEW_DIVISOR.
FEW_SIZES = (8, 16)
FEW_DIVISOR = 4
PART_ROWS = 16
# Libraries compute the edge of a matrix in other ways than its middle. Narrow ones are all edge: with MKL 2024.2, rows
# of fewer than 12 columns depend on their place.
RANK_MULTIPLE = 16


def tiles(num_rows: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, stop, size): all rows, in tiles of these sizes (ascending), of which only the last is not full."""
    start = 0
    while num_rows - start > sizes[-1]:
        yield start, start + sizes[-1], sizes[-1]
        start += sizes[-1]
    if start < num_rows:
        yield start, num_rows, next(s for s in sizes if s >= num_rows - start)


def filled_up(x: Tensor, num_rows: int) -> Tensor:
    """With as many rows, the last ones 0."""
    missing = num_rows - len(x)
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


def cut(spans: Sequence[Span], start: int, stop: int) -> list[Span]:
    """What of the spans lies between, counted from `start`."""
    inside = [Span(max(s.start, start), min(s.stop, stop), s.weights) for s in spans]
    return [Span(s.start - start, s.stop - start, s.weights) for s in inside if s.start < s.stop]


def _part_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    _check_places(tuple(weight_OI.shape), weight_OI.stride(), x_TI.dtype)
    return _in_parts(x_TI, lambda rows: storage.linear(rows, weight_OI, bias_O))


def _add_product(y: Tensor, x: Tensor, a_t: Tensor, b_t: Tensor) -> None:
    for weight in (a_t.T, b_t.T):
        _check_places(tuple(weight.shape), weight.stride(), a_t.dtype)
    # Numbers added one by one are rounded alike everywhere, unlike those that a product adds up.
    y.add_(_in_parts(x.to(a_t.dtype), lambda rows: rows.mm(a_t).mm(b_t)))


PRODUCTS = Products(linear=storage.linear, part_linear=_part_linear, add_product=_add_product)


def _in_parts(x_TI: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    parts = x_TI.split(PART_ROWS)
    return torch.cat([multiply(filled_up(part, PART_ROWS))[: len(part)] for part in parts])


@functools.cache
def _check_places(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises UNIMPLEMENTED where the same row is not the same in every place of a product with such a weight."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    weight = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    weight.normal_(generator=generator)
    row = torch.randn(1, shape[1], generator=generator, device="cpu").to(dtype)
    rows = F.linear(row.expand(PART_ROWS, -1).contiguous(), weight)
    if not torch.equal(rows, rows[:1].expand_as(rows)):
        raise unsound(f"in a product of {PART_ROWS} rows with a matrix {list(shape)}")


def unsound(where: str) -> PostTrainingError:
    return fail(
        Reason.UNIMPLEMENTED,
        f"Batch-invariant generation needs products in which equal rows come out equal, bit for bit, and here they do "
        f"not: {where}. Sample without it; log-probabilities then move by about 1e-6 with what is sampled beside them.",
        where=where,
    )


class TokenPlan:
    """Attention of each token by itself: the same call for it, whatever else there is.

    Args:
        parts: of sequences, one after another, as many tokens as are in the tile or fewer; what is left is not looked
            at by anyone.
    """

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self._tokens = [
            (part.row, position)
            for part in parts
            for position in range(part.start, part.start + part.num_tokens)
        ]
        by_pool: dict[Pool, list[tuple[int, int]]] = {}
        for token, (row, position) in enumerate(self._tokens):
            place = row.index * row.pool.capacity + position
            by_pool.setdefault(row.pool, []).append((token, place))
        self._stores = [
            (pool, *torch.tensor(pairs, device=device).unbind(1)) for pool, pairs in by_pool.items()
        ]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        """See `attention.Plan`."""
        q_T, k_T, v_T = (x[0].transpose(0, 1) for x in (query, key, value))
        for pool, tokens, places in self._stores:
            pool.write(layer, places, k_T.index_select(0, tokens), v_T.index_select(0, tokens))
        # The heads that share keys are queries of one head.
        q_TKGD = q_T.unflatten(1, (key.shape[1], -1)).contiguous()
        attended = []
        for (row, position), q_1KGD in zip(self._tokens, q_TKGD.split(1), strict=False):
            first = 0 if window is None else max(0, position + 1 - window)
            keys, values = row.pool.read_row(layer, row.index, position + 1)
            if first:
                keys, values = keys[:, first:], values[:, first:]
            attended.append(
                F.scaled_dot_product_attention(q_1KGD, keys[None], values[None], scale=scale)
            )
        return filled_up(torch.cat(attended), len(q_T)).flatten(1, 2)[None]
