"""Losses and derivatives against a second implementation, and by hand.

Both sides compute in float64 from the same float32 numbers, so they agree to rounding: 1e-9 relative, loss and
derivative relative to the sum of the sizes of what they are summed from.
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
POLICY = sorted(set(losses.CONTRACTS) - {"cross_entropy"})
CLIPPED = ["ppo", "cispo", "gspo", "grpo"]
# The closed-form model's hit and miss, and four targets of it.
HIT, MISS = -0.242738, -4.242738
FOUR = np.array([HIT, HIT, MISS, HIT])
RATIOS = np.array([1.5, 1.5, 0.5, 0.5])
FOUR_INPUTS = {
    "target_tokens": np.array([4, 5, 9, 10]),
    "logprobs": FOUR - np.log(RATIOS),
    "advantages": np.array([2, -1, 0.5, -3]),
    "sampled": np.ones(4),
}


def floats(low: float, high: float, *special: float) -> st.SearchStrategy[float]:
    return st.one_of(
        st.sampled_from([np.float32(s).item() for s in special]) if special else st.nothing(),
        st.floats(np.float32(low).item(), np.float32(high).item(), width=32, allow_subnormal=False),
    )


LOGPROBS = floats(-40, 0, 0, -0.25, -300, -1000)
SAMPLING = floats(-40, 0, 0, -0.25, -200, -1000)
ADVANTAGES = floats(-5, 5, 0, 1, -1, 1e30, -1e30)
WEIGHTS = floats(-2, 2, 0, 1, 0.5, 1e-3, 1e30)
MASKS = st.sampled_from([0.0, 1.0])


def arrays(shape: tuple[int, ...], elements: st.SearchStrategy[float]):
    return hnp.arrays(np.float32, shape, elements=elements)


@st.composite
def near_or_anywhere(draw: st.DrawFn, lp: np.ndarray) -> np.ndarray:
    """Half the positions have ratios near the usual clip bounds."""
    near = lp - draw(arrays(lp.shape, floats(-0.5, 0.5)))
    return np.where(draw(hnp.arrays(bool, lp.shape)), near, draw(arrays(lp.shape, SAMPLING)))


@st.composite
def policy_inputs(draw: st.DrawFn, name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(logprobs, what the loss reads; optional inputs sometimes)."""
    shape = (draw(st.integers(1, 6)),)
    lp = draw(arrays(shape, LOGPROBS))
    inputs = {
        "target_tokens": np.zeros(shape, np.int64),
        "logprobs": draw(near_or_anywhere(lp)),
        "advantages": draw(arrays(shape, ADVANTAGES)),
    }
    if draw(st.booleans()):
        inputs["weights"] = draw(arrays(shape, WEIGHTS))
    if name == "stable_reinforce":
        inputs["sampled"] = draw(arrays(shape, MASKS))
    if name == "grpo":
        inputs["reference_logprobs"] = draw(near_or_anywhere(lp))
    if name == "gspo" and draw(st.booleans()):
        inputs["sequence_ratio_mask"] = draw(arrays(shape, MASKS | st.just(1.0)))
        inputs["sequence_ratio_mask"][draw(st.integers(0, shape[0] - 1))] = 1
    return lp, inputs


@st.composite
def policy_params(draw: st.DrawFn, name: str) -> dict[str, float | str]:
    """Some of the loss's parameters, in their ranges."""
    ranges = {
        "beta": floats(0, 3, 0),
        "kl_coeff": floats(0, 3, 0),
        "delta_low": floats(0, 1, 0, 1),
        "delta_high": floats(0, 1, 0, 1),
        "clip_low_threshold": floats(0, 1, 0, 1),
        "clip_high_threshold": floats(1, 10, 1, 1e30),
        "horizon": floats(1, 1000),
        "denominator": floats(6, 1000),
        "agg_type": st.sampled_from(["FIXED_HORIZON", "TOKEN_MEAN", "SEQUENCE_MEAN"]),
        "ratio_type": st.sampled_from(["TOKEN", "SEQUENCE"]),
    }
    known = losses.contract(name).params
    return draw(st.fixed_dictionaries({}, optional={key: ranges[key] for key in known}))


