"""Law 5: decode(encode(x)) == x, in every form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from together_post_training import tensors
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.v1 import data_pb2 as pb

DTYPES = [np.dtype("<f4"), np.dtype("<i8"), np.dtype("<i4")]


@st.composite
def bit_patterns(draw: st.DrawFn) -> np.ndarray:
    """Any array of a wire dtype, from any bytes: NaN payloads and negative zeros included."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype).reshape(shape)


def over_the_wire(tensor: pb.Tensor) -> np.ndarray:
    return tensors.decode(pb.Tensor.FromString(tensor.SerializeToString()))


def assert_same_bits(got: np.ndarray, wanted: np.ndarray) -> None:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert got.tobytes() == wanted.tobytes()


@given(bit_patterns())
def test_law_5_raw_tensors_come_back_bit_for_bit(array):
    assert_same_bits(over_the_wire(tensors.encode(array)), array)


@given(array=bit_patterns(), data=st.data())
def test_law_5_views_come_back_as_what_they_show(array, data):
    """Reversed, transposed and strided arrays are not contiguous in memory."""
    view = array.T
    if view.ndim:
        view = view[:: data.draw(st.sampled_from([1, -1, 2, -2]))]
    assert_same_bits(
        over_the_wire(tensors.encode(view)), np.ascontiguousarray(view).reshape(view.shape)
    )


@given(hnp.arrays(np.float32, st.integers(0, 5)))
def test_law_5_typed_floats_come_back(array):
    tensor = pb.Tensor(floats=pb.Floats(values=array.tolist()))
    got = over_the_wire(tensor)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, array)


@given(hnp.arrays(np.int64, hnp.array_shapes(max_dims=2, min_side=0)))
def test_law_5_typed_integers_come_back(array):
    shape = pb.Shape(dims=array.shape)
    tensor = pb.Tensor(ints=pb.Ints(values=array.ravel().tolist()), shape=shape)
    assert_same_bits(over_the_wire(tensor), array)


@st.composite
def sparse(draw: st.DrawFn) -> np.ndarray:
    dtype = draw(st.sampled_from(DTYPES))
    shape = (draw(st.integers(0, 5)), draw(st.integers(0, 5)))
    elements = st.sampled_from([0, 0, 0, 1, -3, 7])
    return draw(hnp.arrays(dtype, shape, elements=elements))


@given(sparse())
def test_law_5_csr_comes_back_dense(array):
    rows, columns = np.nonzero(array)
    crow = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(array)))])
    tensor = tensors.encode_csr(array[rows, columns], crow.astype(np.int64), columns, array.shape)
    got = over_the_wire(tensor)
    assert got.dtype == array.dtype
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize(
    ("crow", "col", "shape"),
    [
        ([0, 1], [0], (2, 3)),  # too few rows
        ([0, 2, 1], [0], (2, 3)),  # not ascending
        ([0, 1, 2], [0], (2, 3)),  # more than the values
        ([1, 1, 1], [0], (2, 3)),  # does not start at 0
        ([0, 1, 1], [3], (2, 3)),  # outside the width
        ([0, 1, 1], [-1], (2, 3)),
        ([0, 1, 1], [0, 1], (2, 3)),  # more columns than values
        ([0, 1, 1], [0], (2, -3)),
        ([0, 1, 1], [0], (2, 2**40)),  # would not fit into memory
        ([0, 1, 1], [0], (2, 3, 1)),
        ([0, 1], [0], ()),
    ],
)
def test_malformed_csr_is_refused(crow, col, shape):
    csr = pb.Csr(crow_indices=crow, col_indices=col)
    tensor = pb.Tensor(
        dtype=pb.DTYPE_FLOAT32,
        shape=pb.Shape(dims=shape),
        raw=np.ones(1, np.float32).tobytes(),
        csr=csr,
    )
    with pytest.raises(PostTrainingError, match="weights") as error:
        tensors.decode(tensor, what="weights")
    assert error.value.reason is Reason.INVALID_ARGUMENT


def test_two_values_of_one_place_are_refused_as_one_would_be_lost():
    crow, col = np.array([0, 2, 3]), np.array([1, 1, 1])
    twice = tensors.encode_csr(np.ones(3, np.float32), crow, col, (2, 2))
    with pytest.raises(PostTrainingError, match="its row has once"):
        tensors.decode(twice)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (pb.Tensor(), Reason.INVALID_ARGUMENT),
        (pb.Tensor(raw=b"1234"), Reason.WRONG_DTYPE),
        (pb.Tensor(raw=b"12345", dtype=pb.DTYPE_INT32), Reason.INVALID_ARGUMENT),
        (pb.Tensor(floats=pb.Floats(values=[1]), dtype=pb.DTYPE_INT64), Reason.WRONG_DTYPE),
        (pb.Tensor(ints=pb.Ints(values=[1]), dtype=pb.DTYPE_FLOAT32), Reason.WRONG_DTYPE),
        (pb.Tensor(ints=pb.Ints(values=[1]), dtype=99), Reason.WRONG_DTYPE),  # type: ignore[arg-type]
        (pb.Tensor(raw=b"1234", dtype=99), Reason.WRONG_DTYPE),  # type: ignore[arg-type]
        (
            pb.Tensor(ints=pb.Ints(values=[1, 2]), shape=pb.Shape(dims=[3])),
            Reason.INVALID_ARGUMENT,
        ),
        (
            pb.Tensor(ints=pb.Ints(values=[1, 2]), shape=pb.Shape(dims=[-1, -2])),
            Reason.INVALID_ARGUMENT,
        ),
        (
            pb.Tensor(ints=pb.Ints(values=[2**40]), dtype=pb.DTYPE_INT32),
            Reason.INVALID_ARGUMENT,
        ),
    ],
)
def test_malformed_tensors_are_refused_by_name(tensor, reason):
    with pytest.raises(PostTrainingError, match="advantages") as error:
        tensors.decode(tensor, what="advantages")
    assert error.value.reason is reason


@pytest.mark.parametrize("dtype", [np.float64, np.float16, bool, np.uint8, ">f4", ">i8"])
def test_encode_refuses_other_dtypes(dtype):
    with pytest.raises(TypeError, match="float32"):
        tensors.encode(np.zeros(2, dtype))
