"""Matrices that are kept in bfloat16 and computed with in float32.

A model then takes half the memory, and its numbers are those of a float32 model whose weights were rounded once: on a
CPU that costs little time (a product of 256 rows is 5% slower), no accuracy, and no special instructions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.modeling_utils import PreTrainedModel

# Weights that are converted at a time: 4 MB of float32, which the cache holds until they are multiplied.
_BLOCK_VALUES = 2**20


def product(x_TI: Tensor, weight_OI: Tensor, out: Tensor | None = None) -> Tensor:
    """x W^T in the dtype of x, (T, O), whatever that of W is. `out` may be a part of a larger matrix's columns."""
    if weight_OI.dtype == x_TI.dtype:
        return torch.mm(x_TI, weight_OI.T, out=out)
    y_TO = x_TI.new_empty(len(x_TI), len(weight_OI)) if out is None else out
    for start, block_BI in _blocks(weight_OI, x_TI.dtype):
        torch.mm(x_TI, block_BI.T, out=y_TO[:, start : start + len(block_BI)])
    return y_TO


def back_product(grad_TO: Tensor, weight_OI: Tensor, out: Tensor | None = None) -> Tensor:
    """G W in the dtype of G, (T, I), whatever that of W is."""
    if weight_OI.dtype == grad_TO.dtype:
        return torch.mm(grad_TO, weight_OI, out=out)
    x_TI = grad_TO.new_zeros(len(grad_TO), weight_OI.shape[1]) if out is None else out.zero_()
    for start, block_BI in _blocks(weight_OI, grad_TO.dtype):
        x_TI.addmm_(grad_TO[:, start : start + len(block_BI)], block_BI)
    return x_TI


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear in the dtype of x, whatever that of the weight is, which gets no gradient then."""
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    y = _Linear.apply(x, weight)
    return y if bias is None else y + bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return product(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        (weight,) = ctx.saved_tensors
        grad_x = back_product(grad_y.flatten(0, -2), weight)
        return grad_x.unflatten(0, grad_y.shape[:-1]), None


class StoredLinear(nn.Linear):
    """Computes in the dtype of its input."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class StoredEmbedding(nn.Embedding):
    """Gives float32."""

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight).float()


# Subclasses do something of their own with the weight; they stay as they are.
_STORED = {nn.Linear: StoredLinear, nn.Embedding: StoredEmbedding}


def compute_in_float32(module: PreTrainedModel) -> None:
    """Makes a bfloat16 model compute in float32, in place.

    Linear layers and embeddings, which are nearly all of a dense model, keep their weights in bfloat16. What is left
    (norms, biases, stacked experts, embeddings of a special kind) becomes float32.
    """
    stored = [part for part in module.modules() if type(part) in _STORED]
    special = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, nn.Embedding) and type(part) not in _STORED
    }
    kept = {id(part.weight) for part in stored} - special
    for parameter in module.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.float()
    for part in stored:
        # Their own parameters and settings, computed with in another way.
        part.__class__ = _STORED[type(part)]
    module.config.dtype = torch.float32


def _blocks(weight_OI: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """(where it starts, some of the rows converted), one buffer for all."""
    num_rows = max(1, _BLOCK_VALUES // weight_OI.shape[1])
    buffer = torch.empty(
        min(num_rows, len(weight_OI)), weight_OI.shape[1], dtype=dtype, device=weight_OI.device
    )
    for start in range(0, len(weight_OI), num_rows):
        rows = weight_OI[start : start + num_rows]
        yield start, buffer[: len(rows)].copy_(rows)