def prepared(name: str, params: dict, *batch: dict[str, np.ndarray]) -> losses.Params:
    return losses.prepare(name, losses.complete_params(name, params), batch, max_seq_length=64)


def check_against_reference(name, lp, inputs, params) -> None:
    params = prepared(name, params, inputs)
    terms, wanted, size = references.value_and_gradient(name, lp, inputs, params)
    wanted_loss = float(terms.sum())
    if not max(abs(wanted_loss), float(np.abs(wanted).max())) <= LARGEST:
        with pytest.raises(PostTrainingError) as error:
            losses.evaluate(name, lp, inputs, params, sample=3)
        assert error.value.reason is Reason.NON_FINITE_LOSS
        assert error.value.metadata["sample"] == "3"
        return
    value = losses.evaluate(name, lp, inputs, params, sample=3)
    assert value.gradient.dtype == np.float64
    assert value.gradient.shape == lp.shape
    np.testing.assert_array_less(np.abs(value.gradient - wanted), REL * size + 1e-300)
    assert value.loss == pytest.approx(wanted_loss, rel=REL, abs=REL * np.abs(terms).sum())
    for metric, number in losses.summarize([value], lp.size).items():
        assert math.isfinite(number), metric


def loss_and_gradient(name: str, params: dict, inputs: dict, lp: np.ndarray = FOUR):
    value = losses.evaluate(name, lp, inputs, prepared(name, params, inputs), sample=0)
    return value.loss, value.gradient


# Against the reference


@given(st.data())
def test_cross_entropy_equals_its_reference(data: st.DataObject):
    shape = data.draw(st.sampled_from([(1,), (5,), (3, 2), (1, 4)]))
    lp = data.draw(arrays(shape, LOGPROBS))
    inputs = {"weights": data.draw(arrays(shape, WEIGHTS))} if data.draw(st.booleans()) else {}
    check_against_reference("cross_entropy", lp, inputs, {})


def test_cross_entropy_leaves_impossible_targets_without_weight_out():
    inputs = {"weights": np.array([1.0, 0.0])}
    loss, gradient = loss_and_gradient("cross_entropy", {}, inputs, np.array([-2.0, -np.inf]))
    assert (loss, list(gradient)) == (2, [-1, 0])


@pytest.mark.parametrize("name", POLICY)
@given(data=st.data())
def test_policy_loss_equals_its_reference(name: str, data: st.DataObject):
    """At any ratio, with the defaults or any parameters."""
    lp, inputs = data.draw(policy_inputs(name))
    check_against_reference(name, lp, inputs, data.draw(policy_params(name)))


@pytest.mark.parametrize("name", CLIPPED)
@given(data=st.data())
def test_clipped_loss_obeys_the_bounds_of_each_position(name: str, data: st.DataObject):
    lp, inputs = data.draw(policy_inputs(name))
    for key, low, high in (("clip_low_threshold", 0, 1), ("clip_high_threshold", 1, 10)):
        if data.draw(st.booleans()):
            inputs[key] = data.draw(arrays(lp.shape, floats(low, high)))
    check_against_reference(name, lp, inputs, {})


