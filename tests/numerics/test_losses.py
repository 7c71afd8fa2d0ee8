"""Losses and derivatives against a second implementation; metrics and parameters by hand.

Both sides compute in float64 from the same float32 numbers, so they agree to rounding: 1e-9 relative,
the loss relative to the sum of its terms' sizes.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.numerics import references
from together_post_training import losses
from together_post_training.errors import PostTrainingError, Reason

REL = 1e-9
LARGEST = float(np.finfo(np.float32).max)
POLICY = ["importance_sampling", "ppo", "cispo", "dro"]


def floats(low: float, high: float, *special: float) -> st.SearchStrategy[float]:
    return st.one_of(
        st.sampled_from([np.float32(s).item() for s in special]) if special else st.nothing(),
        st.floats(np.float32(low).item(), np.float32(high).item(), width=32, allow_subnormal=False),
    )


LOGPROBS = floats(-40, 0, 0, -0.25, -300, -1000)
SAMPLING = floats(-40, 0, 0, -0.25, -200, -1000)
ADVANTAGES = floats(-5, 5, 0, 1, -1, 1e30, -1e30)
WEIGHTS = floats(-2, 2, 0, 1, 0.5, 1e-3, 1e30)


def arrays(shape: tuple[int, ...], elements: st.SearchStrategy[float]):
    return hnp.arrays(np.float32, shape, elements=elements)


@st.composite
def policy_inputs(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(logprobs, inputs); half the positions have ratios near the usual clip bounds."""
    shape = (draw(st.integers(1, 6)),)
    lp = draw(arrays(shape, LOGPROBS))
    near = lp - draw(arrays(shape, floats(-0.5, 0.5)))
    sampling = np.where(draw(hnp.arrays(bool, shape)), near, draw(arrays(shape, SAMPLING)))
    inputs = {"logprobs": sampling, "advantages": draw(arrays(shape, ADVANTAGES))}
    if draw(st.booleans()):
        inputs["weights"] = draw(arrays(shape, WEIGHTS))
    return lp, inputs


def check_against_reference(name, lp, inputs, params) -> None:
    terms, wanted_gradient = references.value_and_gradient(name, lp, inputs, params)
    wanted_loss = float(terms.sum())
    if not max(abs(wanted_loss), float(np.abs(wanted_gradient).max())) <= LARGEST:
        with pytest.raises(PostTrainingError) as error:
            losses.evaluate(name, lp, inputs, params, sample=3)
        assert error.value.reason is Reason.NON_FINITE_LOSS
        assert error.value.metadata["sample"] == "3"
        return
    value = losses.evaluate(name, lp, inputs, params, sample=3)
    assert value.gradient.dtype == np.float64
    assert value.gradient.shape == lp.shape
    np.testing.assert_allclose(value.gradient, wanted_gradient, rtol=REL, atol=0)
    assert value.loss == pytest.approx(wanted_loss, rel=REL, abs=REL * np.abs(terms).sum())


@given(st.data())
def test_cross_entropy_equals_its_reference(data: st.DataObject):
    shape = data.draw(st.sampled_from([(1,), (5,), (3, 2), (1, 4)]))
    lp = data.draw(arrays(shape, LOGPROBS))
    inputs = {"weights": data.draw(arrays(shape, WEIGHTS))} if data.draw(st.booleans()) else {}
    check_against_reference("cross_entropy", lp, inputs, {})


@pytest.mark.parametrize("name", POLICY)
@given(case=policy_inputs())
def test_policy_loss_equals_its_reference(name: str, case):
    lp, inputs = case
    check_against_reference(name, lp, inputs, losses.complete_params(name, {}))


@pytest.mark.parametrize("name", ["ppo", "cispo"])
@given(
    case=policy_inputs(),
    low=floats(0, 1, 0, 1),
    high=floats(1, 10, 1, 1e30),
)
def test_clipped_loss_obeys_the_bounds_of_its_call(name: str, case, low, high):
    lp, inputs = case
    params = {"clip_low_threshold": low, "clip_high_threshold": high}
    check_against_reference(name, lp, inputs, params)


