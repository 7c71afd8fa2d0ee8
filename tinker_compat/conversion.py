"""Genuine Tinker data types to messages and back. Pure; reads what it is given by attribute.

Arrays travel as raw bytes. Every number arrives as it was sent, NaN bits included; nothing is shifted, padded or
reordered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from tinker import types

from tinker_compat.errors import refuse, to_tinker
from together_post_training import tensors
from together_post_training.errors import Reason, fail
from together_post_training.v1 import data_pb2

_DTYPES = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}
_DTYPE_NAMES: dict[str, types.TensorDtype] = {"f": "float32", "i": "int64"}
# Bytes on the wire, for deciding how much goes into one message.
_TOKEN_BYTES = 4
_SPARSE_INDEX_BYTES = 8
# What fields take, by their C++ type.
_ACCEPTED = {
    FieldDescriptor.CPPTYPE_INT32: "an integer of 32 bits",
    FieldDescriptor.CPPTYPE_UINT64: "an integer from 0 to 2**64 - 1",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_STRING: "a string",
}


def set_fields(message: Message, **fields: Any) -> None:
    """Sets scalar fields; None leaves one unset.

    Raises:
        TypeError, ValueError: naming the field, its value and what it takes.
    """
    for name, value in fields.items():
        if value is None:
            continue
        try:
            setattr(message, name, value)
        except (TypeError, ValueError) as error:
            accepted = _ACCEPTED[message.DESCRIPTOR.fields_by_name[name].cpp_type]
            raise type(error)(f"{name} is {value!r}: must be {accepted}.") from None


def check_metadata(user_metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Raises TypeError for a name or value that is not a string."""
    checked = dict(user_metadata or {})
    for name, value in checked.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise TypeError(
                f"user_metadata[{name!r}] is {value!r}: names and values must be strings."
            )
    return checked


def check_data(data: Sequence[types.Datum]) -> None:
    """Raises ValueError without data, TypeError for what is not a Datum."""
    if isinstance(data, types.Datum):
        raise TypeError("data must be a list of Datum, got one Datum; put it in a list.")
    if not hasattr(data, "__len__"):
        raise TypeError(f"data must be a list of Datum, got {type(data).__name__}.")
    if not len(data):
        raise ValueError("No data provided")
    for i, datum in enumerate(data):
        if not hasattr(datum, "model_input") or not hasattr(datum, "loss_fn_inputs"):
            raise TypeError(f"data[{i}] is a {type(datum).__name__}, must be a Datum.")


def size_bytes(datum: types.Datum) -> int:
    """What the datum takes on the wire, short of some bytes of overhead."""
    size = 0
    for chunk in datum.model_input.chunks:
        tokens = getattr(chunk, "tokens", None)
        size += len(getattr(chunk, "data", b"")) if tokens is None else _TOKEN_BYTES * len(tokens)
    for tensor in datum.loss_fn_inputs.values():
        size += _size_of_values(tensor)
    return size


def fill_sample(message: data_pb2.Sample, datum: types.Datum, index: int) -> None:
    """Writes the datum into an empty message, naming it as sample `index` if it cannot be sent.

    Raises:
        ValueError, TypeError: for a chunk, key or value that has no form on the wire.
        BadRequestError: for a token id that no model has.
    """
    fill_model_input(message.model_input, datum.model_input, what=f"Sample {index}: model_input")
    for key, value in datum.loss_fn_inputs.items():
        if not isinstance(key, str):
            raise TypeError(
                f"Sample {index}: loss_fn_inputs has the key {key!r}; keys must be strings."
            )
        fill_tensor(
            message.loss_fn_inputs[key], value, what=f"Sample {index}: loss_fn_inputs[{key!r}]"
        )
    _fill_spans(message.model_input_spans, getattr(datum, "model_input_spans", None))
    _fill_spans(message.loss_fn_input_spans, getattr(datum, "loss_fn_input_spans", None))


def fill_model_input(
    message: data_pb2.ModelInput, model_input: types.ModelInput, *, what: str
) -> None:
    for chunk in model_input.chunks:
        if chunk.type == "encoded_text":
            message.chunks.add().encoded_text.raw = _pack_tokens(chunk.tokens, what)
        elif chunk.type == "image":
            image = message.chunks.add().image
            image.data, image.format = chunk.data, chunk.format
            if chunk.expected_tokens is not None:
                image.expected_tokens = chunk.expected_tokens
        else:
            raise ValueError(
                f"{what}: unsupported model input chunk type {type(chunk).__name__}; "
                "accepted are EncodedTextChunk and, where the model reads images, ImageChunk."
            )