@pytest.mark.parametrize("name", POLICY)
@given(data=st.data())
def test_positions_without_weight_add_nothing_at_any_ratio(name: str, data: st.DataObject):
    """Masked positions with an overflowing ratio, or with an impossible target, leave everything as without them."""
    lp, inputs = data.draw(policy_inputs(name))
    inputs.setdefault("weights", np.ones(lp.shape, np.float32))
    if name == "gspo":
        inputs.setdefault("sequence_ratio_mask", np.ones(lp.shape, np.float32))
    masked = {
        "target_tokens": np.zeros(2, np.int64),
        "logprobs": np.array([-3000, 0], np.float32),
        "reference_logprobs": np.array([3000, -3000], np.float32),
        "advantages": np.array([1e30, -1e30], np.float32),
        "weights": np.zeros(2, np.float32),
        "sequence_ratio_mask": np.zeros(2, np.float32),
        "sampled": np.ones(2, np.float32),
    }
    padded = {key: np.concatenate([inputs[key], masked[key]]) for key in inputs}
    padded_lp = np.concatenate([lp, np.array([-0.1, -np.inf], np.float32)])
    given_params = data.draw(policy_params(name))
    params = prepared(name, given_params, inputs)
    assert prepared(name, given_params, padded) == params
    with np.errstate(over="ignore", invalid="ignore"):
        fn = losses.contract(name).fn
        value, longer = fn(lp, inputs, params), fn(padded_lp, padded, params)
    np.testing.assert_array_equal(longer.gradient, [*value.gradient, 0, 0])
    size = np.abs(references.value_and_gradient(name, lp, inputs, params)[0]).sum()
    if size < 1e300:  # Terms of both signs that overflow have no sum.
        assert longer.loss == pytest.approx(value.loss, rel=REL, abs=REL * size)
    assert longer.metrics == pytest.approx(value.metrics, rel=REL)
    assert longer.num_trained == value.num_trained


# By hand: ratios 1.5, 1.5, .5, .5 at advantages 2, -1, .5, -3


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
        # One ratio for all: (1.5 * 1.5 * .5 * .5) ** (1/4) = .866025.
        ("gspo", {}, 1.299038, [-1.732051, 0.866025, -0.433013, 2.598076]),
        ("grpo", {"agg_type": "TOKEN_MEAN"}, 1.25 / 4, [0, 0.375, -0.0625, 0]),
        ("grpo", {"agg_type": "SEQUENCE_MEAN"}, 1.25 / 4, [0, 0.375, -0.0625, 0]),
        ("grpo", {"horizon": 8}, 1.25 / 8, [0, 0.1875, -0.03125, 0]),
        ("grpo", {}, 1.25 / 64, [0, 1.5 / 64, -0.25 / 64, 0]),
        (
            "grpo",
            {"agg_type": "TOKEN_MEAN", "ratio_type": "SEQUENCE"},
            1.299038 / 4,
            [-0.433013, 0.216506, -0.108253, 0.649519],
        ),
        # p = .784477 or .014368; p - q = .261492, .261492, -.014368, -.784477.
        ("dppo", {}, 1.25, [0, 1.5, -0.25, 0]),
        ("dppo", {"delta_high": 0.3}, -1.75, [-3, 1.5, -0.25, 0]),
        ("dppo", {"delta_low": 0.8}, 2.75, [0, 1.5, -0.25, 1.5]),
        # 1.060684 of REINFORCE, .644855 of half the squared log-ratios.
        ("stable_reinforce", {"kl_coeff": 0}, 1.060684, [-3, 1.5, -0.25, 1.5]),
        (
            "stable_reinforce",
            {"kl_coeff": 0.1},
            1.125170,
            [-2.959453, 1.540547, -0.319315, 1.430685],
        ),
    ],
)
def test_loss_of_four_known_ratios(name, params, loss, gradient):
    """Worked out by hand to six digits."""
    found, slope = loss_and_gradient(name, params, FOUR_INPUTS)
    assert found == pytest.approx(loss, abs=2e-6)
    np.testing.assert_allclose(slope, gradient, atol=2e-6)


@pytest.mark.parametrize("name", POLICY)
def test_on_policy_the_gradient_is_minus_the_advantages(name):
    inputs = {**FOUR_INPUTS, "logprobs": FOUR}
    params = {"agg_type": "TOKEN_MEAN"} if name == "grpo" else {}
    loss, gradient = loss_and_gradient(name, params, inputs)
    share = 1 / 4 if name == "grpo" else 1
    np.testing.assert_allclose(gradient, -share * FOUR_INPUTS["advantages"])
    weighted_by_lp = name in ("cispo", "dro", "stable_reinforce")
    wanted = -share * np.sum(FOUR_INPUTS["advantages"] * (FOUR if weighted_by_lp else 1))
    assert loss == pytest.approx(wanted)


