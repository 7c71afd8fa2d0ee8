from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from together_post_training.chunking import MAX_CHUNK_BYTES, MAX_CHUNK_SAMPLES, chunk


@given(
    sizes=st.lists(st.integers(0, 30), max_size=60),
    max_samples=st.integers(1, 8),
    max_bytes=st.integers(1, 50),
)
def test_chunks_cover_all_samples_in_order_within_the_limits(sizes, max_samples, max_bytes):
    slices = chunk(sizes, max_samples=max_samples, max_bytes=max_bytes)
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(len(sizes)))
    for part in slices:
        assert 1 <= part.stop - part.start <= max_samples
        assert sum(sizes[part]) <= max_bytes or part.stop - part.start == 1


@given(
    sizes=st.lists(st.integers(0, 30), max_size=60),
    max_samples=st.integers(1, 8),
    max_bytes=st.integers(1, 50),
)
def test_chunks_are_as_full_as_they_may_be(sizes, max_samples, max_bytes):
    slices = chunk(sizes, max_samples=max_samples, max_bytes=max_bytes)
    for part, following in itertools.pairwise(slices):
        is_full = part.stop - part.start == max_samples
        assert is_full or sum(sizes[part]) + sizes[following.start] > max_bytes


def test_chunks_by_default_hold_1024_samples_or_5_megabytes():
    assert (MAX_CHUNK_SAMPLES, MAX_CHUNK_BYTES) == (1024, 5_000_000)
    assert [s.stop for s in chunk([0] * 1025)] == [1024, 1025]
    assert [s.stop for s in chunk([5_000_000, 1])] == [1, 2]
    assert [s.stop for s in chunk([2_500_000, 2_500_000])] == [2]


def test_chunks_put_an_oversize_sample_alone():
    assert chunk([1, 9_000_000, 1]) == [slice(0, 1), slice(1, 2), slice(2, 3)]
