"""Losses of one sample that are traced first and used by handle."""

from __future__ import annotations

import asyncio
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker as genuine
import torch
from tinker import types

import tinker_compat as tinker
from tests.compat.conftest import MODEL
from tests.compat.data import HIT, MISS, close, datum
from tinker_compat import loss_handle

LINEAR = types.AdamParams(learning_rate=100.0, eps=1e4)
# float32 inputs and a float32 sum of a few terms.
FLOAT32 = 1e-5


def neg_ll(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/neg_ll:sum": loss, "custom/per_sample:mean": loss * 2}


def clipped(logprobs, old_logprobs, advantages):
    ratio = torch.exp(logprobs - old_logprobs)
    kept = torch.minimum(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    return -kept.sum(), {"custom/ratio.max:mean": ratio.detach().max()}


def scaled_square(logprobs, scale):
    return scale * (logprobs[1:] ** 2).mean() + math.pi * logprobs.sum(), {}


def expected_under(logprobs, target_distribution):
    loss = -(target_distribution * logprobs).sum(dim=-1).mean()
    return torch.nn.functional.softplus(loss), {"custom/rows:sum": torch.ones_like(loss)}


def floats(values: Any) -> types.TensorData:
    return types.TensorData.from_numpy(np.asarray(values, np.float32))


RANKS: dict[Callable[..., Any], dict[str, loss_handle.Rank]] = {
    neg_ll: {"logprobs": 1, "weights": 1},
    clipped: {"logprobs": 1, "old_logprobs": 1, "advantages": 1},
    scaled_square: {"logprobs": 1, "scale": 0},
    expected_under: {"logprobs": 2, "target_distribution": 2},
}


def sample_for(loss: Callable[..., Any], rng: np.random.Generator) -> types.Datum:
    """Of a random length, with what the loss reads."""
    length = int(rng.integers(2, 6))
    tokens = rng.integers(0, 16, length + 1)
    shape = (length, 3) if RANKS[loss]["logprobs"] == 2 else (length,)
    targets = tokens[1:] if len(shape) == 1 else rng.integers(0, 16, shape)
    inputs: dict[str, Any] = {"target_tokens": types.TensorData.from_numpy(targets)}
    for name, rank in RANKS[loss].items():
        if name != "logprobs":
            inputs[name] = floats(rng.normal(-1, 1, shape if rank else ()))
    return datum(tokens[:-1].tolist(), **inputs)


def by_hand(loss: Callable[..., Any]) -> Any:
    """The same loss as a user writes it for a whole batch."""
    names = list(RANKS[loss])[1:]

    def batch(data: list[types.Datum], logprobs: list[Any]) -> Any:
        total, sums = None, {}
        for one, lp in zip(data, logprobs, strict=True):
            value, metrics = loss(lp, *(one.loss_fn_inputs[name].to_torch() for name in names))
            total = value if total is None else total + value
            for name, metric in metrics.items():
                sums[name] = sums.get(name, 0.0) + metric.item()
        return total, {k: v / len(data) if k.endswith(":mean") else v for k, v in sums.items()}

    return batch


def trained(client: tinker.TrainingClient, data: list[types.Datum], loss: Any) -> Any:
    """Metrics, logprobs and, after a step, the logprobs of every pair of tokens, all with their bits."""
    output = client.forward_backward_custom(data, loss).result()
    client.optim_step(LINEAR).result()
    table = types.TensorData.from_numpy(np.tile(np.arange(16), (16, 1)))
    every = datum(list(range(16)), target_tokens=table)
    after = client.forward([every], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    before = [one["logprobs"].to_numpy().tobytes() for one in output.loss_fn_outputs]
    return output.metrics, before, after.to_numpy().tobytes()


@pytest.mark.parametrize("loss", RANKS, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("num_samples", [1, 7, 1030])
def test_a_handle_gives_bit_for_bit_what_the_function_gives(service, loss, num_samples):
    """1030 samples are sent in two parts."""
    rng = np.random.default_rng(num_samples)
    data = [sample_for(loss, rng) for _ in range(num_samples)]
    handle = service.create_custom_loss(loss, RANKS[loss]).result()
    one, other = (service.create_lora_training_client(MODEL, rank=4, seed=1) for _ in range(2))
    by_handle, by_function = trained(one, data, handle), trained(other, data, by_hand(loss))
    assert by_handle == by_function
    untouched = service.create_lora_training_client(MODEL, rank=4, seed=1)
    assert by_handle[2] != trained(untouched, data, lambda _, lps: (sum(map(torch.sum, lps)), {}))


def test_a_handle_gives_what_a_float64_reference_gives(service, client):
    rng = np.random.default_rng(3)
    data = [sample_for(clipped, rng) for _ in range(20)]
    handle = service.create_custom_loss(clipped, RANKS[clipped]).result()
    output = client.forward_backward_custom(data, handle).result()
    loss = surrogate = ratios = 0.0
    for one, result in zip(data, output.loss_fn_outputs, strict=True):
        lp, q, a = (
            np.asarray(tensor.tolist(), np.float64)
            for tensor in (
                result["logprobs"],
                one.loss_fn_inputs["old_logprobs"],
                one.loss_fn_inputs["advantages"],
            )
        )
        ratio = np.exp(lp - q)
        bounded = np.clip(ratio, 0.8, 1.2)
        loss -= np.minimum(ratio * a, bounded * a).sum()
        follows = (ratio * a <= bounded * a) * ratio * a
        surrogate -= (follows * lp).sum()
        ratios += ratio.max()
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=FLOAT32)
    assert output.metrics["surrogate_loss:sum"] == pytest.approx(surrogate, rel=FLOAT32)
    assert output.metrics["custom/ratio.max:mean"] == pytest.approx(ratios / 20, rel=FLOAT32)


def test_a_handle_trains_as_the_built_in_loss_of_its_formula(service):
    """neg_ll is cross_entropy."""
    handle = service.create_custom_loss(neg_ll, RANKS[neg_ll]).result()
    data = [datum(), datum(target_tokens=[4, 5, 9], weights=[0.5, -1.0, 2.0])]
    by_handle, built_in = (
        service.create_lora_training_client(MODEL, rank=4, seed=1) for _ in range(2)
    )
    ours = by_handle.forward_backward_custom(data, handle)
    theirs = built_in.forward_backward(data, "cross_entropy")
    assert ours.result().metrics["loss:sum"] == close(theirs.result().metrics["loss:sum"])
    by_handle.optim_step(LINEAR)
    built_in.optim_step(LINEAR)
    after = [
        run.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
        for run in (by_handle, built_in)
    ]
    assert after[0] == close(after[1])
    assert after[0] != close([HIT, HIT, MISS])


def test_metrics_are_summed_or_averaged_over_samples_beside_the_servers(service, client):
    handle = service.create_custom_loss(neg_ll, RANKS[neg_ll]).result()
    metrics = client.forward_backward_custom([datum(), datum()], handle).result().metrics
    one = -(2 * HIT + MISS)
    assert metrics["loss:sum"] == metrics["custom/neg_ll:sum"] == close(2 * one)
    assert metrics["custom/per_sample:mean"] == close(2 * one)
    assert metrics["surrogate_loss:sum"] == close(2 * one)


def test_a_handle_says_what_it_reads(service):
    handle = service.create_custom_loss(clipped, RANKS[clipped]).result()
    assert isinstance(handle, tinker.LossHandle)
    assert handle.name == "clipped"
    assert [(read.name, read.rank) for read in handle.inputs] == list(RANKS[clipped].items())
    assert handle.input_names == ("old_logprobs", "advantages")
    assert handle.session_id == service.holder.get_session_id()
    assert handle.loss_id is None
    if hasattr(genuine, "LossHandle"):
        assert tinker.LossHandle is genuine.LossHandle


def test_a_loss_can_be_awaited_and_used_before_anything_was_sent(service):
    async def main() -> types.ForwardBackwardOutput:
        handle = await service.create_custom_loss(neg_ll, RANKS[neg_ll])
        client = service.create_lora_training_client(MODEL, rank=4)
        future = await client.forward_backward_custom_async([datum()], handle)
        await client.optim_step_async(LINEAR)
        return await future

    assert asyncio.run(main()).metrics["custom/neg_ll:sum"] == close(-(2 * HIT + MISS))


def test_the_data_of_a_handle_is_read_when_the_call_is_made(service, client):
    handle = service.create_custom_loss(neg_ll, RANKS[neg_ll]).result()
    weights = np.ones(3, np.float32)
    data = [datum(target_tokens=[4, 5, 9], weights=types.TensorData.from_numpy(weights))]
    future = client.forward_backward_custom(data, handle)
    weights[:] = 100.0
    data[0].loss_fn_inputs.pop("weights")
    assert future.result().metrics["loss:sum"] == close(-(2 * HIT + MISS))


def same_by_another_name(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/neg_ll:sum": loss, "custom/per_sample:mean": loss * 2}


def test_a_session_creates_a_loss_once(service, address):
    first = service.create_custom_loss(neg_ll, RANKS[neg_ll])
    first.result()
    for again in (neg_ll, same_by_another_name):
        future = service.create_custom_loss(again, RANKS[neg_ll])
        with pytest.raises(ValueError, match="session already created 'neg_ll' with the same"):
            future.result()
    assert service.create_custom_loss(neg_ll, {"logprobs": 2, "weights": 2}).result()
    with tinker.ServiceClient(base_url=address) as other:
        assert other.create_custom_loss(neg_ll, RANKS[neg_ll]).result().session_id != (
            first.result().session_id
        )


def test_a_handle_is_bound_to_its_session(service, client, address):
    with tinker.ServiceClient(base_url=address) as other:
        handle = other.create_custom_loss(neg_ll, RANKS[neg_ll]).result()
    with pytest.raises(ValueError, match=f"'neg_ll' was created in session {handle.session_id}"):
        client.forward_backward_custom([datum()], handle)
    assert client.optim_step(LINEAR).result(), "the client is not poisoned"


def test_all_clients_of_a_session_may_use_its_handle(service, client):
    handle = service.create_custom_loss(neg_ll, RANKS[neg_ll]).result()
    second = service.create_lora_training_client(MODEL, rank=4, seed=1)
    one, two = (run.forward_backward_custom([datum()], handle) for run in (client, second))
    assert one.result().metrics == two.result().metrics


TWO_D = types.TensorData.from_numpy(np.array([[4, 9], [5, 9], [9, 4]]))


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ({"target_tokens": [4, 5, 9]}, r"datum[1] has no loss_fn_inputs['weights'], which loss"),
        ({"weights": [1.0] * 3}, "datum[1] has no loss_fn_inputs['target_tokens']"),
        (
            {"target_tokens": [4, 5, 9], "weights": floats(np.ones((3, 1)))},
            "datum[1] loss_fn_inputs['weights'] has rank 2, but loss 'neg_ll' declared weights with rank 1",
        ),
        (
            {"target_tokens": [4, 5, 9], "weights": floats(1.0)},
            "datum[1] loss_fn_inputs['weights'] has rank 0",
        ),
        (
            {"target_tokens": TWO_D, "weights": [1.0] * 3},
            "loss_fn_inputs['target_tokens'] has rank 2, but loss 'neg_ll' declared logprobs with rank 1",
        ),
    ],
)
def test_data_that_a_handle_cannot_read_is_refused_at_the_call(service, client, inputs, problem):
    handle = service.create_custom_loss(neg_ll, RANKS[neg_ll]).result()
    with pytest.raises(ValueError, match=re.escape(problem)):
        client.forward_backward_custom([datum(), datum(**inputs)], handle)
    with pytest.raises(ValueError, match="No data provided"):
        client.forward_backward_custom([], handle)
    assert client.optim_step(LINEAR).result(), "the client is not poisoned"


def test_a_tensor_without_a_shape_has_rank_1(service, client):
    handle = service.create_custom_loss(neg_ll, RANKS[neg_ll]).result()
    plain = types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32")
    data = [datum(target_tokens=[4, 5, 9], weights=plain)]
    result = client.forward_backward_custom(data, handle).result()
    assert result.metrics["loss:sum"] == close(-(2 * HIT + MISS))


def vector(logprobs):
    return -logprobs, {}


def without_logprobs(logprobs, weights):
    return weights.sum(), {}


@pytest.mark.parametrize(
    ("loss", "ranks", "error", "problem"),
    [
        (vector, {"logprobs": 1}, ValueError, r"'vector' returned a tensor of shape \(3,\)"),
        (without_logprobs, RANKS[neg_ll], RuntimeError, "does not require grad"),
    ],
)
def test_a_handle_that_fails_on_its_data_poisons_the_client(
    service, client, loss, ranks, error, problem
):
    handle = service.create_custom_loss(loss, ranks).result()
    failed = client.forward_backward_custom([datum()], handle)
    with pytest.raises(error, match=problem):
        failed.result()
    with pytest.raises(RuntimeError, match="this TrainingClient is poisoned"):
        client.optim_step(LINEAR).result()


def plus(body: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of logprobs and weights in which `body` does something to their product."""

    def loss(logprobs, weights):
        return body(logprobs * weights).sum(), {}

    return loss


def metric(name: Any, value: Callable[[Any], Any] = torch.sum) -> Callable[..., Any]:
    def loss(logprobs, weights):
        return logprobs.sum(), {name: value(weights)}

    return loss


def returns(result: Callable[[Any], Any]) -> Callable[..., Any]:
    def loss(logprobs, weights):
        return result(logprobs * weights)

    return loss


linear = torch.nn.Linear(3, 3)
BOTH = {"logprobs": 1, "weights": 1}
MANY = ", ".join(f"x{i}" for i in range(16))
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no parameters": (lambda: 0, {}, "first parameter of <lambda> must be logprobs"),
    "another first": (lambda weights, logprobs: 0, BOTH, "first parameter .* must be logprobs"),
    "star first": (lambda *logprobs: 0, {"logprobs": 1}, "'logprobs' must be a plain positional"),
    "too many": (eval(f"lambda logprobs, {MANY}: 0"), {}, "takes 17 parameters: at most 16"),
    "capitals": (lambda logprobs, Weights: 0, {}, "'Weights' must be a name of .* lowercase"),
    "long name": (eval(f"lambda logprobs, {'x' * 65}: 0"), {}, "at most 64 lowercase"),
    "kwargs": (lambda logprobs, **weights: 0, BOTH, "'weights' must be a plain positional"),
    "keyword-only": (lambda logprobs, *, weights: 0, BOTH, "'weights' must be a plain positional"),
    "default": (lambda logprobs, weights=None: 0, BOTH, "'weights' has a default"),
    "rank missing": (neg_ll, {"logprobs": 1}, r"rank for each parameter .*logprobs, weights.*got"),
    "rank of nothing": (neg_ll, {**BOTH, "mask": 1}, "input_ranks must give a rank for each"),
    "scalar logprobs": (neg_ll, {"logprobs": 0, "weights": 1}, "logprobs has rank 1.* or 2"),
    "rank 3": (neg_ll, {"logprobs": 1, "weights": 3}, "0, 1 or 2"),
    "rank in words": (neg_ll, {"logprobs": 1, "weights": "two"}, "0, 1 or 2"),
    "branch": (plus(lambda x: x if x.sum() > 0 else -x), BOTH, "cannot be traced by torch.fx"),
    "loop": (plus(lambda x: sum(v for v in x)), BOTH, "cannot be traced by torch.fx"),
    "float()": (plus(lambda x: x * float(x.sum())), BOTH, "cannot be traced by torch.fx"),
    "len()": (plus(lambda x: x / len(x)), BOTH, "cannot be traced by torch.fx"),
    "numpy": (plus(lambda x: np.exp(x)), BOTH, "cannot be traced by torch.fx"),
    "no such method": (
        plus(lambda x: x.nope()),
        BOTH,
        "'nope', which is not a torch.Tensor method",
    ),
    "backward": (plus(lambda x: x.backward()), BOTH, r"calls backward\(\): return the loss"),
    "item": (plus(lambda x: x * x.sum().item()), BOTH, r"calls item\(\): it leaves torch"),
    "to numpy": (plus(lambda x: x.numpy()), BOTH, r"calls numpy\(\): it leaves torch"),
    "to list": (plus(lambda x: x.tolist()), BOTH, r"calls tolist\(\): it leaves torch"),
    "module": (plus(lambda x: linear(x)), BOTH, "torch.nn|cannot be traced"),
    "parameter": (plus(lambda x: x * linear.weight), BOTH, "captures a tensor|cannot be traced"),
    "tensor": (plus(lambda x: x * torch.tensor(2.0)), BOTH, "captures a tensor .*only logprobs"),
    "loss alone": (returns(lambda x: x.sum()), BOTH, r"must return \(loss, metrics\)"),
    "three values": (returns(lambda x: (x.sum(), {}, 1)), BOTH, r"must return \(loss, metrics\)"),
    "nothing": (returns(lambda x: None), BOTH, r"must return \(loss, metrics\)"),
    "a number": (returns(lambda x: (1.5, {})), BOTH, "its loss as a torch.Tensor, got 1.5"),
    "no metrics": (returns(lambda x: (x.sum(), None)), BOTH, "metrics as a dict, got None"),
    "metric's prefix": (metric("ratio:mean"), BOTH, "'ratio:mean' must be named custom/<name>"),
    "metric's suffix": (metric("custom/ratio:max"), BOTH, "'custom/ratio:max' must be named"),
    "metric's case": (metric("custom/Ratio:mean"), BOTH, "'custom/Ratio:mean' must be named"),
    "metric's key": (metric(7), BOTH, "metric 7 must be named"),
    "metric's value": (
        metric("custom/a:sum", lambda w: 2.0),
        BOTH,
        "must be a torch.Tensor, got 2",
    ),
    "unnamed callable": (torch.nn.ReLU(), BOTH, "ReLU"),
}


@pytest.mark.parametrize(("loss", "ranks", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_a_loss_is_refused_at_the_call_with_its_name(service, loss, ranks, problem):
    with pytest.raises(ValueError, match=problem) as refused:
        service.create_custom_loss(loss, ranks)
    if not problem.startswith("0"):
        assert str(refused.value).startswith("create_custom_loss: ")


@torch.fx.wrap
def measured(x: Any) -> Any:
    return x


def test_functions_of_other_libraries_are_refused_by_name(service):
    with pytest.raises(ValueError, match=r"calls 'measured' from .*test_loss_handle'"):
        service.create_custom_loss(
            plus(lambda x: measured(x)), BOTH
        )  # looked up while it is traced


@pytest.mark.skipif(not hasattr(genuine, "LossHandle"), reason="an older Tinker has no handles")
@pytest.mark.parametrize(
    ("loss", "ranks"),
    [(loss, ranks) for loss, ranks, _ in REFUSED.values()] + list(RANKS.items()),
    ids=[*REFUSED, *(loss.__name__ for loss in RANKS)],
)
def test_tinker_refuses_the_same_losses_with_the_same_kind_of_error(loss, ranks):
    """And makes equal handles of the others."""
    from tinker.lib.public_interfaces.custom_loss import trace_loss

    def outcome(trace: Callable[..., Any]) -> Any:
        try:
            handle = trace(loss, ranks, "session")
        except Exception as error:
            return type(error)
        return handle, handle.graph.code, handle.key

    assert outcome(loss_handle.trace) == outcome(trace_loss)


def test_what_is_no_function_is_a_type_error(service):
    with pytest.raises(TypeError, match="not a callable"):
        service.create_custom_loss(None, {})


def test_losses_are_not_uploaded_and_the_refusal_says_what_to_do(client):
    for call in (client.forward, client.forward_backward):
        with pytest.raises(tinker.BadRequestError, match=r"create_custom_loss.*in this process"):
            call([datum()], "custom", {"loss_id": "loss-1"})
    assert client.optim_step(LINEAR).result()


def test_a_closed_client_creates_no_loss(address):
    service = tinker.ServiceClient(base_url=address)
    service.close("success").result()
    with pytest.raises(RuntimeError, match="closed"):
        service.create_custom_loss(neg_ll, RANKS[neg_ll])


def test_without_torch_a_loss_is_an_import_error():
    script = """
import sys
sys.modules["torch"] = None
import tinker_compat as tinker
try:
    tinker.ServiceClient(base_url="grpc://localhost:1").create_custom_loss(lambda logprobs: 0, {})
except ImportError as error:
    print("refused:", error)
"""
    command = [sys.executable, "-c", script]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("refused:"), done.stderr