def test_cispo_within_its_bounds_is_detached_from_the_ratio():
    """At ratio 1 the derivative is -A; with a derivative through the ratio it would be -A * (1 + lp)."""
    inputs = {"logprobs": np.array([HIT]), "advantages": np.array([1.0])}
    loss, gradient = loss_and_gradient("cispo", {}, inputs, np.array([HIT]))
    assert gradient == pytest.approx([-1.0])
    assert loss == pytest.approx(-HIT)


@pytest.mark.parametrize("sampling", [-200.0, -1000.0])
def test_clipped_losses_are_finite_where_the_ratio_overflows(sampling):
    """The bound takes the ratio's place in the loss and, where it is the smaller term, takes the derivative away."""
    one = {"target_tokens": np.zeros(1), "logprobs": np.array([sampling]), "sampled": np.ones(1)}
    up = {**one, "advantages": np.array([1.0])}
    bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    lp = np.array([HIT])
    assert loss_and_gradient("cispo", bounds, up, lp) == (pytest.approx(-1.2 * HIT), [-1.2])
    for name in ("ppo", "gspo"):
        assert loss_and_gradient(name, {}, up, lp) == (-1.2, [0])
    assert loss_and_gradient("grpo", {"agg_type": "TOKEN_MEAN"}, up, lp) == (-1.2, [0])
    assert loss_and_gradient("dppo", {}, up, lp) == (0, [0])
    loss, gradient = loss_and_gradient("stable_reinforce", {"kl_coeff": 0}, up, lp)
    assert (loss, gradient) == (pytest.approx(-2 * HIT), [-2])
    down = {**one, "advantages": np.array([-1.0])}
    for name in ("ppo", "gspo", "dppo", "importance_sampling"):
        with pytest.raises(PostTrainingError, match="finite"):
            loss_and_gradient(name, {}, down, lp)


def test_a_derivative_outside_float32_fails_where_the_loss_is_finite():
    """cispo of a certain token: the loss is 0 whatever the ratio, the derivative is the clipped ratio times A."""
    inputs = {"logprobs": np.array([-200.0]), "advantages": np.array([1e30])}
    with pytest.raises(PostTrainingError) as error:
        loss_and_gradient("cispo", {"clip_high_threshold": 1e30}, inputs, np.zeros(1))
    assert error.value.reason is Reason.NON_FINITE_LOSS
    assert "is 0 and its largest derivative by a log-probability 1e+60" in error.value.message


def test_dro_keeps_its_penalty_without_advantages():
    inputs = {"logprobs": np.zeros(4), "advantages": np.zeros(4)}
    assert loss_and_gradient("dro", {}, inputs)[0] == pytest.approx(0.454440, abs=2e-6)


def test_ppo_with_a_negative_weight_maximises_what_it_else_minimises():
    """The smaller term is chosen by the advantage, the weight multiplies afterwards."""
    lp = np.array([math.log(1.5)])
    inputs = {"logprobs": np.zeros(1), "advantages": np.ones(1), "weights": np.array([-2.0])}
    loss, gradient = loss_and_gradient("ppo", {}, inputs, lp)
    assert loss == pytest.approx(2 * 1.2)
    assert gradient == pytest.approx([0.0])


@pytest.mark.parametrize("name", POLICY)
def test_all_zero_advantages_and_weights_are_a_loss_of_zero(name):
    zero = np.zeros(4, np.float32)
    inputs = {**FOUR_INPUTS, "advantages": zero, "weights": zero, "reference_logprobs": zero}
    for params in ({}, {"beta": 1, "agg_type": "TOKEN_MEAN"}, {"agg_type": "SEQUENCE_MEAN"}):
        params = params if name == "grpo" else {}
        value = losses.evaluate(name, FOUR, inputs, prepared(name, params, inputs), sample=0)
        assert value.loss == 0
        assert not value.gradient.any()
        assert losses.summarize([value], 4) == {
            "loss:sum": 0.0,
            "tokens:sum": 4.0,
            "tokens_trained:sum": 0.0,
        }


