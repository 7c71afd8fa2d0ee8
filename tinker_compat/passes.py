"""Forward and backward passes: data to requests, finished operations to Tinker's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from tinker import types

from tinker_compat.conversion import check_data, fill_sample, loss_config, size_bytes, tensor_from
from tinker_compat.metrics import merge
from together_post_training import losses
from together_post_training.chunking import chunk
from together_post_training.v1 import data_pb2, operations_pb2, trainer_pb2

PassRequest = (
    trainer_pb2.ForwardRequest
    | trainer_pb2.ForwardBackwardRequest
    | trainer_pb2.CustomForwardBackwardRequest
)
# What the hosted service calls its records of outputs.
_OUTPUT_TYPE = "ArrayRecord"


def split(data: Sequence[types.Datum]) -> list[slice]:
    """Where a call's data is cut into operations.

    Raises:
        ValueError: without data.
        TypeError: for what is not a Datum.
    """
    check_data(data)
    return chunk([size_bytes(datum) for datum in data])


def forward_requests(
    data: Sequence[types.Datum],
    slices: Sequence[slice],
    loss: data_pb2.LossConfig,
) -> list[trainer_pb2.ForwardRequest]:
    requests = [trainer_pb2.ForwardRequest() for _ in slices]
    _fill(requests, data, slices)
    _set_loss(requests, data, loss)
    return requests


def forward_backward_requests(
    data: Sequence[types.Datum],
    loss_fn: str,
    loss_fn_config: Mapping[str, float | str] | None,
) -> list[trainer_pb2.ForwardBackwardRequest]:
    loss = loss_config(loss_fn, loss_fn_config)
    slices = split(data)
    requests = [trainer_pb2.ForwardBackwardRequest(num_chunks=len(slices)) for _ in slices]
    _fill(requests, data, slices)
    _set_loss(requests, data, loss)
    return requests


def custom_requests(
    data: Sequence[types.Datum], slices: Sequence[slice]
) -> list[trainer_pb2.CustomForwardBackwardRequest]:
    """Still without gradients."""
    requests = [trainer_pb2.CustomForwardBackwardRequest(num_chunks=len(slices)) for _ in slices]
    _fill(requests, data, slices)
    return requests


def output(operations: Sequence[operations_pb2.Operation]) -> types.ForwardBackwardOutput:
    """One call's output from its operations, in order."""
    results = [operation.forward_backward for operation in operations]
    outputs = [
        {name: tensor_from(tensor) for name, tensor in output.tensors.items()}
        for result in results
        for output in result.loss_fn_outputs
    ]
    metrics = merge([r.metrics for r in results], [len(r.loss_fn_outputs) for r in results])
    return types.ForwardBackwardOutput(
        loss_fn_output_type=_OUTPUT_TYPE, loss_fn_outputs=outputs, metrics=metrics
    )


def _set_loss(
    requests: Sequence[trainer_pb2.ForwardRequest | trainer_pb2.ForwardBackwardRequest],
    data: Sequence[types.Datum],
    loss: data_pb2.LossConfig,
) -> None:
    """Into requests with the samples of one call; where it was cut changes nothing."""
    if len(requests) > 1:
        given = {**loss.params, **loss.options}
        whole = losses.for_whole_call(loss.type, given, map(_masks, data))
        loss = loss_config(loss.type, whole)
    for request in requests:
        request.loss.CopyFrom(loss)


def _masks(datum: types.Datum) -> dict[str, np.ndarray]:
    """What says which positions count. A datum without targets is the server's to refuse."""
    given = datum.loss_fn_inputs
    masks = {name: given[name].to_numpy() for name in ("target_tokens", "weights") if name in given}
    return {"target_tokens": np.zeros(0), **masks}


def _fill(
    requests: Sequence[PassRequest], data: Sequence[types.Datum], slices: Sequence[slice]
) -> None:
    for request, part in zip(requests, slices, strict=True):
        for index in range(part.start, part.stop):
            fill_sample(request.samples.add(), data[index], index)
