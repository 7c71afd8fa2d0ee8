"""Metrics of losses, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from together_post_training import losses
from together_post_training.losses import LossValue, kl


def value_of(name: str, ratios: list[float], params: dict | None = None, **inputs) -> LossValue:
    """At these ratios: log p = 0, advantages 1 unless given."""
    ones = np.ones(len(ratios))
    given_inputs = {
        "target_tokens": np.zeros(len(ratios), np.int64),
        "logprobs": -np.log(ratios),
        "advantages": ones,
    } | {key: np.array(values, np.float64) for key, values in inputs.items()}
    complete = losses.complete_params(name, params or {})
    complete = losses.prepare(name, complete, [given_inputs], max_seq_length=8)
    return losses.evaluate(name, 0 * ones, given_inputs, complete, sample=0)


def metrics_of(*args, **kwargs) -> dict[str, float]:
    value = value_of(*args, **kwargs)
    return losses.summarize([value], value.gradient.size)


def test_kl_estimators_are_those_of_samples_from_the_sampling_policy():
    """log q = -1, log p = -2: k1 = 1 and k3 = e^-1 + 1 - 1; both are 0 where p = q."""
    for p, k1, k3 in ((-2.0, 1.0, math.exp(-1)), (-1.0, 0.0, 0.0)):
        inputs = {"logprobs": np.array([-1.0]), "advantages": np.array([1.0])}
        value = losses.importance_sampling(np.array([p]), inputs, {})
        metrics = losses.summarize([value], 1)
        assert metrics["kl_k1:mean"] == pytest.approx(k1)
        assert metrics["kl_k3:mean"] == pytest.approx(k3)


def test_logprob_difference_is_that_of_the_counted_positions():
    """|log p - log q| of log 2, log 4 and, with no advantage, log 99."""
    metrics = metrics_of("importance_sampling", [2, 1 / 4, 99], advantages=[1.0, -1, 0])
    assert metrics["logprob_diff:mean"] == pytest.approx(math.log(8) / 2)
    assert metrics["logprob_diff:max"] == pytest.approx(math.log(4))


def test_metrics_count_the_positions_with_weight_and_advantage():
    """Two samples of unequal length: means are over positions, not over samples."""
    values = [
        value_of("ppo", [0.5, 1.0, 1.0], advantages=[1.0, 1, 0]),
        value_of("ppo", [0.25, 9.0], weights=[1.0, 0]),
    ]
    metrics = losses.summarize(values, 5)
    assert metrics["ratio:mean"] == pytest.approx((0.5 + 1.0 + 0.25) / 3)
    assert metrics["ratio:max"] == pytest.approx(1.0)
    assert metrics["clip_fraction:mean"] == 0  # below the lower bound, but A > 0 keeps the gradient
    assert metrics["tokens:sum"] == 5
    assert metrics["tokens_trained:sum"] == 3


def test_clip_fractions_count_positions_whose_gradient_is_cut():
    """Cut are ratio 2 at A = 1 (twice) and ratio .5 at A = -1."""
    value = value_of("ppo", [0.5, 0.5, 2, 2, 2], advantages=[1, -1, 1, 1, -1])
    metrics = losses.summarize([value], 5)
    assert metrics["clip_fraction:mean"] == pytest.approx(3 / 5)
    assert metrics["clip_high_fraction:mean"] == pytest.approx(2 / 5)
    assert metrics["clip_low_fraction:mean"] == pytest.approx(1 / 5)
    np.testing.assert_array_equal(value.gradient != 0, [True, False, False, False, True])


@pytest.mark.parametrize(
    ("name", "ratios", "params", "high", "low"),
    [
        # Whatever the advantage.
        ("cispo", [5, 3, 0.3, 0.2], {"clip_low_threshold": 0.25}, 1 / 4, 1 / 4),
        # One ratio for all, here 2.
        ("gspo", [1, 4, 1, 4], {}, 1, 0),
        # p = 1: q = 1/2 is further than .15, q = 1/1.1 is not.
        ("dppo", [2, 1.1, 1, 1], {}, 1 / 4, 0),
    ],
)
def test_clip_fractions_are_those_of_the_loss(name, ratios, params, high, low):
    metrics = metrics_of(name, ratios, params)
    assert metrics["clip_high_fraction:mean"] == high
    assert metrics["clip_low_fraction:mean"] == low
    assert metrics["clip_fraction:mean"] == high + low


def test_stable_reinforce_counts_the_sampled_and_what_is_truncated():
    metrics = metrics_of("stable_reinforce", [3, 1, 1, 3], sampled=[1, 1, 0, 0])
    assert metrics["clip_high_fraction:mean"] == 1 / 2
    assert metrics["ratio:max"] == pytest.approx(3)
    assert metrics["tokens_trained:sum"] == 2


def test_gspo_reports_the_ratio_that_it_uses_and_the_kl_of_tokens():
    """Ratios 1 and 4: the sequence's is 2; k1 = -log 4 / 2 and k3 = (1 + 4) / 2 - 1 + k1."""
    metrics = metrics_of("gspo", [1.0, 4.0])
    assert metrics["ratio:mean"] == metrics["ratio:max"] == pytest.approx(2)
    assert metrics["ess:mean"] == pytest.approx(1)
    k1 = -math.log(4) / 2
    assert metrics["kl_k1:mean"] == pytest.approx(k1)
    assert metrics["kl_k3:mean"] == pytest.approx(1.5 + k1)