# gspo, grpo, dppo, stable_reinforce


def test_gspo_takes_the_mean_over_its_mask_alone():
    """s = 1.5 from the first two positions; the others are trained with it all the same."""
    inputs = {**FOUR_INPUTS, "sequence_ratio_mask": np.array([1.0, 1, 0, 0])}
    loss, gradient = loss_and_gradient("gspo", {}, inputs)
    assert loss == pytest.approx(-(1.2 * 2 - 1.5 * 1 + 1.2 * 0.5 - 1.5 * 3))
    np.testing.assert_allclose(gradient, [0, 1.5, 0, 4.5], rtol=1e-12)


@given(data=st.data())
def test_gspo_of_one_token_is_ppo(data: st.DataObject):
    lp = data.draw(arrays((1,), floats(-40, 0)))
    inputs = {
        "logprobs": data.draw(near_or_anywhere(lp)),
        "advantages": data.draw(arrays((1,), floats(-5, 5))),
    }
    params = losses.complete_params("ppo", {})
    with np.errstate(over="ignore"):
        found, wanted = (fn(lp, inputs, params) for fn in (losses.gspo, losses.ppo))
    assert found.loss == wanted.loss
    np.testing.assert_array_equal(found.gradient, wanted.gradient)
    assert found.metrics == wanted.metrics


@pytest.mark.parametrize(("ratio_type", "same_as"), [("TOKEN", "ppo"), ("SEQUENCE", "gspo")])
@given(data=st.data())
def test_grpo_is_ppo_or_gspo_divided(ratio_type, same_as, data: st.DataObject):
    """With a mask of the included positions; divided by 6 tokens x 1 sample."""
    lp = data.draw(arrays((6,), floats(-40, 0)))
    inputs = {
        "target_tokens": np.zeros(6, np.int64),
        "logprobs": lp + data.draw(arrays((6,), floats(-0.7, 0.7))),
        "advantages": data.draw(arrays((6,), floats(-5, 5))),
        "weights": data.draw(arrays((6,), MASKS)),
    }
    inputs["weights"][0] = 1
    masked = {**inputs, "sequence_ratio_mask": inputs["weights"]} if same_as == "gspo" else inputs
    wanted, slope = loss_and_gradient(same_as, {}, masked, lp)
    params = {"ratio_type": ratio_type, "horizon": 6}
    found, gradient = loss_and_gradient("grpo", params, inputs, lp)
    assert found == pytest.approx(wanted / 6, rel=REL)
    np.testing.assert_allclose(gradient, slope / 6, rtol=REL)


@pytest.mark.parametrize(
    ("params", "first", "second"),
    [
        ({"agg_type": "TOKEN_MEAN"}, -1 / 3, -4 / 3),
        ({"agg_type": "SEQUENCE_MEAN"}, -1 / 2, -2 / 2),
        ({"agg_type": "FIXED_HORIZON", "horizon": 10}, -1 / 30, -4 / 30),
        ({}, -1 / (3 * 64), -4 / (3 * 64)),
    ],
)
def test_grpo_aggregates_over_the_batch(params, first, second):
    """One token of A 1; two of A 2 and one without weight; a sample without any: it counts for the horizon alone."""
    batch = [
        on_policy([1.0]),
        on_policy([2.0, 2.0, 2.0], weights=[1.0, 1.0, 0.0]),
        on_policy([5.0, 5.0], weights=[0.0, 0.0]),
    ]
    complete = prepared("grpo", params, *batch)
    values = [
        losses.evaluate("grpo", inputs["logprobs"], inputs, complete, sample=0) for inputs in batch
    ]
    assert [v.loss for v in values] == pytest.approx([first, second, 0])
    np.testing.assert_allclose(values[1].gradient, [second / 2, second / 2, 0])
    assert not values[2].gradient.any()


def on_policy(advantages: list[float], **inputs: list[float]) -> dict[str, np.ndarray]:
    size = len(advantages)
    found = {"target_tokens": np.zeros(size, np.int64), "logprobs": np.full(size, -1.0)}
    found["advantages"] = np.array(advantages)
    return found | {key: np.array(values) for key, values in inputs.items()}