@pytest.mark.parametrize("name", ["ppo", "cispo"])
@given(case=policy_inputs(), data=st.data())
def test_clipped_loss_obeys_the_bounds_of_each_position(name: str, case, data: st.DataObject):
    lp, inputs = case
    for key, low, high in (("clip_low_threshold", 0, 1), ("clip_high_threshold", 1, 10)):
        if data.draw(st.booleans()):
            inputs[key] = data.draw(arrays(lp.shape, floats(low, high)))
    check_against_reference(name, lp, inputs, losses.complete_params(name, {}))


@pytest.mark.parametrize("name", POLICY)
@given(case=policy_inputs(), beta=floats(0, 3, 0))
def test_positions_without_weight_add_nothing_at_any_ratio(name: str, case, beta):
    """Masked positions with an overflowing ratio leave loss, gradient and metrics as without them."""
    lp, inputs = case
    inputs.setdefault("weights", np.ones(lp.shape, np.float32))
    masked = {
        "logprobs": np.array([-3000, 0], np.float32),
        "advantages": np.array([1e30, -1e30], np.float32),
        "weights": np.zeros(2, np.float32),
    }
    padded = {key: np.concatenate([inputs[key], masked[key]]) for key in inputs}
    padded_lp = np.concatenate([lp, np.array([-0.1, -3000], np.float32)])
    params = losses.complete_params(name, {"beta": beta} if name == "dro" else {})
    with np.errstate(over="ignore", invalid="ignore"):
        fn = losses.contract(name).fn
        value, longer = fn(lp, inputs, params), fn(padded_lp, padded, params)
    np.testing.assert_array_equal(longer.gradient, [*value.gradient, 0, 0])
    size = np.abs(references.value_and_gradient(name, lp, inputs, params)[0]).sum()
    if np.isfinite(size):
        assert longer.loss == pytest.approx(value.loss, rel=REL, abs=REL * size)
    assert longer.metrics == pytest.approx(value.metrics, rel=REL)


