"""Losses that Tinker does not have, and calls that are sent as several operations. Real server, exact model."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.compat.data import HIT, MISS, datum
from tinker_compat import passes
from tinker_compat.conversion import loss_config

# Its logprobs are HIT, HIT, MISS.
ON_POLICY = [HIT, HIT, MISS]


def sample(advantages: list[float], **inputs: Any) -> types.Datum:
    return datum(
        [3, 4, 5], target_tokens=[4, 5, 9], logprobs=ON_POLICY, advantages=advantages, **inputs
    )


def loss_of(client, data: list[types.Datum], config: dict[str, float | str]) -> float:
    return client.forward(data, "grpo", config).result().metrics["loss:sum"]


@pytest.mark.parametrize(
    ("config", "loss"),
    [
        ({"agg_type": "TOKEN_MEAN"}, -(3 + 4) / 5),
        ({"agg_type": "sequence_mean"}, -(1 + 2) / 2),
        ({"agg_type": "GRPO_LOSS_AGGREGATION_TYPE_FIXED_HORIZON", "horizon": 10}, -7 / 20),
        # The model's window.
        ({}, -7 / (2 * 1024)),
    ],
)
def test_grpo_is_aggregated_as_asked(client, config, loss):
    data = [sample([1.0, 1, 1]), sample([2.0, 2, 7], weights=[1.0, 1, 0])]
    assert loss_of(client, data, config) == pytest.approx(loss, rel=1e-5)


def test_grpo_words_it_does_not_know_are_refused_with_those_it_does(client):
    future = client.forward_backward([sample([1.0] * 3)], "grpo", {"agg_type": "MEAN"})
    with pytest.raises(tinker.BadRequestError, match="FIXED_HORIZON, TOKEN_MEAN, SEQUENCE_MEAN"):
        future.result()


def test_ratios_of_a_split_call_are_told_when_its_last_part_has_no_advantages(client):
    whole = [sample([1.0] * 3)] * 1024
    kept = client.forward([*whole, sample([0.0] * 3)], "ppo").result().metrics
    assert kept["ratio:mean"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("agg_type", ["TOKEN_MEAN", "SEQUENCE_MEAN", "FIXED_HORIZON"])
def test_a_split_call_is_divided_as_a_whole(client, agg_type):
    """1025 samples in two operations: a mean of ones is 1, not 2, and so is its gradient's part."""
    data = [sample([1.0] * 3)] * 1025
    config: dict[str, float | str] = {"agg_type": agg_type, "horizon": 3}
    result = client.forward_backward(data, "grpo", config).result()
    # Sums of a thousand float32 ratios that are 1 to six digits.
    assert result.metrics["loss:sum"] == pytest.approx(-1, rel=1e-4)


def test_gspo_over_a_prompt_is_warned_of_unless_masked(client):
    """Warned of once; the mask leaves the prompt's made-up ratio out, so that two ratios of 1 remain."""
    inputs = {
        "target_tokens": [4, 5, 6],
        "logprobs": [0.0, HIT, HIT],
        "advantages": [0.0, 1.0, 1.0],
    }
    mask = np.array([0, 1, 1], np.float32)  # a list under this key is news to older SDKs
    masked = datum([3, 4, 5], **inputs, sequence_ratio_mask=mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = client.forward([masked], "gspo").result()
    assert done.metrics["loss:sum"] == pytest.approx(-2, rel=1e-5)
    with pytest.warns(UserWarning, match="Give sequence_ratio_mask") as caught:
        done = [client.forward([datum([3, 4, 5], **inputs)], "gspo").result() for _ in range(2)]
    assert len(caught) == 1
    ratio = math.exp(HIT / 3)
    assert done[0].metrics["loss:sum"] == pytest.approx(-2 * ratio, rel=1e-5)


def test_operations_of_a_split_call_say_what_the_whole_call_has():
    data = [sample([1.0] * 3, weights=[0.0, 1, 1]), sample([1.0] * 3), sample([1.0] * 3)]
    slices = [slice(0, 2), slice(2, 3)]
    for agg_type, denominator in (("TOKEN_MEAN", 8), ("SEQUENCE_MEAN", 3), ("FIXED_HORIZON", 3)):
        config = loss_config("grpo", {"agg_type": agg_type, "beta": 0.5})
        for request in passes.forward_requests(data, slices, config):
            assert dict(request.loss.params) == {"beta": 0.5, "denominator": denominator}
            assert dict(request.loss.options) == {"agg_type": agg_type}
    (whole,) = passes.forward_requests(data, [slice(0, 3)], loss_config("grpo", {}))
    assert not whole.loss.params
    for request in passes.forward_requests(data, slices, loss_config("ppo", {})):
        assert not request.loss.params