def test_grpo_penalty_is_k3_and_stays_without_an_advantage():
    """log p = -1, log ref = -2: k3 = e^-1 + 1 - 1 and its derivative 1 - e^-1; both are 0 where p = ref."""
    lp = np.array([-1.0, -1.0])
    inputs = on_policy([0.0, 0.0], reference_logprobs=[-2.0, -1.0])
    params = {"beta": 0.5, "agg_type": "TOKEN_MEAN"}
    loss, gradient = loss_and_gradient("grpo", params, inputs, lp)
    assert loss == pytest.approx(0.5 * 0.367879 / 2, abs=1e-6)
    np.testing.assert_allclose(gradient, [0.5 * 0.632121 / 2, 0], atol=1e-6)


def test_grpo_penalty_that_overflows_fails_unless_masked_or_off():
    inputs = on_policy([1.0, 1.0], reference_logprobs=[-1.0, 0.0])
    lp = np.array([-1.0, -900.0])
    with pytest.raises(PostTrainingError) as error:
        loss_and_gradient("grpo", {"beta": 0.1}, inputs, lp)
    assert error.value.reason is Reason.NON_FINITE_LOSS
    masked = {**inputs, "weights": np.array([1.0, 0.0])}
    assert loss_and_gradient("grpo", {"beta": 0.1, "horizon": 1}, masked, lp)[0] == -1
    assert loss_and_gradient("grpo", {"horizon": 1}, inputs, lp)[0] == -1


def test_dppo_limits_what_leads_further_away_only():
    """q = .5; p = .7 or .3. Limits act on the probability, at their own value not yet."""
    lp = np.log([0.7, 0.7, 0.3, 0.3])
    inputs = {"logprobs": np.log([0.5] * 4), "advantages": np.array([1.0, -1, 1, -1])}
    for delta, slope in ((0.19, [0, 1.4, -0.6, 0]), (0.21, [-1.4, 1.4, -0.6, 0.6])):
        params = {"delta_low": delta, "delta_high": delta}
        loss, gradient = loss_and_gradient("dppo", params, inputs, lp)
        np.testing.assert_allclose(gradient, slope, rtol=1e-12)
        assert loss == pytest.approx(sum(slope))
    free = loss_and_gradient("dppo", {"delta_low": 1, "delta_high": 1}, inputs, lp)
    wanted = loss_and_gradient("importance_sampling", {}, inputs, lp)
    assert free[0] == wanted[0]
    np.testing.assert_array_equal(free[1], wanted[1])


def test_stable_reinforce_trains_on_sampled_tokens_alone():
    inputs = {**FOUR_INPUTS, "sampled": np.array([0.0, 1, 0, 0])}
    loss, gradient = loss_and_gradient("stable_reinforce", {"kl_coeff": 0.1}, inputs)
    log_ratio = math.log(1.5)
    assert loss == pytest.approx(1.5 * HIT + 0.05 * log_ratio**2)
    np.testing.assert_allclose(gradient, [0, 1.5 + 0.1 * log_ratio, 0, 0])


def test_only_the_loss_that_is_an_interpretation_gives_notice():
    noticed = [name for name, c in losses.CONTRACTS.items() if c.notice]
    assert noticed == ["stable_reinforce"]
    assert "not public" in losses.contract("stable_reinforce").notice


# Parameters


