"""Tensors between numpy and the wire.

Dense arrays travel as raw little-endian bytes and are read back without a copy; sparse ones as CSR.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from together_post_training.errors import Reason, fail
from together_post_training.v1 import data_pb2 as pb

_DTYPES: dict[pb.DType, np.dtype] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_MAX_DENSE_VALUES = 2**28


def encode(array: np.ndarray) -> pb.Tensor:
    """Any shape; float32, int64 or int32 (others are the caller's to convert).

    Raises:
        TypeError: for another dtype.
    """
    tensor = pb.Tensor()
    encode_into(tensor, array)
    return tensor


def encode_into(tensor: pb.Tensor, array: np.ndarray) -> None:
    """`encode` into an empty message that is part of a larger one already, which saves copying it there."""
    code = _CODES.get(array.dtype)
    if code is None:
        raise TypeError(f"cannot send dtype {array.dtype}; use float32, int64 or int32")
    tensor.dtype = code
    tensor.shape.dims.extend(array.shape)
    tensor.shape.SetInParent()
    tensor.raw = array.tobytes()


def encode_csr(
    values: np.ndarray, crow_indices: np.ndarray, col_indices: np.ndarray, shape: tuple[int, int]
) -> pb.Tensor:
    """A (rows, columns) matrix of which only `values` (nnz,) are stored."""
    csr = pb.Csr(crow_indices=crow_indices.tolist(), col_indices=col_indices.tolist())
    return pb.Tensor(
        dtype=_CODES[values.dtype], shape=pb.Shape(dims=shape), raw=values.tobytes(), csr=csr
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Csr:
    """A (rows, columns) matrix by its stored values (nnz,): row i's are number crow_indices[i] up to
    crow_indices[i + 1], in the columns col_indices (nnz,)."""

    values: np.ndarray
    crow_indices: np.ndarray
    col_indices: np.ndarray
    shape: tuple[int, int]


def decode_csr(tensor: pb.Tensor, *, what: str = "tensor") -> Csr:
    """A sparse tensor as it is stored, whatever its shape.

    Raises:
        PostTrainingError: INVALID_ARGUMENT, naming `what`.
    """
    values, dims = _flat(tensor, what), tuple(tensor.shape.dims)
    crow = np.asarray(tensor.csr.crow_indices, dtype=np.int64)
    col = np.asarray(tensor.csr.col_indices, dtype=np.int64)
    if not _csr_is_sound(dims, crow, col, values):
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"{what}: malformed CSR: shape {list(dims)} needs {dims[0] + 1 if dims else 1} ascending crow_indices "
            f"from 0 to the number of values ({values.size}), and for each value a col_index below the width that its "
            "row has once.",
            what=what,
        )
    return Csr(values=values, crow_indices=crow, col_indices=col, shape=(dims[0], dims[1]))


def decode(tensor: pb.Tensor, *, what: str = "tensor") -> np.ndarray:
    """The array, read-only where it shares the message's bytes; CSR is densified with 0.

    Raises:
        PostTrainingError: INVALID_ARGUMENT, naming `what`.
    """
    if tensor.HasField("csr"):
        return _densify(decode_csr(tensor, what=what), what)
    flat = _flat(tensor, what)
    if not tensor.HasField("shape"):
        return flat
    dims = tensor.shape.dims[:]
    if dims == [flat.size]:
        return flat
    if any(d < 0 for d in dims) or math.prod(dims) != flat.size:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"{what}: shape {dims} needs {math.prod(dims)} values, got {flat.size}.",
            what=what,
        )
    return flat.reshape(dims)


def _flat(tensor: pb.Tensor, what: str) -> np.ndarray:
    form = tensor.WhichOneof("data")
    if form == "raw":
        return _from_raw(tensor, what)
    if form == "floats":
        _check_form(tensor, pb.DTYPE_FLOAT32, what)
        return np.asarray(tensor.floats.values, dtype="<f4")
    if form == "ints":
        _check_form(tensor, pb.DTYPE_INT64, what, also=pb.DTYPE_INT32)
        return _from_ints(tensor, what)
    raise fail(
        Reason.INVALID_ARGUMENT,
        f"{what} has no data: set one of raw, floats, ints.",
        what=what,
    )


def _from_raw(tensor: pb.Tensor, what: str) -> np.ndarray:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise fail(
            Reason.WRONG_DTYPE,
            f"{what}: raw data needs a dtype (DTYPE_FLOAT32, DTYPE_INT64 or DTYPE_INT32), got "
            f"{_dtype_name(tensor)}.",
            what=what,
        )
    raw = tensor.raw  # Once: each look at it is a copy.
    if len(raw) % dtype.itemsize:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"{what}: {len(raw)} bytes are not whole {dtype.name} values.",
            what=what,
        )
    return np.frombuffer(raw, dtype)


def _from_ints(tensor: pb.Tensor, what: str) -> np.ndarray:
    values = np.asarray(tensor.ints.values, dtype="<i8")
    dtype = _DTYPES[tensor.dtype or pb.DTYPE_INT64]
    narrow = values.astype(dtype)
    if not np.array_equal(narrow, values):
        bad = int(values[narrow != values][0])
        raise fail(Reason.INVALID_ARGUMENT, f"{what}: {bad} is no {dtype.name}.", what=what)
    return narrow


def _check_form(tensor: pb.Tensor, expected: int, what: str, also: int | None = None) -> None:
    if tensor.dtype in (pb.DTYPE_UNSPECIFIED, expected, also):
        return
    raise fail(
        Reason.WRONG_DTYPE,
        f"{what}: dtype {_dtype_name(tensor)} does not fit the form of the data: floats are DTYPE_FLOAT32, ints are "
        "DTYPE_INT64 or DTYPE_INT32.",
        what=what,
    )


def _dtype_name(tensor: pb.Tensor) -> str:
    """Its number where it has no name: a newer client may know dtypes that this one does not."""
    known = pb.DType.DESCRIPTOR.values_by_number.get(tensor.dtype)
    return known.name if known else str(tensor.dtype)


def _densify(csr: Csr, what: str) -> np.ndarray:
    if math.prod(csr.shape) > _MAX_DENSE_VALUES:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"{what}: shape {list(csr.shape)} is too large: at most {_MAX_DENSE_VALUES} values are accepted, stored or "
            "not.",
            what=what,
        )
    dense = np.zeros(csr.shape, dtype=csr.values.dtype)
    rows = np.repeat(np.arange(csr.shape[0]), np.diff(csr.crow_indices))
    dense[rows, csr.col_indices] = csr.values
    return dense


def _csr_is_sound(
    dims: tuple[int, ...], crow: np.ndarray, col: np.ndarray, values: np.ndarray
) -> bool:
    if len(dims) != 2 or min(dims) < 0 or math.prod(dims) >= 2**63:
        return False
    if crow.size != dims[0] + 1 or col.size != values.size:
        return False
    if crow[0] != 0 or crow[-1] != values.size or (np.diff(crow) < 0).any():
        return False
    if col.size == 0:
        return True
    return bool(col.min() >= 0 and col.max() < dims[1]) and not _has_duplicates(crow, col, dims)


def _has_duplicates(crow: np.ndarray, col: np.ndarray, dims: tuple[int, ...]) -> bool:
    """Whether two values have the same place: one of them would be lost."""
    places = np.repeat(np.arange(dims[0]), np.diff(crow)) * dims[1] + col
    if (np.diff(places) > 0).all():  # as CSR mostly comes
        return False
    return np.unique(places).size != places.size