@pytest.mark.parametrize(
    ("name", "params", "loss", "gradient"),
    [
        ("importance_sampling", {}, -0.25, [-3, 1.5, -0.25, 1.5]),
        ("ppo", {}, 1.25, [0, 1.5, -0.25, 0]),
        (
            "cispo",
            {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
            1.405810,
            [-2.4, 1.2, -0.4, 2.4],
        ),
        ("dro", {"beta": 0.05}, 1.668136, [-1.979727, 1.020273, -0.534657, 2.965343]),
    ],
)
def test_loss_of_four_known_ratios(name, params, loss, gradient):
    """Ratios 1.5, 1.5, .5, .5 at advantages 2, -1, .5, -3, worked out by hand to six digits."""
    lp = np.array([-0.242738, -0.242738, -4.242738, -0.242738])
    inputs = {
        "logprobs": lp - np.log([1.5, 1.5, 0.5, 0.5]),
        "advantages": np.array([2, -1, 0.5, -3]),
    }
    value = losses.evaluate(name, lp, inputs, losses.complete_params(name, params), sample=0)
    assert value.loss == pytest.approx(loss, abs=2e-6)
    np.testing.assert_allclose(value.gradient, gradient, atol=2e-6)


def test_cispo_within_its_bounds_is_detached_from_the_ratio():
    """At ratio 1 the derivative is -A; with a derivative through the ratio it would be -A * (1 + lp)."""
    lp = np.array([-0.242738])
    inputs = {"logprobs": lp, "advantages": np.array([1.0])}
    value = losses.evaluate("cispo", lp, inputs, losses.complete_params("cispo", {}), sample=0)
    assert value.gradient == pytest.approx([-1.0])
    assert value.loss == pytest.approx(0.242738)


def test_ppo_with_a_negative_weight_maximises_what_it_else_minimises():
    """The smaller term is chosen by the advantage, the weight multiplies afterwards."""
    lp = np.array([math.log(1.5)])
    inputs = {"logprobs": np.zeros(1), "advantages": np.ones(1), "weights": np.array([-2.0])}
    value = losses.evaluate("ppo", lp, inputs, losses.complete_params("ppo", {}), sample=0)
    assert value.loss == pytest.approx(2 * 1.2)
    assert value.gradient == pytest.approx([0.0])


@pytest.mark.parametrize("name", POLICY)
def test_all_zero_advantages_and_weights_are_a_loss_of_zero(name):
    lp = np.array([-1.0, -2.0], np.float32)
    zero = np.zeros(2, np.float32)
    inputs = {"logprobs": zero, "advantages": zero, "weights": zero}
    value = losses.evaluate(name, lp, inputs, losses.complete_params(name, {}), sample=0)
    assert value.loss == 0
    assert not value.gradient.any()
    assert losses.summarize([value], 2) == {
        "loss:sum": 0.0,
        "tokens:sum": 2.0,
        "tokens_trained:sum": 0.0,
    }


def test_kl_estimators_are_those_of_samples_from_the_sampling_policy():
    """log q = -1, log p = -2: k1 = 1 and k3 = e^-1 + 1 - 1; both are 0 where p = q."""
    params = losses.complete_params("importance_sampling", {})
    for p, k1, k3 in ((-2.0, 1.0, math.exp(-1)), (-1.0, 0.0, 0.0)):
        inputs = {"logprobs": np.array([-1.0]), "advantages": np.array([1.0])}
        value = losses.importance_sampling(np.array([p]), inputs, params)
        metrics = losses.summarize([value], 1)
        assert metrics["kl_k1:mean"] == pytest.approx(k1)
        assert metrics["kl_k3:mean"] == pytest.approx(k3)


def test_metrics_count_the_positions_with_weight_and_advantage():
    """Two samples of unequal length: means are over positions, not over samples."""
    params = losses.complete_params("ppo", {})
    first = {
        "logprobs": np.log([0.5, 1.0, 1.0]) * -1,
        "advantages": np.array([1.0, 1.0, 0.0]),
    }
    second = {"logprobs": np.log([0.25]) * -1, "advantages": np.array([1.0])}
    values = [
        losses.ppo(np.zeros(3), first, params),
        losses.ppo(np.zeros(1), second, params),
    ]
    metrics = losses.summarize(values, 4)
    assert metrics["ratio:mean"] == pytest.approx((0.5 + 1.0 + 0.25) / 3)
    assert metrics["ratio:max"] == pytest.approx(1.0)
    assert metrics["clip_fraction:mean"] == 0  # below the lower bound, but A > 0 keeps the gradient
    assert metrics["tokens:sum"] == 4


def test_clip_fraction_counts_positions_whose_gradient_is_cut():
    params = losses.complete_params("ppo", {})
    inputs = {"logprobs": np.log([2.0, 2.0, 0.5, 0.5]), "advantages": np.array([1.0, -1, 1, -1])}
    value = losses.ppo(np.zeros(4), inputs, params)
    # Ratios .5, .5, 2, 2: cut are (A = -1, ratio .5) and (A = 1, ratio 2).
    assert losses.summarize([value], 4)["clip_fraction:mean"] == 0.5
    np.testing.assert_array_equal(value.gradient != 0, [True, False, False, True])


@pytest.mark.parametrize(
    ("name", "params", "reason"),
    [
        ("reinforce", {}, Reason.UNKNOWN_LOSS),
        ("ppo", {"clip": 0.2}, Reason.UNKNOWN_PARAMETER),
        ("cross_entropy", {"beta": 0.1}, Reason.UNKNOWN_PARAMETER),
        ("dro", {"beta": math.nan}, Reason.NOT_FINITE),
        ("cispo", {"clip_high_threshold": math.inf}, Reason.NOT_FINITE),
        ("ppo", {"clip_low_threshold": 1.3}, Reason.INVALID_ARGUMENT),
    ],
)
def test_loss_parameters_are_refused_by_name(name, params, reason):
    with pytest.raises(PostTrainingError, match=next(iter(params), name)) as error:
        losses.complete_params(name, params)
    assert error.value.reason is reason


def test_bounds_of_a_position_in_the_wrong_order_are_refused():
    inputs = {"advantages": np.ones(3), "clip_low_threshold": np.array([0.8, 1.3, 0.8])}
    with pytest.raises(PostTrainingError, match=r"Sample 1.*position 1") as error:
        losses.prepare("ppo", losses.complete_params("ppo", {}), [{}, inputs])
    assert error.value.reason is Reason.INVALID_ARGUMENT


def test_complete_params_keeps_what_is_given():
    assert losses.complete_params("ppo", {"clip_low_threshold": 0.0}) == {
        "clip_low_threshold": 0.0,
        "clip_high_threshold": 1.2,
    }
