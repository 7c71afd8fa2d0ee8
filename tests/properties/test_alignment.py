"""Law 3: nothing is shifted in silence; what looks misaligned is reported."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.strategies import tokens
from together_post_training import samples
from together_post_training.alignment import inspect
from together_post_training.samples import Sample

TARGETS, LOGPROBS = "alignment_shifted_targets:sum", "alignment_shifted_logprobs:sum"


def policy_sample(sampling: np.ndarray, advantages: np.ndarray | None = None) -> Sample:
    ids = np.arange(len(sampling) + 1)
    inputs = {"target_tokens": ids[1:], "logprobs": sampling}
    if advantages is not None:
        inputs["advantages"] = advantages
    return Sample(tokens=ids[:-1], inputs=inputs)


def logprobs_of(seed: int, num_tokens: int) -> np.ndarray:
    return -np.random.default_rng(seed).exponential(2.0, num_tokens).astype(np.float32)


@given(st.lists(tokens(min_size=2), min_size=1, max_size=4))
def test_law_3_built_samples_are_reported_aligned(sequences):
    assert inspect([samples.build(ids) for ids in sequences]).metrics == {TARGETS: 0}


@given(ids=tokens(min_size=3, max_size=20), extra=tokens())
def test_law_3_targets_that_are_not_the_next_token_are_counted(ids, extra):
    """Targets equal to the inputs: the shift that is forgotten most often."""
    forgotten = Sample(tokens=np.array(ids), inputs={"target_tokens": np.array(ids)})
    expected = sum(a != b for a, b in itertools.pairwise(ids))
    fine = samples.build([*extra, 1])
    assert inspect([forgotten, fine]).metrics == {TARGETS: expected}


def test_positions_without_weight_are_not_counted():
    """Two documents in one sample, the border masked: as it should be."""
    packed = Sample(
        tokens=np.array([1, 2, 7, 8]),
        inputs={
            "target_tokens": np.array([2, 3, 8, 9]),
            "weights": np.array([1, 0, 1, 1], np.float32),
        },
    )
    assert inspect([packed]).metrics == {TARGETS: 0}
    unmasked = Sample(
        tokens=packed.tokens, inputs={"target_tokens": packed.inputs["target_tokens"]}
    )
    assert inspect([unmasked]).metrics == {TARGETS: 1}


def test_two_dimensional_targets_are_left_out():
    wide = Sample(tokens=np.array([1, 2]), inputs={"target_tokens": np.array([[5, 6], [7, 8]])})
    logprobs = [np.zeros((2, 2), np.float32)]
    assert inspect([wide], logprobs).metrics == {TARGETS: 0, LOGPROBS: 0}


@given(seed=st.integers(0, 10**6), shift=st.sampled_from([-1, 1]), drift=st.floats(0, 0.2))
def test_law_3_sampling_logprobs_one_position_off_are_reported(seed, shift, drift):
    current = logprobs_of(seed, 24)
    noise = np.float32(drift) * logprobs_of(seed + 1, 24)
    aligned, shifted = policy_sample(current + noise), policy_sample(np.roll(current, shift))
    report = inspect([aligned, shifted], [current, current]).metrics
    assert report[LOGPROBS] == 1


@given(seed=st.integers(0, 10**6))
def test_law_3_another_policys_logprobs_are_not_taken_for_shifted(seed):
    current, other = logprobs_of(seed, 24), logprobs_of(seed + 1, 24)
    assert inspect([policy_sample(other)], [current]).metrics[LOGPROBS] == 0


def test_few_positions_or_none_with_an_advantage_are_not_judged():
    current = logprobs_of(0, 24)
    off = np.roll(current, 1)
    advantages = np.zeros(24, np.float32)
    advantages[:9] = 1  # seven of them lie between two others
    batch = [policy_sample(off[:9]), policy_sample(off, advantages), policy_sample(off)]
    logprobs = [current[:9], current, current]
    assert inspect(batch, logprobs).metrics[LOGPROBS] == 1
    # Eight are enough.
    assert inspect([policy_sample(off[:10])], [current[:10]]).metrics[LOGPROBS] == 1


# What the warning says


def warning_of(*batch: Sample, logprobs: list[np.ndarray] | None = None) -> str:
    warning = inspect(batch, logprobs).warning
    assert warning is not None
    assert "Nothing was shifted" in warning
    return warning


def targets_sample(ids: list[int], targets: list[int], **inputs: list[float]) -> Sample:
    arrays = {key: np.array(values, np.float32) for key, values in inputs.items()}
    return Sample(tokens=np.array(ids), inputs={"target_tokens": np.array(targets), **arrays})


FINE = targets_sample([1, 2, 3], [2, 3, 4])


@given(st.lists(tokens(min_size=2), min_size=1, max_size=4), st.integers(0, 10**6))
def test_law_3_aligned_samples_warn_of_nothing(sequences, seed):
    batch = [samples.build(ids) for ids in sequences]
    assert inspect(batch).warning is None
    current = logprobs_of(seed, 24)
    assert inspect([policy_sample(current)], [current]).warning is None


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        ([5, 6, 7, 8, 9], "look unshifted, as they equal the model input in place"),
        ([7, 8, 9, 1, 2], "look shifted twice"),
        ([4, 5, 6, 7, 8], "look shifted to the wrong side"),
        ([6, 7, 8, 0, 1], "borders between packed documents"),
    ],
)
def test_law_3_the_warning_names_the_shift(targets, says):
    warning = warning_of(FINE, targets_sample([5, 6, 7, 8, 9], targets))
    assert warning.startswith("Sample 1: target_tokens[")
    assert says in warning
    assert "such samples: 1 of 2" in warning


def test_the_warning_names_the_first_position_that_counts_and_what_is_there():
    shifted = targets_sample([5, 6, 7, 8], [5, 6, 7, 8], weights=[0, 1, 1, 1])
    warning = warning_of(FINE, FINE, shifted)
    assert warning.startswith(
        "Sample 2: target_tokens[1] is 6, but model_input[2] is 7 (such positions in this sample: 2 of 4"
    )


def test_a_shifted_sample_is_named_before_one_with_a_border():
    border = targets_sample([1, 2, 7, 8], [2, 3, 8, 9])
    assert warning_of(border, targets_sample([5, 6, 7], [5, 6, 7])).startswith("Sample 1")
    assert warning_of(border, FINE).startswith(
        "Sample 0: target_tokens[1] is 3, but model_input[2] is 7"
    )


def test_targets_of_several_tokens_are_left_out_of_the_warning():
    wide = Sample(tokens=np.array([1, 2]), inputs={"target_tokens": np.array([[5, 6], [7, 8]])})
    assert inspect([wide]).warning is None
    assert warning_of(wide, targets_sample([5, 6, 7], [5, 6, 7])).startswith("Sample 1")


@pytest.mark.parametrize(
    ("shift", "side", "hint"),
    [(1, "left", "Drop the first value"), (-1, "right", "the first value was dropped twice")],
)
def test_law_3_the_warning_names_the_side_of_shifted_logprobs(shift, side, hint):
    """Sampling logprobs that are late by one must move to the left."""
    current = logprobs_of(3, 24)
    shifted = policy_sample(np.roll(current, shift))
    warning = warning_of(policy_sample(current), shifted, logprobs=[current, current])
    assert warning.startswith(
        f"Sample 1: the sampling logprobs fit the current policy better one position to the {side}"
    )
    assert hint in warning
    assert (
        f"at position 1 the policy gives {current[1]:.3f}, logprobs[1] is {current[1 - shift]:.3f}"
        in warning
    )
    assert f"logprobs[{1 + shift}] is {current[1]:.3f}" in warning


def test_shifted_targets_are_told_of_before_shifted_logprobs():
    current = logprobs_of(3, 24)
    sample = policy_sample(np.roll(current, 1))
    unshifted = Sample(
        tokens=sample.tokens, inputs={**sample.inputs, "target_tokens": sample.tokens}
    )
    found = inspect([unshifted], [current])
    assert found.metrics == {TARGETS: 23, LOGPROBS: 1}
    assert found.warning is not None
    assert "unshifted" in found.warning


@given(
    batch=st.lists(
        st.tuples(tokens(), tokens(), st.booleans(), st.booleans()), min_size=1, max_size=5
    ),
    seed=st.integers(0, 10**6),
)
def test_law_4_a_batch_is_reported_as_its_samples_are_one_by_one(batch, seed):
    random = np.random.default_rng(seed)
    made, current = [], []
    for ids, targets, is_policy, is_shifted in batch:
        size = len(ids) + 10
        inputs = {"target_tokens": np.resize(np.array(targets), size)}
        current.append(random.normal(size=size).astype(np.float32))
        if is_policy:
            inputs["logprobs"] = np.roll(current[-1], is_shifted)
            inputs["advantages"] = (random.random(size) < 0.9).astype(np.float32)
        made.append(Sample(tokens=np.resize(np.array(ids), size), inputs=inputs))
    alone = [
        inspect([sample], [logprobs]).metrics
        for sample, logprobs in zip(made, current, strict=True)
    ]
    together = inspect(made, current).metrics
    assert together == {key: sum(report[key] for report in alone) for key in together}
