"""How metrics of chunks become one call's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_compat.metrics import merge


@pytest.mark.parametrize(
    ("name", "values", "num_samples", "expected"),
    [
        ("x:sum", [1.0, 2.0, 4.0], [1, 1, 1], 7.0),
        # Weighted by samples: (1 * 3 + 5 * 1) / 4.
        ("x:mean", [1.0, 5.0], [3, 1], 2.0),
        ("x:min", [3.0, 1.0], [1, 1], 1.0),
        ("x:max", [3.0, 1.0], [1, 1], 3.0),
        ("x:slack", [1.0, 5.0], [3, 1], 3.0),
        ("x:hash2", [2.0**63, 2.0**63], [1, 1], 0),
        ("x:hash2", [3.0, 4.0], [1, 1], 7),
    ],
)
def test_metrics_are_merged_by_their_suffix(name, values, num_samples, expected):
    assert merge([{name: v} for v in values], num_samples) == {name: expected}


def test_metrics_come_by_name_whatever_the_order_in_which_they_are_sent():
    """So that what a script prints at each step lines up."""
    chunks = [{"b:sum": 1.0, "a:sum": 2.0}, {"c:sum": 3.0, "a:sum": 4.0}]
    assert list(merge(chunks, [1, 1])) == ["a:sum", "b:sum", "c:sum"]


def test_unique_metrics_are_kept_one_by_one():
    assert merge([{"c:unique": 1.0}, {"c:unique": 2.0}, {"c:unique": 3.0}], [1, 1, 1]) == {
        "c:unique": 1.0,
        "c:unique_1": 2.0,
        "c:unique_2": 3.0,
    }


def test_metrics_that_some_chunks_lack_are_those_of_the_others():
    chunks = [{"a:sum": 1.0}, {"a:sum": 1.0, "r:mean": 2.0}, {"a:sum": 4.0, "r:mean": 5.0}]
    assert merge(chunks, [1024, 1, 2]) == {"a:sum": 6.0, "r:mean": 4.0}


def test_metrics_of_an_unknown_reduction_are_left_out():
    assert merge([{"a:median": 1.0, "b:sum": 2.0}], [1]) == {"b:sum": 2.0}


@pytest.mark.parametrize("name", ["loss", "a:b:sum"])
def test_metrics_need_exactly_one_colon(name):
    with pytest.raises(ValueError, match="unpack"):
        merge([{name: 1.0}], [1])


def test_a_mean_over_no_samples_is_undefined():
    with pytest.raises(ZeroDivisionError):
        merge([{"a:mean": 1.0}], [0])


METRICS = st.dictionaries(
    st.sampled_from(["a:sum", "b:mean", "c:min", "d:max", "e:slack", "f:hash2"]),
    st.floats(-1e6, 1e6),
)


@given(METRICS)
def test_one_chunk_changes_nothing_but_slack_and_hash(metrics):
    merged = merge([metrics], [3])
    for name, value in metrics.items():
        if name.endswith("slack"):
            # Rounding of the mean: values reach 1e6.
            assert merged[name] == pytest.approx(0, abs=1e-8)
        elif name.endswith("hash2"):
            assert merged[name] == int(value) % 2**64
        else:
            assert merged[name] == pytest.approx(value)