@pytest.mark.parametrize(
    ("ratios", "ess"), [([2, 2, 2, 2], 1), ([1, 0, 0, 0], 1 / 4), ([1, 3], 16 / 20)]
)
def test_ess_is_the_effective_share_of_the_samples(ratios, ess):
    """(sum r)^2 / (n * sum r^2); a ratio of 0 is e^-800."""
    ratios = [r or math.exp(-700) for r in ratios]
    assert metrics_of("importance_sampling", ratios)["ess:mean"] == pytest.approx(ess)


def test_kl_ref_is_k3_over_positions_with_weight():
    metrics = metrics_of(
        "grpo",
        [1.0, 1.0, 1.0],
        advantages=[0.0, 1.0, 1.0],
        weights=[1.0, 1.0, 0.0],
        reference_logprobs=[-1.0, 0.0, -9.0],
    )
    assert metrics["kl_ref:mean"] == pytest.approx(math.exp(-1) / 2)
    assert metrics["tokens_trained:sum"] == 1


@pytest.mark.parametrize(
    ("name", "params", "trained"),
    [("ppo", {}, 1), ("dro", {}, 2), ("grpo", {}, 1), ("grpo", {"beta": 0.1}, 2)],
)
def test_tokens_trained_are_those_with_a_gradient_to_come(name, params, trained):
    """One position without advantage, where only a penalty trains, and one without weight."""
    inputs = {"reference_logprobs": [0.0] * 3} if name == "grpo" else {}
    metrics = metrics_of(
        name, [1.1] * 3, params, advantages=[1.0, 0, 1], weights=[1.0, 1, 0], **inputs
    )
    assert metrics["tokens_trained:sum"] == trained


def test_cross_entropy_trains_on_positions_with_any_weight():
    weights = np.array([[0.0, 0.5], [0.0, 0.0], [0.25, 0.25]])
    value = losses.cross_entropy(np.zeros((3, 2)), {"weights": weights}, {})
    assert losses.summarize([value], 3)["tokens_trained:sum"] == 2


def test_metrics_stay_numbers_where_ratios_overflow():
    """What overflows counts as the largest float32."""
    value = value_of("ppo", [1.0, 1.0], logprobs=[-1000.0, 0.0])
    metrics = losses.summarize([value], 2)
    largest = float(np.finfo(np.float32).max)
    assert metrics["ratio:max"] == largest
    assert metrics["ratio:mean"] == pytest.approx(largest / 2)
    assert metrics["ess:mean"] == pytest.approx(1 / 2)
    assert metrics["kl_k1:mean"] == -500


@given(st.lists(st.lists(st.floats(0.01, 4.0), min_size=1, max_size=5), min_size=1, max_size=5))
def test_metrics_do_not_depend_on_how_positions_are_cut_into_samples(samples):
    """A token-wise loss: one long sample tells what many short ones tell."""
    parts = [value_of("cispo", ratios) for ratios in samples]
    whole = [value_of("cispo", [r for ratios in samples for r in ratios])]
    assert losses.summarize(parts, 9) == pytest.approx(losses.summarize(whole, 9), rel=1e-9)


def test_k3_of_known_logprobs_and_its_slope():
    """lp = -1, ref = -2: e^-1 + 1 - 1, with slope 1 - e^-1; both are 0 where the two are equal."""
    value, slope = kl.k3(np.array([-1.0, -1.0]), np.array([-2.0, -1.0]))
    np.testing.assert_allclose(value, [math.exp(-1), 0], rtol=1e-12)
    np.testing.assert_allclose(slope, [1 - math.exp(-1), 0], rtol=1e-12)
