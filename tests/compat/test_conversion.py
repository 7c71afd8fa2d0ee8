"""Law 5: what is sent arrives as it was, and what comes back reads as it was sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tinker import types

import tinker_compat as tinker
from tests.compat.data import datum
from tinker_compat import conversion
from together_post_training import tensors
from together_post_training.v1 import data_pb2

SHAPES = npst.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=7)
DENSE = st.one_of(
    # All bit patterns: NaN payloads, infinities, signed zeros, subnormal numbers.
    npst.arrays(np.uint32, SHAPES).map(lambda bits: bits.view(np.float32)),
    npst.arrays(np.int64, SHAPES),
)


def over_the_wire(tensor: types.TensorData) -> data_pb2.Tensor:
    message = data_pb2.Tensor()
    conversion.fill_tensor(message, tensor, what="tensor")
    return data_pb2.Tensor.FromString(message.SerializeToString())


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@given(DENSE)
def test_law_5_a_dense_tensor_arrives_with_its_bits(array):
    message = over_the_wire(types.TensorData.from_numpy(array))
    assert same_bits(tensors.decode(message), array)
    back = conversion.tensor_from(message)
    assert same_bits(np.asarray(back.to_numpy()), array)
    assert (back.shape, back.dtype) == (list(array.shape), str(array.dtype))


@st.composite
def sparse(draw: Any) -> types.TensorData:
    """CSR tensors, zeros among the stored values and empty rows included."""
    rows, columns = draw(st.integers(0, 5)), draw(st.integers(1, 6))
    cells = [sorted(draw(st.sets(st.integers(0, columns - 1)))) for _ in range(rows)]
    crow = np.concatenate([[0], np.cumsum([len(c) for c in cells])]).astype(int).tolist()
    dtype = draw(st.sampled_from(["float32", "int64"]))
    values = draw(
        npst.arrays(
            np.dtype(dtype), crow[-1], elements=st.integers(-3, 9).map(np.dtype(dtype).type)
        )
    )
    return types.TensorData(
        data=values,
        dtype=dtype,
        shape=[rows, columns],
        sparse_crow_indices=crow,
        sparse_col_indices=[column for row in cells for column in row],
    )


@given(sparse())
def test_law_5_a_sparse_tensor_arrives_as_it_is_and_means_the_same(tensor):
    message = over_the_wire(tensor)
    back = conversion.tensor_from(message)
    for name in ("dtype", "shape", "sparse_crow_indices", "sparse_col_indices", "data"):
        assert getattr(back, name) == getattr(tensor, name), name
    expected = np.zeros(tensor.shape, dtype=tensor.dtype)
    crow = tensor.sparse_crow_indices
    for row in range(len(crow) - 1):
        for i in range(crow[row], crow[row + 1]):
            expected[row, tensor.sparse_col_indices[i]] = tensor.data[i]
    assert same_bits(tensors.decode(message), expected)


def test_a_2d_target_tensor_is_sparse_on_the_wire_when_tinker_makes_it_so():
    targets = torch.zeros(6, 8, dtype=torch.int64)
    targets[2, 3] = 9
    sent = datum(target_tokens=targets)
    assert sent.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    message = over_the_wire(sent.loss_fn_inputs["target_tokens"])
    assert message.HasField("csr")
    assert same_bits(tensors.decode(message), targets.numpy())


@pytest.mark.parametrize(
    "tensor",
    [
        types.TensorData(data=[1.0, 2.0, 3.0, 4.0], dtype="float32"),
        types.TensorData(data=np.arange(4, dtype=np.float32).reshape(2, 2), dtype="float32"),
    ],
)
def test_a_tensor_without_a_shape_has_one_dimension(tensor):
    assert tensors.decode(over_the_wire(tensor)).shape == (4,)


def test_a_scalar_keeps_its_shape():
    message = over_the_wire(types.TensorData.from_torch(torch.tensor(1.5)))
    assert tensors.decode(message).shape == ()
    assert conversion.tensor_from(message).shape == []


def test_a_tensor_that_is_not_contiguous_arrives_in_order():
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    assert (
        tensors.decode(over_the_wire(types.TensorData.from_numpy(array))).tolist() == array.tolist()
    )


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=4))
def test_law_5_tokens_arrive_chunk_by_chunk(chunks):
    model_input = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=c) for c in chunks])
    message = data_pb2.ModelInput()
    conversion.fill_model_input(message, model_input, what="prompt")
    received = data_pb2.ModelInput.FromString(message.SerializeToString())
    assert [np.frombuffer(c.encoded_text.raw, "<i4").tolist() for c in received.chunks] == chunks


def test_an_image_arrives_with_its_bytes_format_and_tokens():
    message = data_pb2.ModelInput()
    image = types.ImageChunk(data=b"\x89PNG\x00", format="png", expected_tokens=7)
    conversion.fill_model_input(message, types.ModelInput(chunks=[image]), what="prompt")
    received = message.chunks[0].image
    assert (received.data, received.format, received.expected_tokens) == (b"\x89PNG\x00", "png", 7)


def test_a_sample_carries_every_input_and_its_provenance():
    sent = datum(target_tokens=[4, 5, 9], weights=[0.5, -1.0, 0.0])
    if hasattr(sent, "with_provenance"):
        spans = [types.SampledProvenanceSpan(sequence_id="q", offset=2, length=1)]
        prompt = [types.PromptProvenanceSpan(sequence_id="q", length=2)]
        sent = sent.with_provenance(model_input=prompt + spans, loss_fn_inputs=prompt + spans)
    message = data_pb2.Sample()
    conversion.fill_sample(message, sent, 0)
    assert sorted(message.loss_fn_inputs) == ["target_tokens", "weights"]
    if hasattr(sent, "with_provenance"):
        first, second = message.model_input_spans
        assert (first.prompt_tokens.length, second.sampled_tokens.offset) == (2, 2)
        assert message.loss_fn_input_spans[1].sampled_tokens.sequence_id == "q"


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1])
def test_a_token_id_that_no_model_has_is_refused_with_its_value(token):
    with pytest.raises(tinker.BadRequestError, match=f"Sample 5: model_input.*{token}"):
        conversion.fill_sample(data_pb2.Sample(), datum([3, token], target_tokens=[4, 5]), 5)


def test_an_input_that_is_no_tensor_is_refused_with_its_place():
    sent: Any = datum()
    sent.loss_fn_inputs["weights"] = [1.0, 1.0, 1.0]
    with pytest.raises(TypeError, match=r"Sample 2: loss_fn_inputs\['weights'\] is a list"):
        conversion.fill_sample(data_pb2.Sample(), sent, 2)


def test_an_input_under_a_key_that_is_no_string_is_refused_with_the_key():
    sent: Any = datum()
    sent.loss_fn_inputs[7] = types.TensorData(data=[1.0], dtype="float32")
    with pytest.raises(TypeError, match="Sample 0: loss_fn_inputs has the key 7"):
        conversion.fill_sample(data_pb2.Sample(), sent, 0)


def test_a_chunk_that_has_no_form_on_the_wire_is_refused_with_what_has():
    asset = types.ImageAssetPointerChunk(location="a", format="png", expected_tokens=1)
    with pytest.raises(ValueError, match=r"ImageAssetPointerChunk.*EncodedTextChunk"):
        conversion.fill_model_input(
            data_pb2.ModelInput(), types.ModelInput(chunks=[asset]), what="prompt"
        )


def test_loss_parameters_are_numbers_or_words_under_names():
    message = conversion.loss_config("ppo", {"clip_low_threshold": 0, "clip_high_threshold": 1.5})
    assert dict(message.params) == {"clip_low_threshold": 0.0, "clip_high_threshold": 1.5}
    message = conversion.loss_config("grpo", {"agg_type": "TOKEN_MEAN", "beta": np.float64(0.5)})
    assert (dict(message.params), dict(message.options)) == (
        {"beta": 0.5},
        {"agg_type": "TOKEN_MEAN"},
    )
    for name, value in (("beta", None), ("beta", [1]), (1, 0.5), (1, "word")):
        with pytest.raises(TypeError, match=rf"loss_fn_config\[{name!r}\]"):
            conversion.loss_config("dro", {name: value})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="forward_backward_custom"):
        conversion.loss_config(print, None)  # pyright: ignore[reportArgumentType]
