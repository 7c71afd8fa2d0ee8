"""Law 3: nothing is shifted in silence; what looks misaligned is reported."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.strategies import tokens
from together_post_training import samples
from together_post_training.alignment import alignment_report
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
    assert alignment_report([samples.build(ids) for ids in sequences]) == {TARGETS: 0}


@given(ids=tokens(min_size=3, max_size=20), extra=tokens())
def test_law_3_targets_that_are_not_the_next_token_are_counted(ids, extra):
    """Targets equal to the inputs: the shift that is forgotten most often."""
    forgotten = Sample(tokens=np.array(ids), inputs={"target_tokens": np.array(ids)})
    expected = sum(a != b for a, b in itertools.pairwise(ids))
    fine = samples.build([*extra, 1])
    assert alignment_report([forgotten, fine]) == {TARGETS: expected}


def test_positions_without_weight_are_not_counted():
    """Two documents in one sample, the border masked: as it should be."""
    packed = Sample(
        tokens=np.array([1, 2, 7, 8]),
        inputs={
            "target_tokens": np.array([2, 3, 8, 9]),
            "weights": np.array([1, 0, 1, 1], np.float32),
        },
    )
    assert alignment_report([packed]) == {TARGETS: 0}
    unmasked = Sample(
        tokens=packed.tokens, inputs={"target_tokens": packed.inputs["target_tokens"]}
    )
    assert alignment_report([unmasked]) == {TARGETS: 1}


def test_two_dimensional_targets_are_left_out():
    wide = Sample(tokens=np.array([1, 2]), inputs={"target_tokens": np.array([[5, 6], [7, 8]])})
    logprobs = [np.zeros((2, 2), np.float32)]
    assert alignment_report([wide], logprobs) == {TARGETS: 0, LOGPROBS: 0}


@given(seed=st.integers(0, 10**6), shift=st.sampled_from([-1, 1]), drift=st.floats(0, 0.2))
def test_law_3_sampling_logprobs_one_position_off_are_reported(seed, shift, drift):
    current = logprobs_of(seed, 24)
    noise = np.float32(drift) * logprobs_of(seed + 1, 24)
    aligned, shifted = policy_sample(current + noise), policy_sample(np.roll(current, shift))
    report = alignment_report([aligned, shifted], [current, current])
    assert report[LOGPROBS] == 1


@given(seed=st.integers(0, 10**6))
def test_law_3_another_policys_logprobs_are_not_taken_for_shifted(seed):
    current, other = logprobs_of(seed, 24), logprobs_of(seed + 1, 24)
    assert alignment_report([policy_sample(other)], [current])[LOGPROBS] == 0


def test_few_positions_or_none_with_an_advantage_are_not_judged():
    current = logprobs_of(0, 24)
    off = np.roll(current, 1)
    advantages = np.zeros(24, np.float32)
    advantages[:9] = 1  # seven of them lie between two others
    batch = [policy_sample(off[:9]), policy_sample(off, advantages), policy_sample(off)]
    logprobs = [current[:9], current, current]
    assert alignment_report(batch, logprobs)[LOGPROBS] == 1
