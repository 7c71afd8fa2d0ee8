"""Traps of compatibility, one test each, as a user meets them: order, losses, gradients, optimiser.

The numbers rank what most often breaks scripts that were written for Tinker; the other numbers are in the other
test_traps files.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch
from tinker import types

import tinker_compat as tinker
from tests.compat.data import HIT, MISS, close, datum, prompt
from tests.compat.traps import ADAM, LINEAR, fresh, logprobs, step_metrics

SUFFIXES = {"sum", "mean", "min", "max", "slack", "unique", "hash2"}


def gradient_norm(client: tinker.TrainingClient) -> float:
    """Of the window so far, which it ends without a step."""
    return step_metrics(client, types.AdamParams(learning_rate=0.0))["unclipped_grad_l2:mean"]


def test_trap_03_calls_take_effect_in_their_order_without_being_awaited(service):
    """1030 samples are two operations; nothing is collected before the end."""
    many = [datum([i % 16], target_tokens=[5]) for i in range(1030)]
    pipelined, waited = fresh(service), fresh(service)
    pipelined.forward_backward(many, "cross_entropy")
    pipelined.optim_step(ADAM)
    first = pipelined.save_weights_and_get_sampling_client()
    pipelined.forward_backward([datum()], "cross_entropy")
    pipelined.optim_step(ADAM)
    saved = pipelined.save_weights_for_sampler("after-two-steps")

    waited.forward_backward(many, "cross_entropy").result()
    waited.optim_step(ADAM).result()
    after_one = waited.save_weights_and_get_sampling_client().result()
    waited.forward_backward([datum()], "cross_entropy").result()
    waited.optim_step(ADAM).result()
    after_two = waited.save_weights_and_get_sampling_client().result()

    def scores(sampler: tinker.SamplingClient) -> list[float | None]:
        return sampler.compute_logprobs(prompt(3, 5, 9)).result()

    assert scores(first.result()) == scores(after_one)
    assert scores(service.create_sampling_client(saved.result().path)) == scores(after_two)
    assert scores(after_one) != scores(after_two)


def test_trap_03_a_coroutine_takes_its_place_when_it_begins(client):
    """As of any coroutine function: calling it does nothing yet."""

    async def main() -> None:
        later = client.forward_backward_async([datum()], "cross_entropy")
        step = client.optim_step(LINEAR)
        await (await later)
        assert (await step).metrics["empty_window:max"] == 1

    asyncio.run(main())
    assert gradient_norm(client) > 1, "its gradient came after the step"


def test_trap_04_losses_are_sums_and_nothing_is_shifted(client):
    one, other = datum(), datum([7, 8], target_tokens=[8, 3], weights=[0.5, -2.0])
    together = client.forward([one, other, one], "cross_entropy").result()
    assert together.metrics["loss:sum"] == close(-(4 * HIT + 2 * MISS + 0.5 * HIT - 2 * MISS))
    values = [output["logprobs"].tolist() for output in together.loss_fn_outputs]
    assert values == [close([HIT, HIT, MISS]), close([HIT, MISS]), close([HIT, HIT, MISS])]

    client.forward_backward([one], "cross_entropy")
    single = gradient_norm(client)
    client.forward_backward([one] * 3, "cross_entropy")
    assert gradient_norm(client) == pytest.approx(3 * single, rel=1e-6)


def test_trap_04_weights_may_be_negative_and_fractions(client):
    before = logprobs(client)
    away = datum([3], target_tokens=[4], weights=[-0.25])
    result = client.forward_backward([away], "cross_entropy").result()
    assert result.metrics["loss:sum"] == close(0.25 * HIT)
    client.optim_step(LINEAR)
    assert logprobs(client)[0] < before[0]


POLICY = {
    "target_tokens": [4, 5, 9],
    "logprobs": [HIT, HIT, MISS],
    "advantages": [0.5, -1.0, 2.0],
}
LOSSES: dict[str, tuple[dict[str, Any], dict[str, float] | None]] = {
    "cross_entropy": ({"target_tokens": [4, 5, 9], "weights": [1.0, 0.5, 2.0]}, None),
    "importance_sampling": (POLICY, None),
    "ppo": (POLICY, None),
    "cispo": (POLICY, None),
    "dro": (POLICY, {"beta": 0.05}),
    "gspo": (POLICY | {"sequence_ratio_mask": np.ones(3, np.float32)}, None),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_trap_05_every_loss_reports_its_sum_and_metrics_name_their_reduction(client, loss):
    inputs, config = LOSSES[loss]
    data = [datum(**inputs), datum(**inputs)]
    on_policy = -(0.5 - 1.0 + 2.0)
    weighted = {
        "cross_entropy": -(HIT + 0.5 * HIT + 2 * MISS),
        "cispo": -(0.5 * HIT - HIT + 2 * MISS),
        "dro": -(0.5 * HIT - HIT + 2 * MISS),
    }
    for call in (client.forward, client.forward_backward):
        metrics = call(data, loss, config).result().metrics
        assert metrics["loss:sum"] == close(2 * weighted.get(loss, on_policy))
        for name in metrics:
            _, suffix = name.split(":")
            assert suffix in SUFFIXES, name


def test_trap_05_custom_losses_report_their_sum_too(client):
    metrics = client.forward_backward_custom([datum()], negated).result().metrics
    assert metrics["loss:sum"] == close(-(2 * HIT + MISS))


def negated(data: list[types.Datum], logprobs: list[Any]) -> Any:
    return -sum(lp.sum() for lp in logprobs), {}


@pytest.mark.parametrize("loss", LOSSES)
def test_trap_06_logprobs_are_tensor_data_one_for_each_datum_in_order(client, loss):
    inputs, config = LOSSES[loss]
    longer = {
        name: np.append(values, values[-1:]).astype(np.int64 if name == "target_tokens" else "f4")
        for name, values in inputs.items()
    }
    longer["target_tokens"][3] = 10
    data = [datum(**inputs), datum([3, 4, 5, 9], **longer)]
    result = client.forward_backward(data, loss, config).result()
    tensors = [output["logprobs"] for output in result.loss_fn_outputs]
    assert [type(tensor) for tensor in tensors] == [types.TensorData] * 2
    assert [(tensor.dtype, tensor.shape) for tensor in tensors] == [
        ("float32", [n]) for n in (3, 4)
    ]
    first, second = tensors
    assert first.tolist() == first.data == close([HIT, HIT, MISS])
    assert second.to_torch().dtype is torch.float32
    assert second.to_torch().tolist() == second.tolist() == close([HIT, HIT, MISS, HIT])


def test_trap_10_gradients_accumulate_until_the_step_and_forward_adds_none(service):
    """Sums of the same float32 numbers in another order."""
    parts, whole = fresh(service), fresh(service)
    other = datum([7], target_tokens=[2], weights=[0.5])
    parts.forward_backward([datum()], "cross_entropy")
    parts.forward([datum()] * 5, "cross_entropy")
    parts.forward_backward([other], "cross_entropy")
    whole.forward_backward([datum(), other], "cross_entropy")
    stepped = [step_metrics(run, LINEAR) for run in (parts, whole)]
    norms = [metrics["unclipped_grad_l2:mean"] for metrics in stepped]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert logprobs(parts) == close(logprobs(whole))
    assert logprobs(parts) != close([HIT, HIT, MISS])
    assert step_metrics(parts, LINEAR)["empty_window:max"] == 1
    assert logprobs(parts) == close(logprobs(whole))


def test_trap_10_moments_last_and_hyper_parameters_are_those_of_the_call(service):
    """Two steps of the same gradient, seen by AdamW: B moves by lr * sign(g) each time, whatever lr was before."""
    client = fresh(service)
    moved = []
    for learning_rate in (0.01, 0.03):
        client.forward_backward([datum()], "cross_entropy")
        params = types.AdamParams(learning_rate=learning_rate, beta1=0.0, beta2=0.0)
        moved.append(step_metrics(client, params)["update_l2:mean"])
    assert moved[1] == pytest.approx(3 * moved[0], rel=0.5), "A moves as well in the second"

    stopped = client.save_state("after-two").result().path
    warm = service.create_training_client_from_state_with_optimizer(stopped).result()
    cold = service.create_training_client_from_state(stopped).result()
    for run in (client, warm, cold):
        run.forward_backward([datum([3], target_tokens=[9])], "cross_entropy")
        run.optim_step(ADAM).result()
    assert logprobs(warm) == logprobs(client)
    assert logprobs(cold) != logprobs(client)


def two_steps(service: tinker.ServiceClient, params: types.AdamParams) -> list[float]:
    """Of gradients so small that eps counts, and so different that beta2 does."""
    client = fresh(service)
    for weight in (1e-9, 1e-8):
        tiny = datum([3], target_tokens=[9], weights=[weight])
        client.forward_backward([tiny], "cross_entropy")
        client.optim_step(params).result()
    result = client.forward([datum([3], target_tokens=[9])], "cross_entropy").result()
    return result.loss_fn_outputs[0]["logprobs"].tolist()


def test_trap_11_adams_defaults(service):
    default = types.AdamParams()
    spelled_out = types.AdamParams(
        learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0
    )
    assert default == spelled_out
    steps = {"learning_rate": 0.1}
    ours = two_steps(service, types.AdamParams(**steps))
    assert ours == two_steps(service, spelled_out.model_copy(update=steps))
    for other in ({"eps": 1e-8}, {"beta2": 0.999}, {"weight_decay": 0.5}):
        assert two_steps(service, types.AdamParams(**steps, **other)) != close(ours), other


def test_trap_11_clipping_is_by_the_norm_of_the_whole_window_and_off_at_zero(service):
    def step(clip: float) -> dict[str, float]:
        client = fresh(service)
        client.forward_backward([datum()], "cross_entropy")
        client.forward_backward([datum()] * 2, "cross_entropy")
        params = types.AdamParams(learning_rate=100.0, eps=1e4, grad_clip_norm=clip)
        result = client.optim_step(params).result()
        # As scripts read it.
        metrics: dict[str, float] = {}
        if result.metrics:
            metrics.update(result.metrics)
        return metrics

    free = step(0.0)
    norm = free["unclipped_grad_l2:mean"]
    loose, tight = step(2 * norm), step(norm / 2)
    assert loose["unclipped_grad_l2:mean"] == tight["unclipped_grad_l2:mean"] == norm
    assert loose["update_l2:mean"] == free["update_l2:mean"]
    # AdamW divides by eps and a little more, which is less of a smaller gradient.
    assert tight["update_l2:mean"] == pytest.approx(free["update_l2:mean"] / 2, rel=1e-2)


def test_trap_13_two_dimensional_targets_come_as_csr_and_are_densified(client):
    """Top-4 distillation, padded with token 0 of weight 0, as torch tensors."""
    targets, weights = torch.zeros((3, 4), dtype=torch.int64), torch.zeros((3, 4))
    targets[0, :2], weights[0, :2] = torch.tensor([4, 9]), torch.tensor([0.75, 0.25])
    targets[1, 0], weights[1, 0] = 5, 1.0
    made = datum(target_tokens=targets, weights=weights)
    for name in ("target_tokens", "weights"):
        assert made.loss_fn_inputs[name].sparse_crow_indices is not None, "Tinker's own encoding"
    result = client.forward_backward([made], "cross_entropy").result()
    output = result.loss_fn_outputs[0]["logprobs"]
    assert output.shape == [3, 4]
    expected = [[HIT, MISS, MISS, MISS], [HIT, MISS, MISS, MISS], [MISS] * 4]
    assert np.array(output.tolist()) == close(np.array(expected))
    assert result.metrics["loss:sum"] == close(-(0.75 * HIT + 0.25 * MISS + HIT))


def at_ratio(log_ratio: float, advantage: float = 1.0) -> types.Datum:
    """One likely token that was sampled with another probability."""
    return datum([3], target_tokens=[4], logprobs=[HIT - log_ratio], advantages=[advantage])


@pytest.mark.parametrize(
    ("loss", "log_ratio", "advantage", "config", "expected"),
    [
        ("cispo", 2.0, 1.0, None, -4.0 * HIT),
        ("cispo", 1.0, 1.0, None, -math.e * HIT),
        ("cispo", -3.0, 1.0, None, -math.exp(-3) * HIT),
        ("ppo", 2.0, 1.0, None, -1.2),
        ("ppo", -3.0, 1.0, None, -math.exp(-3)),
        ("ppo", -3.0, -1.0, None, 0.8),
        ("ppo", 2.0, 1.0, {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}, -3.0),
        ("cispo", 2.0, 1.0, {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}, -2.0 * HIT),
        ("ppo", 0.0, 0.5, None, -0.5),
        ("importance_sampling", 0.0, 0.5, None, -0.5),
    ],
)
def test_trap_19_thresholds_are_bounds_of_the_ratio_and_no_loss_adds_a_kl_term(
    client, loss, log_ratio, advantage, config, expected
):
    data = [at_ratio(log_ratio, advantage)]
    assert client.forward(data, loss, config).result().metrics["loss:sum"] == close(expected)


def test_trap_21_a_custom_loss_is_differentiated_here_and_reads_every_input(service):
    """loss = sum A * lp^2, so that weights of cross_entropy would be -2 A lp."""
    advantages = [0.5, -1.0, 2.0]
    data = [datum(target_tokens=[4, 5, 9], advantages=advantages)]
    seen: list[set[str]] = []

    def loss(data: list[types.Datum], logprobs: list[Any]) -> Any:
        seen.append(set(data[0].loss_fn_inputs))
        total = sum(
            (d.loss_fn_inputs["advantages"].to_torch() * lp**2).sum()
            for d, lp in zip(data, logprobs, strict=True)
        )
        return total, {"mean_logprob": logprobs[0].mean().item()}

    custom, weighted = fresh(service), fresh(service)
    metrics = custom.forward_backward_custom(data, loss).result().metrics
    values = [HIT, HIT, MISS]
    squares = sum(a * lp**2 for a, lp in zip(advantages, values, strict=True))
    assert metrics["loss:sum"] == close(squares)
    assert metrics["surrogate_loss:sum"] == close(2 * squares)
    assert metrics["mean_logprob"] == close(sum(values) / 3)
    assert seen == [{"target_tokens", "advantages"}]

    weights = [-2 * a * lp for a, lp in zip(advantages, values, strict=True)]
    same = datum(target_tokens=[4, 5, 9], weights=weights)
    weighted.forward_backward([same], "cross_entropy")
    custom.optim_step(LINEAR)
    weighted.optim_step(LINEAR)
    assert logprobs(custom) == close(logprobs(weighted))
    assert logprobs(custom) != close([HIT, HIT, MISS])


def test_trap_21_a_custom_loss_that_fails_poisons_its_client_alone(service, client):
    def broken(data: list[types.Datum], logprobs: list[Any]) -> Any:
        raise ZeroDivisionError("in the loss")

    failed = client.forward_backward_custom([datum()], broken)
    behind = client.optim_step(ADAM)
    with pytest.raises(ZeroDivisionError, match="in the loss"):
        failed.result()
    for later in (behind, client.forward([datum()], "cross_entropy"), client.save_state("s")):
        with pytest.raises(RuntimeError, match="this TrainingClient is poisoned") as refused:
            later.result()
        assert isinstance(refused.value.__cause__, ZeroDivisionError)
    assert fresh(service).forward_backward([datum()], "cross_entropy").result()


def test_metrics_of_a_split_call_are_combined_as_their_names_say(client):
    """1030 samples are two operations of 1024 and 6; the last token was sampled with another probability."""
    data = [at_ratio(0.0)] * 1029 + [at_ratio(1.0)]
    result = client.forward(data, "importance_sampling").result()
    metrics, rare = result.metrics, math.e
    assert len(result.loss_fn_outputs) == 1030
    # A sum of about a thousand float32 values.
    assert metrics["loss:sum"] == pytest.approx(-(1029 + rare), rel=1e-5)
    assert metrics["tokens:sum"] == 1030
    assert metrics["ratio:max"] == pytest.approx(rare, rel=1e-5)
    assert metrics["ratio:mean"] == pytest.approx((1029 + rare) / 1030, rel=1e-5)
