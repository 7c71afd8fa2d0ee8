"""SampleRequest.target_prompt_logprobs: the tokens it names as a dense array, and the answer in the request's layout.

A sparse tensor is never spread over its width: the engine gets each row's tokens packed to the left.
"""

from __future__ import annotations

import numpy as np

from backend.services.fields import invalid
from together_post_training import tensors
from together_post_training.errors import Reason, fail
from together_post_training.v1 import data_pb2

Array = np.ndarray

_WHAT = "target_prompt_logprobs"
# 32 MB of token ids: 100 for each of 40,000 positions.
MAX_CELLS = 2**22


def decode_targets(tensor: data_pb2.Tensor, num_prompt_tokens: int, vocab_size: int) -> Array:
    """int64 (num_prompt_tokens - 1, K), -1 where nothing is wanted.

    Raises:
        PostTrainingError: WRONG_DTYPE, LENGTH_MISMATCH, TOKEN_OUT_OF_RANGE, INVALID_ARGUMENT.
    """
    num_rows = num_prompt_tokens - 1
    if tensor.HasField("csr"):
        csr = tensors.decode_csr(tensor, what=_WHAT)
        _check_kind(csr.values)
        _check_rows(csr.shape, num_rows)
        counts = np.diff(csr.crow_indices)
        targets = _empty(num_rows, int(counts.max(initial=0)))
        targets[_filled(counts, targets)] = csr.values
    else:
        dense = tensors.decode(tensor, what=_WHAT)
        _check_kind(dense)
        _check_rows(dense.shape, num_rows)
        _check_size(*dense.shape)
        targets = dense.astype(np.int64, copy=False)
    _check_tokens(targets, vocab_size)
    return targets


def encode_answer(request: data_pb2.Tensor, logprobs: Array) -> data_pb2.Tensor:
    """float32, of the shape and layout of the request's tensor. `logprobs`: for `decode_targets` of it."""
    if not request.HasField("csr"):
        return tensors.encode(logprobs)
    csr = tensors.decode_csr(request, what=_WHAT)
    values = logprobs[_filled(np.diff(csr.crow_indices), logprobs)]
    return tensors.encode_csr(values, csr.crow_indices, csr.col_indices, csr.shape)


def _filled(counts: Array, packed: Array) -> Array:
    """Where each row's first `counts` cells are, whose order is that of the stored values."""
    return np.arange(packed.shape[1]) < counts[:, None]


def _empty(num_rows: int, width: int) -> Array:
    _check_size(num_rows, width)
    return np.full((num_rows, width), -1, np.int64)


def _check_kind(values: Array) -> None:
    if values.dtype.kind != "i":
        raise fail(
            Reason.WRONG_DTYPE,
            f"{_WHAT} is {values.dtype}: it must be int64, token ids.",
            dtype=values.dtype,
        )


def _check_rows(shape: tuple[int, ...], num_rows: int) -> None:
    if len(shape) != 2 or shape[0] != num_rows:
        raise fail(
            Reason.LENGTH_MISMATCH,
            f"{_WHAT} has shape {list(shape)}, but the prompt has {num_rows + 1} tokens: it must be "
            f"[{num_rows}, K], a row for each token after the first.",
            shape=list(shape),
            expected=num_rows,
        )


def _check_size(num_rows: int, width: int) -> None:
    if num_rows * width > MAX_CELLS:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"{_WHAT} takes {num_rows} x {width} cells: at most {MAX_CELLS} are accepted. Name fewer tokens at a "
            "position, or ask in several calls.",
            num_rows=num_rows,
            width=width,
        )


def _check_tokens(targets: Array, vocab_size: int) -> None:
    low, high = int(targets.min(initial=-1)), int(targets.max(initial=-1))
    if low < -1 or high >= vocab_size:
        bad = low if low < -1 else high
        raise fail(
            Reason.TOKEN_OUT_OF_RANGE,
            f"{_WHAT} holds token id {bad}: this model's ids are 0 to {vocab_size - 1}, and -1 wants nothing.",
            token=bad,
            vocab_size=vocab_size,
        )
    if high < 0:
        raise invalid(_WHAT, "without any token id", "absent, or name at least one")
