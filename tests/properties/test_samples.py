"""Laws 1 and 3: what belongs together has one length, and nothing is shifted in silence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.properties.strategies import VOCAB, floats32, tokens
from together_post_training import losses, samples
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.samples import Limits, Sample

LIMITS = Limits(vocab_size=VOCAB, max_seq_length=16)


def refused(reason: Reason, batch: list[Sample], loss: str = "cross_entropy") -> PostTrainingError:
    with pytest.raises(PostTrainingError) as error:
        samples.check(batch, loss, LIMITS)
    assert error.value.reason is reason
    return error.value


def plain(num_tokens: int = 3, **inputs: np.ndarray) -> Sample:
    ids = np.arange(num_tokens + 1)
    return Sample(tokens=ids[:-1], inputs={"target_tokens": ids[1:], **inputs})


@st.composite
def checked_case(draw: st.DrawFn) -> tuple[str, Sample]:
    """A loss and a sample that fits it."""
    loss = draw(st.sampled_from(sorted(losses.CONTRACTS)))
    contract = losses.contract(loss)
    ids = draw(tokens())
    shape: tuple[int, ...] = (len(ids),)
    if contract.takes_2d and draw(st.booleans()):
        shape = (len(ids), draw(st.integers(1, 3)))
    targets = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
    inputs: dict[str, np.ndarray] = {"target_tokens": np.resize(np.array(targets), shape)}
    optional = draw(st.sets(st.sampled_from(contract.optional)))
    for key in {*contract.inputs, *optional, *contract.provided} - {"target_tokens"}:
        inputs[key] = draw(floats32(shape))
    return loss, Sample(tokens=np.array(ids), inputs=inputs)


# Law 1


@given(ids=tokens(min_size=2, max_size=20), data=st.data())
def test_law_1_build_drops_the_last_token_and_the_first_of_every_array(ids, data):
    weights = data.draw(floats32((len(ids),)))
    advantages = list(range(len(ids)))
    sample = samples.build(ids, weights=weights, advantages=advantages)
    assert sample.tokens.tolist() == ids[:-1]
    assert sample.inputs["target_tokens"].tolist() == ids[1:]
    assert sample.inputs["target_tokens"].dtype == np.int64
    np.testing.assert_array_equal(sample.inputs["weights"], weights[1:])
    assert sample.inputs["weights"].dtype == np.float32
    assert sample.inputs["advantages"].tolist() == advantages[1:]


@given(ids=tokens(min_size=2), length=st.integers(0, 14))
def test_law_1_build_refuses_any_other_length_and_names_it(ids, length):
    assume(length != len(ids))
    with pytest.raises(PostTrainingError) as error:
        samples.build(ids, weights=np.zeros(length))
    assert error.value.reason is Reason.LENGTH_MISMATCH
    assert error.value.metadata == {
        "sample": "0",
        "key": "weights",
        "expected": str(len(ids)),
        "got": str(length),
    }


@pytest.mark.parametrize("ids", [[], [3], [[1, 2], [3, 4]]])
def test_build_refuses_what_has_nothing_to_predict(ids):
    with pytest.raises(PostTrainingError) as error:
        samples.build(ids)
    assert error.value.reason is Reason.EMPTY_INPUT


@given(case=checked_case())
def test_law_1_what_fits_is_kept_as_it_is(case):
    loss, sample = case
    (checked,) = samples.check([sample], loss, LIMITS)
    assert checked.tokens.tolist() == sample.tokens.tolist()
    assert checked.inputs.keys() == sample.inputs.keys()
    for key, values in sample.inputs.items():
        assert checked.inputs[key].dtype == (np.int64 if key == "target_tokens" else np.float32)
        np.testing.assert_array_equal(checked.inputs[key], values)


@given(case=checked_case(), data=st.data())
def test_law_1_any_other_length_is_refused_by_sample_key_and_lengths(case, data):
    loss, sample = case
    key = data.draw(st.sampled_from(sorted(sample.inputs)))
    length = data.draw(st.integers(0, 14).filter(lambda n: n != sample.num_tokens))
    inputs = dict(sample.inputs)
    inputs[key] = np.resize(inputs[key], (length, *inputs[key].shape[1:]))
    error = refused(
        Reason.LENGTH_MISMATCH, [sample, Sample(tokens=sample.tokens, inputs=inputs)], loss
    )
    assert error.metadata["sample"] == "1"
    assert error.metadata["key"] == key
    for number in (sample.num_tokens, length):
        assert str(number) in error.message


@given(case=checked_case())
def test_every_required_input_is_missed_by_name(case):
    loss, sample = case
    for key in (*losses.contract(loss).inputs, *losses.contract(loss).provided):
        rest = {k: v for k, v in sample.inputs.items() if k != key}
        error = refused(
            Reason.MISSING_INPUT, [sample, Sample(tokens=sample.tokens, inputs=rest)], loss
        )
        assert (error.metadata["sample"], error.metadata["key"]) == ("1", key)


def test_what_the_server_adds_is_asked_for_by_its_source():
    message = refused(
        Reason.MISSING_INPUT, [plain(advantages=np.ones(3, np.float32))], "stable_reinforce"
    ).message
    assert "lacks 'logprobs'" in message
    assert "provenance spans" in message


def test_inputs_a_loss_does_not_read_are_refused_by_name():
    error = refused(Reason.UNKNOWN_INPUT, [plain(advantages=np.ones(3, np.float32))])
    assert error.metadata["key"] == "advantages"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
def test_values_outside_float32_are_refused_by_position(value):
    error = refused(Reason.NOT_FINITE, [plain(weights=np.array([1.0, value, 1.0]))])
    assert error.metadata["position"] == "1"


@pytest.mark.parametrize("dtype", [bool, complex, "U1"])
def test_other_dtypes_are_refused_by_name(dtype):
    error = refused(Reason.WRONG_DTYPE, [plain(weights=np.ones(3).astype(dtype))])
    assert error.metadata["key"] == "weights"


def test_float_targets_are_refused():
    sample = plain()
    floats = Sample(tokens=sample.tokens, inputs={"target_tokens": np.ones(3, np.float32)})
    assert "float32" in refused(Reason.WRONG_DTYPE, [floats]).message


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float64, np.uint8])
def test_numbers_of_other_widths_are_converted(dtype):
    (checked,) = samples.check([plain(weights=np.array([0, 1, 2], dtype))], "cross_entropy", LIMITS)
    assert checked.inputs["weights"].dtype == np.float32
    assert checked.inputs["weights"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31, 2**62])
@pytest.mark.parametrize("where", ["model_input", "target_tokens"])
def test_token_ids_outside_the_vocabulary_are_refused_by_value(bad, where):
    ids, targets = np.array([1, 2, 3]), np.array([2, 3, 4])
    (ids if where == "model_input" else targets)[1] = bad
    error = refused(
        Reason.TOKEN_OUT_OF_RANGE, [plain(), Sample(tokens=ids, inputs={"target_tokens": targets})]
    )
    assert error.metadata["token"] == str(bad)
    assert "Sample 1" in error.message
    assert where in error.message


def test_sequences_over_the_window_are_refused_with_both_numbers():
    samples.check([plain(16)], "cross_entropy", LIMITS)
    error = refused(Reason.SEQUENCE_TOO_LONG, [plain(16), plain(17)])
    assert (error.metadata["num_tokens"], error.metadata["max_seq_length"]) == ("17", "16")


def test_empty_batches_and_samples_are_refused():
    refused(Reason.EMPTY_INPUT, [])
    nothing = np.zeros(0, np.int64)
    refused(
        Reason.EMPTY_INPUT, [plain(), Sample(tokens=nothing, inputs={"target_tokens": nothing})]
    )


@pytest.mark.parametrize("loss", [name for name, c in losses.CONTRACTS.items() if not c.takes_2d])
def test_two_dimensional_targets_are_refused_where_a_loss_cannot_read_them(loss):
    shape = (3, 2)
    inputs = {"target_tokens": np.ones(shape, np.int64)}
    inputs |= {key: np.ones(shape, np.float32) for key in ("logprobs", "advantages")}
    inputs |= {key: np.ones(shape, np.float32) for key in losses.contract(loss).provided}
    refused(Reason.LENGTH_MISMATCH, [Sample(tokens=np.arange(3), inputs=inputs)], loss)


@given(shape=st.sampled_from([(3,), (3, 1), (3, 3), (2, 2), (3, 2, 1)]))
def test_values_need_the_shape_of_the_targets(shape):
    targets = np.ones((3, 2), np.int64)
    sample = Sample(
        tokens=np.arange(3),
        inputs={"target_tokens": targets, "weights": np.ones(shape, np.float32)},
    )
    refused(Reason.LENGTH_MISMATCH, [sample])


@given(case=checked_case(), data=st.data())
def test_custom_gradients_need_the_shape_of_the_targets(case, data):
    _, sample = case
    shape = sample.inputs["target_tokens"].shape
    gradient = data.draw(floats32(shape))
    (checked,) = samples.check_gradients([sample], [gradient])
    assert checked.dtype == np.float32
    np.testing.assert_array_equal(checked, gradient)
    for wrong in (gradient[:-1], np.stack([gradient, gradient]), gradient[..., None]):
        with pytest.raises(PostTrainingError) as error:
            samples.check_gradients([sample, sample], [gradient, wrong])
        assert error.value.reason is Reason.LENGTH_MISMATCH
        assert error.value.metadata["sample"] == "1"
    with pytest.raises(PostTrainingError) as error:
        samples.check_gradients([sample], [gradient, gradient])
    assert error.value.reason is Reason.LENGTH_MISMATCH