def fill_tensor(message: data_pb2.Tensor, tensor: types.TensorData, *, what: str) -> None:
    """Dense or CSR, as it is. A dense one without a shape is sent as one dimension."""
    if getattr(tensor, "dtype", None) not in _DTYPES:
        raise TypeError(
            f"{what} is a {type(tensor).__name__}; must be a TensorData of float32 or int64."
        )
    values = _values(tensor)
    if tensor.sparse_crow_indices is None:
        tensors.encode_into(message, values.reshape(-1) if tensor.shape is None else values)
        return
    shape = tensor.shape or []
    if len(shape) != 2:
        raise ValueError(
            f"{what} is sparse and has the shape {shape}; it must have two dimensions."
        )
    message.CopyFrom(
        tensors.encode_csr(
            values.reshape(-1),
            np.asarray(tensor.sparse_crow_indices, dtype=np.int64),
            np.asarray(tensor.sparse_col_indices, dtype=np.int64),
            (shape[0], shape[1]),
        )
    )


def tensor_from(message: data_pb2.Tensor) -> types.TensorData:
    """Dense or CSR, as it came."""
    if not message.HasField("csr"):
        return tensor_of(tensors.decode(message))
    stored = data_pb2.Tensor()
    stored.CopyFrom(message)
    stored.ClearField("csr")
    stored.ClearField("shape")
    values = tensors.decode(stored)
    return types.TensorData(
        data=values,
        dtype=_DTYPE_NAMES[values.dtype.kind],
        shape=list(message.shape.dims),
        sparse_crow_indices=list(message.csr.crow_indices),
        sparse_col_indices=list(message.csr.col_indices),
    )


def tensor_of(array: np.ndarray) -> types.TensorData:
    """float32 or integers, of any shape."""
    return types.TensorData(
        data=array, dtype=_DTYPE_NAMES[array.dtype.kind], shape=list(array.shape)
    )


def loss_config(
    loss_fn: str, loss_fn_config: Mapping[str, float | str] | None
) -> data_pb2.LossConfig:
    """Whether the loss and its parameters exist is for the server to say.

    Raises:
        TypeError: for a name that is no string or a parameter that is neither a number nor a string.
        BadRequestError: for "custom".
    """
    if not isinstance(loss_fn, str):
        raise TypeError(
            f"loss_fn must be the name of a loss, got {type(loss_fn).__name__}; functions go to "
            "forward_backward_custom."
        )
    if loss_fn == "custom":
        refuse(
            "loss_fn='custom' is not supported: no loss is uploaded here. Pass the handle that create_custom_loss "
            "returned, or the function itself, to forward_backward_custom, which evaluates it in this process."
        )
    message = data_pb2.LossConfig(type=loss_fn)
    for name, value in (loss_fn_config or {}).items():
        try:
            if isinstance(value, str):
                message.options[name] = value
            else:
                message.params[name] = float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"loss_fn_config[{name!r}] is {value!r}: names are strings, values numbers or strings."
            ) from None
    return message


def _values(tensor: types.TensorData) -> np.ndarray:
    """A tensor's numbers; of a sparse one, those stored."""
    dtype = _DTYPES[tensor.dtype]
    if tensor.sparse_crow_indices is None:
        return np.asarray(tensor.to_numpy(), dtype=dtype)
    # The public `data` is a list; `to_numpy` would densify.
    stored = getattr(tensor, "_numpy", None)
    return np.asarray(tensor.data if stored is None else stored, dtype=dtype)


def _size_of_values(tensor: types.TensorData) -> int:
    """Anything but a tensor counts nothing: `fill_tensor` refuses it, with its place."""
    if getattr(tensor, "dtype", None) not in _DTYPES:
        return 0
    indices = (tensor.sparse_crow_indices or [], tensor.sparse_col_indices or [])
    return _values(tensor).nbytes + _SPARSE_INDEX_BYTES * sum(map(len, indices))


def _pack_tokens(tokens: Sequence[int], what: str) -> bytes:
    try:
        return np.asarray(tokens, dtype="<i4").tobytes()
    except OverflowError:
        bad = next(t for t in tokens if not -(2**31) <= t < 2**31)
        message = f"{what} holds token id {bad}, which no model has: ids are below 2**31."
        raise to_tinker(fail(Reason.TOKEN_OUT_OF_RANGE, message, token=bad)) from None


def _fill_spans(messages: Any, spans: Sequence[Any] | None) -> None:
    for span in spans or ():
        is_prompt = type(span).__name__ == "PromptProvenanceSpan"
        message = messages.add()
        target = message.prompt_tokens if is_prompt else message.sampled_tokens
        target.sequence_id, target.offset, target.length = (
            span.sequence_id,
            span.offset,
            span.length,
        )
