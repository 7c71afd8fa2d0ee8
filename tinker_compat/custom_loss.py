"""Training with a loss that the caller evaluates.

    1. forward            the log-probabilities of the targets
    2. here, in a thread  loss, metrics = loss_fn(data, logprobs); d loss / d logprob by autograd
    3. backward           that derivative goes to the server as it is

Both passes take their places in the session's order when the call is made, so that an optim_step that is submitted
right behind it runs after the backward pass.
"""

from __future__ import annotations

import asyncio
import functools
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from tinker import types

from tinker_compat import loss_handle, passes
from tinker_compat.errors import refuse
from tinker_compat.futures import OperationFuture
from tinker_compat.loss_handle import LossFn, LossHandle
from tinker_compat.run import Run
from together_post_training import tensors
from together_post_training.client.session import Turn
from together_post_training.v1 import data_pb2, operations_pb2, trainer_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A loss, its derivative by each sample's log-probabilities (float32, their shapes), metrics."""

    loss: float
    gradients: list[np.ndarray]
    metrics: Mapping[str, float]


def forward_backward_custom(
    run: Run, data: Sequence[types.Datum], loss_fn: LossFn | LossHandle
) -> OperationFuture[types.ForwardBackwardOutput]:
    """See the module's docstring.

    Raises:
        ImportError: without torch.
        ValueError: without data or target_tokens; for a handle of another session, or data that it cannot read.
        RuntimeError: inside a custom loss.
    """
    import torch  # noqa: F401 - missing torch is the caller's to know now, not when the forward pass is done

    if _loss_thread(os.getpid()).is_current():
        raise RuntimeError(
            "forward_backward_custom was called by a custom loss. Losses run one at a time, so that this one would "
            "wait for itself forever; call it before or after."
        )
    slices = passes.split(data)
    batch_loss = _batch_loss(run, data, loss_fn)
    requests = passes.forward_requests(
        [_scored_only(datum) for datum in data],
        slices,
        data_pb2.LossConfig(type="cross_entropy"),
    )

    async def run_both(
        turn: Turn, before: asyncio.Event | None, sent: asyncio.Event
    ) -> types.ForwardBackwardOutput:
        forward_turn, backward_turn = turn.split(len(slices))
        run.session.number(requests, forward_turn)
        scored = await run.session.run(requests, after=run.await_turn(before))
        evaluated = await _in_loss_thread(evaluate, data, batch_loss, _logprobs(scored))
        backward = _backward_requests(data, slices, evaluated.gradients)
        run.session.number(backward, backward_turn)
        sent.set()
        return _output(await run.session.run(backward), evaluated)

    return run.submit_in_two_steps(2 * len(slices), run_both)


def _batch_loss(run: Run, data: Sequence[types.Datum], given: LossFn | LossHandle) -> LossFn:
    if isinstance(given, LossHandle):
        loss_handle.check_session(given, run.holder.get_session_id())
        return loss_handle.as_loss_fn(given, data)
    if not callable(given):
        refuse(
            f"loss_fn is a {type(given).__name__}: pass a function of (data, logprobs), or a handle that "
            "create_custom_loss returned."
        )
    return given


def evaluate(
    data: Sequence[types.Datum], loss_fn: LossFn, logprobs: Sequence[np.ndarray]
) -> Evaluated:
    """Calls the loss on leaf tensors, one of the target_tokens' shape for each sample.

    Raises:
        TypeError: when the loss returns anything but a loss and a dict of metrics.
        ValueError: when the loss does not depend on some sample's log-probabilities.
    """
    import torch

    leaves = [torch.tensor(values).requires_grad_(True) for values in logprobs]
    loss, metrics = _loss_and_metrics(loss_fn(cast("list[types.Datum]", data), leaves))
    value = float(loss.detach().sum().item())
    loss.backward()
    gradients = []
    for leaf in leaves:
        if leaf.grad is None:
            raise ValueError("No gradient computed for logprob tensor")
        gradients.append(leaf.grad.numpy())
    return Evaluated(loss=value, gradients=gradients, metrics=metrics)


def _loss_and_metrics(returned: Any) -> tuple[Any, Mapping[str, float]]:
    match returned:
        case (loss, Mapping() as metrics):
            return loss, metrics
    raise TypeError(
        f"loss_fn returned {returned!r}: it must return two things, the loss (a tensor of one element) and a dict of "
        "metrics, which may be empty."
    )


def _scored_only(datum: types.Datum) -> types.Datum:
    """What the forward pass needs. Weights are irrelevant to it; as zeros they keep its unused loss finite."""
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        raise ValueError("target_tokens must be provided when using cross_entropy")
    weights = datum.loss_fn_inputs.get("weights")
    if weights is None:
        weights = types.TensorData(
            data=np.zeros(targets.to_numpy().shape, np.float32),
            dtype="float32",
            shape=targets.shape,
        )
    return replace(datum, loss_fn_inputs={"target_tokens": targets, "weights": weights})


def _backward_requests(
    data: Sequence[types.Datum], slices: Sequence[slice], gradients: Sequence[np.ndarray]
) -> list[trainer_pb2.CustomForwardBackwardRequest]:
    """Cut where the forward pass was: the sequence numbers are reserved for as many."""
    targets = [
        replace(datum, loss_fn_inputs={"target_tokens": datum.loss_fn_inputs["target_tokens"]})
        for datum in data
    ]
    requests = passes.custom_requests(targets, slices)
    for request, part in zip(requests, slices, strict=True):
        for gradient in gradients[part]:
            tensors.encode_into(request.gradients.add(), gradient)
    return requests


def _logprobs(operations: Sequence[operations_pb2.Operation]) -> list[np.ndarray]:
    return [
        tensors.decode(output.tensors["logprobs"])
        for operation in operations
        for output in operation.forward_backward.loss_fn_outputs
    ]


def _output(
    operations: Sequence[operations_pb2.Operation], evaluated: Evaluated
) -> types.ForwardBackwardOutput:
    """The caller's metrics and loss, beside the server's. The surrogate loss is what the backward pass minimised:
    sum of gradient * logprob."""
    result = passes.output(operations)
    terms = zip(evaluated.gradients, _logprobs(operations), strict=True)
    surrogate = sum(float(np.vdot(g.astype(np.float64), lp)) for g, lp in terms)
    result.metrics.update(evaluated.metrics)
    result.metrics["loss:sum"] = evaluated.loss
    result.metrics["surrogate_loss:sum"] = surrogate
    return result


async def _in_loss_thread(function: Callable[..., Evaluated], *arguments: Any) -> Evaluated:
    return await asyncio.wrap_future(_loss_thread(os.getpid()).submit(function, *arguments))


class _LossThread:
    """One thread for all losses of a process: they run one at a time, as the functions may share state.

    A daemon with a queue: an executor takes no work any more when a script has run its last line, although losses of
    operations that nobody waited for are still to come.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]]
        self._work = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tinker-custom-loss", daemon=True)
        self._thread.start()

    def is_current(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def submit(self, function: Callable[..., Evaluated], *arguments: Any) -> Future[Evaluated]:
        future: Future[Evaluated] = Future()
        self._work.put((future, function, arguments))
        return future

    def _run(self) -> None:
        while True:
            _run_one(*self._work.get())


def _run_one(future: Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*arguments))
    except BaseException as error:
        future.set_exception(error)


@functools.cache
def _loss_thread(_pid: int) -> _LossThread:
    return _LossThread()