@pytest.mark.parametrize(
    ("name", "params", "reason"),
    [
        ("reinforce", {}, Reason.UNKNOWN_LOSS),
        ("ppo", {"clip": 0.2}, Reason.UNKNOWN_PARAMETER),
        ("cross_entropy", {"beta": 0.1}, Reason.UNKNOWN_PARAMETER),
        ("ppo", {"agg_type": "TOKEN_MEAN"}, Reason.UNKNOWN_PARAMETER),
        ("dro", {"beta": math.nan}, Reason.NOT_FINITE),
        ("dro", {"beta": "0.1"}, Reason.INVALID_ARGUMENT),
        ("cispo", {"clip_high_threshold": math.inf}, Reason.NOT_FINITE),
        ("ppo", {"clip_low_threshold": 1.3}, Reason.INVALID_ARGUMENT),
        ("grpo", {"clip_low_threshold": 1.1}, Reason.INVALID_ARGUMENT),
        ("grpo", {"clip_high_threshold": 0.28}, Reason.INVALID_ARGUMENT),
        ("grpo", {"beta": -0.1}, Reason.INVALID_ARGUMENT),
        ("grpo", {"agg_type": 1.0}, Reason.INVALID_ARGUMENT),
        ("grpo", {"ratio_type": "TOKENS"}, Reason.INVALID_ARGUMENT),
        ("dppo", {"delta_low": 1.5}, Reason.INVALID_ARGUMENT),
        ("stable_reinforce", {"kl_coeff": -1}, Reason.INVALID_ARGUMENT),
    ],
)
def test_loss_parameters_are_refused_by_name(name, params, reason):
    with pytest.raises(PostTrainingError, match=next(iter(params), name)) as error:
        losses.complete_params(name, params)
    assert error.value.reason is reason


def test_refused_parameters_say_what_is_accepted():
    for params, accepted in (
        ({"agg_type": "MEAN"}, "one of FIXED_HORIZON, TOKEN_MEAN, SEQUENCE_MEAN"),
        ({"clip_high_threshold": 0.2}, "at least 1. It is a bound of the ratio itself"),
        ({"clip_low_threshold": 2}, "at most 1"),
    ):
        with pytest.raises(PostTrainingError, match=accepted):
            losses.complete_params("grpo", params)
    with pytest.raises(PostTrainingError, match="0 to 1"):
        losses.complete_params("dppo", {"delta_high": -0.1})


@pytest.mark.parametrize(
    ("given_name", "meant"),
    [
        ("TOKEN_MEAN", "TOKEN_MEAN"),
        ("sequence_mean", "SEQUENCE_MEAN"),
        ("GRPO_LOSS_AGGREGATION_TYPE_TOKEN_MEAN", "TOKEN_MEAN"),
        ("GRPO_LOSS_AGGREGATION_TYPE_UNSPECIFIED", "FIXED_HORIZON"),
    ],
)
def test_choices_go_by_short_and_long_names(given_name, meant):
    assert losses.complete_params("grpo", {"agg_type": given_name})["agg_type"] == meant


def test_bounds_of_a_position_in_the_wrong_order_are_refused():
    inputs = {"advantages": np.ones(3), "clip_low_threshold": np.array([0.8, 1.3, 0.8])}
    with pytest.raises(PostTrainingError, match=r"Sample 1.*position 1") as error:
        losses.prepare("ppo", losses.complete_params("ppo", {}), [{}, inputs])
    assert error.value.reason is Reason.INVALID_ARGUMENT


def test_bounds_of_a_position_outside_the_parameters_range_are_refused():
    inputs = {"advantages": np.ones(3), "clip_high_threshold": np.array([1.2, 1.2, 0.3])}
    with pytest.raises(PostTrainingError, match=r"Sample 0: at position 2 .*at least 1, got 0.3"):
        prepared("grpo", {}, inputs)


def test_complete_params_keeps_what_is_given():
    assert losses.complete_params("ppo", {"clip_low_threshold": 0.0}) == {
        "clip_low_threshold": 0.0,
        "clip_high_threshold": 1.2,
    }


# What a loss needs to know of the batch


def test_reference_logprobs_are_needed_with_a_penalty_only():
    inputs = on_policy([1.0])
    prepared("grpo", {}, inputs)
    with pytest.raises(PostTrainingError, match=r"Sample 1 lacks 'reference_logprobs'.*0\.1") as e:
        prepared("grpo", {"beta": 0.1}, {**inputs, "reference_logprobs": np.zeros(1)}, inputs)
    assert e.value.reason is Reason.MISSING_INPUT


