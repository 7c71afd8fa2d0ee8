"""Law 6: losses are sums over positions and samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from together_post_training import losses

INPUTS = ("logprobs", "advantages", "weights")


@st.composite
def positions(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Current and sampling logprobs, advantages and weights of 2 to 8 positions."""
    shape = (draw(st.integers(2, 8)),)
    ranges = {"lp": (-8, 0), "logprobs": (-8, 0), "advantages": (-3, 3), "weights": (-1, 2)}
    return {
        key: draw(hnp.arrays(np.float32, shape, elements=st.floats(low, high, width=32)))
        for key, (low, high) in ranges.items()
    }


def evaluate(name: str, values: dict[str, np.ndarray]) -> losses.LossValue:
    inputs = {key: values[key] for key in INPUTS}
    params = losses.complete_params(name, {})
    return losses.evaluate(name, values["lp"], inputs, params, sample=0)


@pytest.mark.parametrize("name", sorted(losses.CONTRACTS))
@given(values=positions(), data=st.data())
def test_law_6_a_loss_is_the_sum_of_its_parts(name, values, data):
    """Cut in two anywhere, and repeated: float64 sums of a few terms, equal to 1e-9."""
    num_tokens = len(values["lp"])
    cut = data.draw(st.integers(1, num_tokens - 1))
    whole = evaluate(name, values)
    left = evaluate(name, {key: array[:cut] for key, array in values.items()})
    right = evaluate(name, {key: array[cut:] for key, array in values.items()})
    size = sum(abs(v.loss) for v in (left, right))
    assert whole.loss == pytest.approx(left.loss + right.loss, rel=1e-9, abs=1e-9 * size)
    np.testing.assert_array_equal(whole.gradient, [*left.gradient, *right.gradient])
    metrics = losses.summarize([left, right], num_tokens)
    assert metrics == pytest.approx(losses.summarize([whole], num_tokens), rel=1e-9, abs=1e-9)
    twice = evaluate(name, {key: np.tile(array, 2) for key, array in values.items()})
    assert twice.loss == pytest.approx(2 * whole.loss, rel=1e-9, abs=1e-9 * size)


@pytest.mark.parametrize("name", sorted(losses.CONTRACTS))
@given(values=positions(), factor=st.sampled_from([-1.5, 0.25, 3.0]))
def test_weights_multiply_loss_and_gradient(name, values, factor):
    """Exactly representable factors, so only the sum rounds."""
    one = evaluate(name, values)
    scaled = evaluate(name, {**values, "weights": values["weights"] * np.float32(factor)})
    np.testing.assert_allclose(scaled.gradient, factor * one.gradient, rtol=1e-6, atol=1e-40)
    size = float(np.abs(one.gradient).sum()) * 8 + abs(one.loss)
    assert scaled.loss == pytest.approx(factor * one.loss, rel=1e-6, abs=1e-6 * size + 1e-40)


@pytest.mark.parametrize("name", sorted(losses.CONTRACTS))
def test_metrics_are_named_with_one_reduction(name):
    values = {
        "lp": np.array([-1.0, -2.0]),
        "logprobs": np.array([-1.1, -2.5]),
        "advantages": np.array([1.0, -1.0]),
        "weights": np.ones(2),
    }
    metrics = losses.summarize([evaluate(name, values)], 2)
    assert {"loss:sum", "tokens:sum"} <= metrics.keys()
    for key in metrics:
        metric, reduction = key.split(":")
        assert metric
        assert reduction in {"sum", "mean", "max"}
