"""Losses that the caller evaluates."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker import types

import tinker_compat as tinker
from tests.compat.conftest import MODEL
from tests.compat.data import HIT, MISS, close, datum, prompt
from together_post_training.errors import Reason, fail

LINEAR = types.AdamParams(learning_rate=100.0, eps=1e4)
POISONED = "A previous request failed; this TrainingClient is poisoned"


def cross_entropy(data: Any, logprobs: list[Any]) -> Any:
    weights = [torch.tensor(d.loss_fn_inputs["weights"].data) for d in data]
    loss = -sum((w * lp).sum() for w, lp in zip(weights, logprobs, strict=True))
    return loss, {"plain": 1.0, "tokens:sum": 7.0}


def logprobs(client: tinker.TrainingClient) -> list[float]:
    result = client.forward([datum()], "cross_entropy").result()
    return result.loss_fn_outputs[0]["logprobs"].tolist()


def test_a_custom_loss_sees_the_data_and_leaf_logprobs_of_the_targets_shape(client):
    seen: list[Any] = []
    data = [datum(), datum([3, 4], target_tokens=np.array([[4, 9], [9, 5]]), extra=np.ones(5))]

    def loss(received: Any, logprobs: list[Any]) -> Any:
        seen.extend([received, logprobs, threading.current_thread().name])
        return sum(lp.sum() for lp in logprobs), {}

    client.forward_backward_custom(data, loss).result()
    assert seen[0] is data
    assert [tuple(lp.shape) for lp in seen[1]] == [(3,), (2, 2)]
    assert all(lp.is_leaf and lp.requires_grad and lp.dtype is torch.float32 for lp in seen[1])
    assert seen[1][0].tolist() == close([HIT, HIT, MISS])
    assert seen[2].startswith("tinker-custom-loss")


def test_a_custom_cross_entropy_trains_as_the_built_in_one(service):
    weights = [0.5, -1.0, 2.0]
    data = [datum(target_tokens=[4, 5, 9], weights=weights)]
    custom = service.create_lora_training_client(MODEL, rank=4, seed=1)
    built_in = service.create_lora_training_client(MODEL, rank=4, seed=1)
    result = custom.forward_backward_custom(data, cross_entropy).result()
    expected = built_in.forward_backward(data, "cross_entropy").result()
    assert result.metrics["loss:sum"] == close(expected.metrics["loss:sum"])
    custom.optim_step(LINEAR)
    built_in.optim_step(LINEAR)
    assert logprobs(custom) == close(logprobs(built_in))


def test_metrics_are_the_callers_beside_the_servers(client):
    result = client.forward_backward_custom([datum()], cross_entropy).result()
    assert result.metrics["plain"] == 1.0
    assert result.metrics["tokens:sum"] == 7.0, "the caller's win"
    assert result.metrics["loss:sum"] == close(-(2 * HIT + MISS))
    assert result.metrics["surrogate_loss:sum"] == close(-(2 * HIT + MISS))
    outputs = result.loss_fn_outputs[0]["logprobs"].tolist()
    assert outputs == close([HIT, HIT, MISS])


def test_the_gradient_of_a_nonlinear_loss_is_taken_where_the_model_is(client):
    """loss = lp^2 on one hit: d loss / d lp = 2 lp, so that is what the surrogate weighs."""

    def square(data: Any, logprobs: list[Any]) -> Any:
        return (logprobs[0] ** 2).sum(), {}

    one = [datum([3], target_tokens=[4])]
    metrics = client.forward_backward_custom(one, square).result().metrics
    assert metrics["loss:sum"] == close(HIT**2)
    assert metrics["surrogate_loss:sum"] == close(2 * HIT**2)


def test_parameters_of_the_callers_own_receive_gradients(client):
    scale = torch.nn.Parameter(torch.tensor(2.0))

    def scaled(data: Any, logprobs: list[Any]) -> Any:
        return -(scale * logprobs[0]).sum(), {}

    client.forward_backward_custom([datum()], scaled).result()
    assert scale.grad is not None
    assert scale.grad.item() == close(-(2 * HIT + MISS))


def test_an_optim_step_behind_a_custom_loss_uses_its_gradient(client):
    client.forward_backward_custom([datum()], cross_entropy)
    client.optim_step(LINEAR)
    assert logprobs(client)[2] > MISS + 0.1


def test_several_custom_losses_accumulate_in_order(client):
    order: list[int] = []

    def numbered(i: int) -> Any:
        def loss(data: Any, logprobs: list[Any]) -> Any:
            order.append(i)
            return cross_entropy(data, logprobs)

        return loss

    for i in range(4):
        client.forward_backward_custom([datum()], numbered(i))
    four = client.optim_step(LINEAR).result().metrics["unclipped_grad_l2:mean"]
    assert order == [0, 1, 2, 3]
    assert four > 1


def test_a_large_batch_reserves_two_numbers_per_chunk_and_comes_back_in_order(client):
    data = [datum([i % 16], target_tokens=[(i + 1 + i % 3) % 16]) for i in range(1030)]

    def loss(data: Any, logprobs: list[Any]) -> Any:
        return sum(lp.sum() for lp in logprobs), {}

    result = client.forward_backward_custom(data, loss).result()
    assert client._core.session.reserve(1).sequences.start == 5
    values = [o["logprobs"].tolist()[0] for o in result.loss_fn_outputs]
    assert values == close([HIT if i % 3 == 0 else MISS for i in range(1030)])


def test_custom_losses_work_from_a_coroutine(client):
    async def main() -> types.ForwardBackwardOutput:
        future = await client.forward_backward_custom_async([datum()], cross_entropy)
        await client.optim_step_async(LINEAR)
        return await future

    assert asyncio.run(main()).metrics["plain"] == 1.0


def raising(data: Any, logprobs: list[Any]) -> Any:
    raise KeyError("my own mistake")


def untouched(data: Any, logprobs: list[Any]) -> Any:
    return logprobs[0].sum(), {}


def number(data: Any, logprobs: list[Any]) -> Any:
    return 1.5, {}


def vector(data: Any, logprobs: list[Any]) -> Any:
    return logprobs[0], {}


def without_metrics(data: Any, logprobs: list[Any]) -> Any:
    return sum(lp.sum() for lp in logprobs)


def metrics_none(data: Any, logprobs: list[Any]) -> Any:
    return sum(lp.sum() for lp in logprobs), None


def leaving(data: Any, logprobs: list[Any]) -> Any:
    sys.exit("no use going on")


@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (raising, KeyError),
        (untouched, ValueError),
        (number, AttributeError),
        (vector, RuntimeError),
        (without_metrics, TypeError),
        (metrics_none, TypeError),
        (leaving, SystemExit),
    ],
)
def test_a_loss_that_fails_raises_its_error_and_poisons_the_client(client, loss, error):
    before = client.save_weights_and_get_sampling_client()
    failed = client.forward_backward_custom([datum(), datum()], loss)
    behind = client.optim_step(LINEAR)
    with pytest.raises(error):
        failed.result()
    for later in (behind, client.forward([datum()], "cross_entropy"), client.save_state("x")):
        with pytest.raises(RuntimeError, match=POISONED) as refused:
            later.result(timeout=5)
        assert type(refused.value.__cause__) is error
    again = client.forward_backward_custom([datum()], cross_entropy)
    with pytest.raises(RuntimeError, match=POISONED) as refused:
        again.result(timeout=5)
    assert type(refused.value.__cause__) is error
    assert before.compute_logprobs(prompt(3, 4)).result()[1] == close(HIT)


def test_a_loss_that_fails_leaves_no_hole_in_the_servers_numbers(fake):
    training = tinker.ServiceClient(base_url=fake.address).create_lora_training_client("fake")
    with pytest.raises(KeyError):
        training.forward_backward_custom([datum()], raising).result()
    with pytest.raises(RuntimeError, match=POISONED):
        training.optim_step(LINEAR).result()
    session = next(iter(fake.sessions.values()))
    for _ in range(100):
        if session.next_sequence == 3:
            break
        threading.Event().wait(0.05)
    assert session.next_sequence == 3, "the backward pass's number was used up"
    assert fake.received("OptimStep") == []


def test_what_follows_a_custom_loss_is_sent_along_with_its_backward_pass(fake):
    training = tinker.ServiceClient(base_url=fake.address).create_lora_training_client("fake")
    fake.unfinished = {2}
    backward = training.forward_backward_custom([datum()], cross_entropy)
    step = training.optim_step(LINEAR)
    for _ in range(100):
        if fake.received("OptimStep"):
            break
        threading.Event().wait(0.05)
    assert not backward.done()
    assert [r.sequence for r in fake.received("OptimStep")] == [3]
    fake.unfinished.clear()
    fake.nudge()
    assert step.result(5)


def test_cancelling_a_custom_loss_poisons_the_client(fake):
    training = tinker.ServiceClient(base_url=fake.address).create_lora_training_client("fake")
    fake.unfinished = {1}
    future = training.forward_backward_custom([datum()], cross_entropy)
    behind = training.optim_step(LINEAR)
    future.cancel()
    with pytest.raises(RuntimeError, match=POISONED) as refused:
        behind.result(timeout=5)
    assert isinstance(refused.value.__cause__, asyncio.CancelledError)


def test_data_that_the_server_refuses_poisons_as_tinkers_does(client):
    future = client.forward_backward_custom([datum(target_tokens=[4, 5])], cross_entropy)
    with pytest.raises(tinker.BadRequestError, match=r"2 values.*3 tokens"):
        future.result()
    with pytest.raises(RuntimeError, match=POISONED):
        client.optim_step(LINEAR).result()


def test_what_is_wrong_with_the_call_is_raised_at_the_call_and_poisons_nothing(client):
    with pytest.raises(ValueError, match="No data provided"):
        client.forward_backward_custom([], cross_entropy)
    with pytest.raises(ValueError, match="target_tokens must be provided"):
        client.forward_backward_custom([datum(weights=[1.0, 1.0, 1.0])], cross_entropy)
    with pytest.raises(ValueError, match="Unsupported loss_type_input='hidden'"):
        client.forward_backward_custom([datum()], cross_entropy, loss_type_input="hidden")
    with pytest.raises(tinker.BadRequestError, match="loss_fn is a str"):
        client.forward_backward_custom([datum()], "cross_entropy")
    with pytest.warns(DeprecationWarning, match="loss_type_input"):
        client.forward_backward_custom([datum()], cross_entropy, loss_type_input="logprobs")
    assert client.optim_step(LINEAR).result()


def test_a_gradient_that_is_not_finite_is_refused_with_its_place(client):
    def infinite(data: Any, logprobs: list[Any]) -> Any:
        return (logprobs[0] * torch.tensor([1.0, float("inf"), 1.0])).sum(), {}

    with pytest.raises(tinker.BadRequestError, match=r"Sample 0: gradient\[1\] is inf"):
        client.forward_backward_custom([datum()], infinite).result()


def test_a_backward_pass_that_the_server_fails_poisons_too(fake):
    def refuse(request: object) -> None:
        if type(request).__name__ == "CustomForwardBackwardRequest":
            raise fail(Reason.NON_FINITE_LOSS, "not finite")

    fake.behave = refuse
    training = tinker.ServiceClient(base_url=fake.address).create_lora_training_client("fake")
    with pytest.raises(tinker.RequestFailedError, match="not finite"):
        training.forward_backward_custom([datum()], cross_entropy).result()
    with pytest.raises(RuntimeError, match=POISONED):
        training.save_state("x").result()


def test_a_custom_loss_inside_a_custom_loss_is_refused_instead_of_waiting_for_itself(service):
    inner = service.create_lora_training_client(MODEL, rank=4).result()
    outer = service.create_lora_training_client(MODEL, rank=4).result()

    def nested(data: Any, logprobs: list[Any]) -> Any:
        inner.forward_backward_custom(data, cross_entropy).result()
        return cross_entropy(data, logprobs)

    with pytest.raises(RuntimeError, match="wait for itself"):
        outer.forward_backward_custom([datum()], nested).result(timeout=10)
    assert inner.forward_backward_custom([datum()], cross_entropy).result(timeout=10)


def test_a_script_that_ends_while_a_custom_loss_runs_still_takes_the_step_and_saves(address):
    script = f"""
import time
import tinker_compat as tinker
from tinker import types

def loss(data, logprobs):
    time.sleep(0.5)
    return -logprobs[0].sum(), {{}}

service = tinker.ServiceClient(base_url={address!r})
client = service.create_lora_training_client({MODEL!r}, rank=4).result()
inputs = {{"target_tokens": [4]}}
datum = types.Datum(model_input=types.ModelInput.from_ints([3]), loss_fn_inputs=inputs)
for _ in range(3):
    client.forward_backward_custom([datum], loss)
    client.optim_step(types.AdamParams())
client.save_state("at-the-end")
print(client.model_id)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    path = f"tinker://{done.stdout.strip()}/weights/at-the-end"
    again = tinker.ServiceClient(base_url=address)
    assert again.create_training_client_from_state_with_optimizer(path).result(), done.stderr