def test_gspo_refuses_a_mask_without_positions_where_something_trains():
    nothing = {**on_policy([1.0, 0.0]), "sequence_ratio_mask": np.zeros(2)}
    with pytest.raises(PostTrainingError, match=r"Sample 0: sequence_ratio_mask is 0 everywhere"):
        prepared("gspo", {}, nothing)
    idle = {**nothing, "weights": np.array([0.0, 1.0])}
    assert loss_and_gradient("gspo", {}, idle, np.zeros(2))[0] == 0


def test_a_horizon_is_the_models_window_unless_given():
    complete, batch = losses.complete_params("grpo", {}), [on_policy([1.0])] * 3
    assert losses.prepare("grpo", complete, batch, max_seq_length=50)["horizon"] == 50
    own = losses.prepare("grpo", {**complete, "horizon": 7.0}, batch, max_seq_length=50)
    assert (own["horizon"], own["denominator"]) == (7, 3)
    with pytest.raises(PostTrainingError, match="horizon"):
        losses.prepare("grpo", complete, batch)


def test_a_denominator_below_the_operations_own_is_refused():
    with pytest.raises(PostTrainingError, match=r"'denominator'.* is 2, .*alone has 3"):
        prepared("grpo", {"agg_type": "TOKEN_MEAN", "denominator": 2}, on_policy([1.0] * 3))


def test_parameters_of_a_whole_call_are_left_alone_where_there_is_nothing_to_add():
    """The server refuses what is wrong with them."""
    for name, params in (
        ("ppo", {"clip_low_threshold": 0.5}),
        ("nothing", {"x": 1}),
        ("grpo", {"agg_type": "MEAN"}),
        ("grpo", {"denominator": 5.0}),
    ):
        assert losses.for_whole_call(name, params, [on_policy([1.0])]) == params


PROMPTED = on_policy([0.0, 1.0, 1.0], logprobs=[0.0, -1.0, -1.0])


@pytest.mark.parametrize(
    ("name", "params", "mask"),
    [
        ("gspo", {}, "sequence_ratio_mask"),
        ("grpo", {"agg_type": "TOKEN_MEAN"}, "weights"),
        ("grpo", {"agg_type": "SEQUENCE_MEAN"}, "weights"),
        ("grpo", {"ratio_type": "SEQUENCE"}, "weights"),
        ("grpo", {"beta": 0.1}, "weights"),
        ("dro", {}, "weights"),
    ],
)
def test_prompts_that_are_taken_in_are_told_of(name, params, mask):
    complete = losses.complete_params(name, params)
    masked = {**PROMPTED, mask: np.array([0.0, 1.0, 1.0])}
    first_sampled = on_policy([1.0, 1.0])
    idle = on_policy([0.0, 0.0], logprobs=[0.0, -1.0])
    assert losses.prompt_notice(name, complete, [masked, first_sampled, idle]) is None
    notice = losses.prompt_notice(name, complete, [masked, PROMPTED])
    assert notice is not None
    assert notice.startswith("Sample 1: position 0")
    assert f"Give {mask}" in notice


@pytest.mark.parametrize("name", ["ppo", "grpo", "cross_entropy", "importance_sampling"])
def test_prompts_are_no_matter_where_each_position_stands_alone(name):
    assert losses.prompt_notice(name, losses.complete_params(name, {}), [PROMPTED]) is None


@pytest.mark.parametrize(
    ("name", "given", "is_told"),
    [
        ("ppo", {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2}, True),
        ("gspo", {"clip_low_threshold": 1.1, "clip_high_threshold": 1.2}, True),
        ("cispo", {"clip_high_threshold": 0.28}, True),
        ("ppo", {}, False),
        ("cispo", {}, False),
        ("ppo", {"clip_high_threshold": 1.0}, False),
        ("dro", {}, False),
    ],
)
def test_bounds_that_look_like_offsets_are_told_of(name, given, is_told):
    notice = losses.offsets_notice(name, losses.complete_params(name, given))
    assert (notice is not None) is is_told
    assert not is_told or name in str(notice)
