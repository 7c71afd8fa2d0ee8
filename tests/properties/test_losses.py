"""Laws 4 and 6: losses are sums over positions and samples, and neither order nor cuts change anything."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from together_post_training import losses

RANGES = {
    "lp": (-8, 0),
    "logprobs": (-8, 0),
    "reference_logprobs": (-8, 0),
    "advantages": (-3, 3),
    "weights": (-1, 2),
    "sampled": (0, 1),
}
# What is a sum over the positions of one sample, too; the others look at its sequence or at the batch.
TOKEN_WISE = sorted(set(losses.CONTRACTS) - {"gspo", "grpo"})
Values = dict[str, np.ndarray]


@st.composite
def positions(draw: st.DrawFn, min_size: int = 2) -> Values:
    """Inputs of 2 to 8 positions; some have no weight."""
    shape = (draw(st.integers(min_size, 8)),)
    values = {
        key: draw(hnp.arrays(np.float32, shape, elements=st.floats(low, high, width=32)))
        for key, (low, high) in RANGES.items()
    }
    values["weights"] *= draw(hnp.arrays(bool, shape))
    values["target_tokens"] = np.zeros(shape, np.int64)
    return values


def read_by(name: str, values: Values) -> Values:
    contract = losses.contract(name)
    readable = {*contract.inputs, *contract.optional, *contract.provided}
    return {key: array for key, array in values.items() if key in readable}


def evaluate(name: str, batch: list[Values], params: dict | None = None) -> list[losses.LossValue]:
    inputs = [read_by(name, values) for values in batch]
    complete = losses.complete_params(name, params or {})
    prepared = losses.prepare(name, complete, inputs, max_seq_length=8)
    return [
        losses.evaluate(name, values["lp"], own, prepared, sample=i)
        for i, (values, own) in enumerate(zip(batch, inputs, strict=True))
    ]


def one(name: str, values: Values) -> losses.LossValue:
    return evaluate(name, [values])[0]


def total(values: list[losses.LossValue]) -> float:
    return sum(value.loss for value in values)


@pytest.mark.parametrize("name", TOKEN_WISE)
@given(values=positions(), data=st.data())
def test_law_6_a_loss_is_the_sum_of_its_parts(name, values, data):
    """Cut in two anywhere, and repeated: float64 sums of a few terms, equal to 1e-9."""
    num_tokens = len(values["lp"])
    cut = data.draw(st.integers(1, num_tokens - 1))
    whole = one(name, values)
    left = one(name, {key: array[:cut] for key, array in values.items()})
    right = one(name, {key: array[cut:] for key, array in values.items()})
    size = sum(abs(v.loss) for v in (left, right))
    assert whole.loss == pytest.approx(left.loss + right.loss, rel=1e-9, abs=1e-9 * size)
    np.testing.assert_array_equal(whole.gradient, [*left.gradient, *right.gradient])
    metrics = losses.summarize([left, right], num_tokens)
    assert metrics == pytest.approx(losses.summarize([whole], num_tokens), rel=1e-9, abs=1e-9)
    twice = one(name, {key: np.tile(array, 2) for key, array in values.items()})
    assert twice.loss == pytest.approx(2 * whole.loss, rel=1e-9, abs=1e-9 * size)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, dict]:
    """A loss, and parameters that make it look beyond one position."""
    name = draw(st.sampled_from(sorted(losses.CONTRACTS)))
    if name != "grpo":
        return name, {}
    return name, {
        "agg_type": draw(st.sampled_from(["FIXED_HORIZON", "TOKEN_MEAN", "sequence_mean"])),
        "ratio_type": draw(st.sampled_from(["TOKEN", "SEQUENCE"])),
        "beta": draw(st.sampled_from([0.0, 0.5])),
    }


@given(call=calls(), batch=st.lists(positions(min_size=1), min_size=2, max_size=6), data=st.data())
def test_law_4_operations_of_a_split_call_give_what_one_operation_gives(call, batch, data):
    """Exactly, sample by sample, when each operation is told of the whole call."""
    name, params = call
    cut = data.draw(st.integers(1, len(batch) - 1))
    whole = evaluate(name, batch, params)
    inputs = [read_by(name, values) for values in batch]
    shared = losses.for_whole_call(name, params, inputs)
    halves = [*evaluate(name, batch[:cut], shared), *evaluate(name, batch[cut:], shared)]
    for one_value, other in zip(whole, halves, strict=True):
        assert one_value.loss == other.loss
        np.testing.assert_array_equal(one_value.gradient, other.gradient)


@given(call=calls(), batch=st.lists(positions(min_size=1), min_size=2, max_size=6), data=st.data())
def test_law_4_the_order_of_samples_changes_nothing(call, batch, data):
    """Of a sample nothing at all; of sums their rounding."""
    name, params = call
    order = data.draw(st.permutations(range(len(batch))))
    straight = evaluate(name, batch, params)
    shuffled = evaluate(name, [batch[i] for i in order], params)
    for i, value in zip(order, shuffled, strict=True):
        assert value.loss == straight[i].loss
        np.testing.assert_array_equal(value.gradient, straight[i].gradient)
    size = sum(abs(value.loss) for value in straight)
    assert total(shuffled) == pytest.approx(total(straight), rel=1e-9, abs=1e-9 * size)
    assert losses.summarize(shuffled, 9) == pytest.approx(
        losses.summarize(straight, 9), rel=1e-9, abs=1e-9 * (1 + size)
    )


@given(batch=st.lists(positions(min_size=1), min_size=1, max_size=4), agg=st.booleans())
def test_law_6_samples_without_weight_do_not_count_in_means(batch, agg):
    params = {"agg_type": "TOKEN_MEAN" if agg else "SEQUENCE_MEAN"}
    masked = {**batch[0], "weights": np.zeros_like(batch[0]["weights"])}
    alone = evaluate("grpo", batch, params)
    beside = evaluate("grpo", [*batch, masked], params)
    assert [value.loss for value in beside] == [*(value.loss for value in alone), 0]


@pytest.mark.parametrize("name", sorted(losses.CONTRACTS))
@given(values=positions(), factor=st.sampled_from([-1.5, 0.25, 3.0]))
def test_weights_multiply_loss_and_gradient(name, values, factor):
    """Exactly representable factors, so only the sum rounds."""
    plain = one(name, values)
    scaled = one(name, {**values, "weights": values["weights"] * np.float32(factor)})
    np.testing.assert_allclose(scaled.gradient, factor * plain.gradient, rtol=1e-6, atol=1e-40)
    size = float(np.abs(plain.gradient).sum()) * 8 + abs(plain.loss)
    assert scaled.loss == pytest.approx(factor * plain.loss, rel=1e-6, abs=1e-6 * size + 1e-40)


@given(call=calls(), batch=st.lists(positions(min_size=1), min_size=1, max_size=3))
def test_prepared_parameters_may_be_prepared_again(call, batch):
    name, params = call
    inputs = [read_by(name, values) for values in batch]
    once = losses.prepare(name, losses.complete_params(name, params), inputs, max_seq_length=8)
    again = losses.prepare(name, losses.complete_params(name, once), inputs)
    assert again == once


@pytest.mark.parametrize("name", sorted(losses.CONTRACTS))
def test_metrics_are_named_with_one_reduction(name):
    values = {
        "lp": np.array([-1.0, -2.0]),
        "logprobs": np.array([-1.1, -2.5]),
        "reference_logprobs": np.array([-1.1, -2.5]),
        "advantages": np.array([1.0, -1.0]),
        "weights": np.ones(2),
        "sampled": np.ones(2),
        "target_tokens": np.zeros(2, np.int64),
    }
    metrics = losses.summarize([one(name, values)], 2)
    assert {"loss:sum", "tokens:sum", "tokens_trained:sum"} <= metrics.keys()
    for key in metrics:
        metric, reduction = key.split(":")
        assert metric
        assert reduction in {"sum", "mean", "max"}
