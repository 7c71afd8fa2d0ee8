"""Splits one call's samples into operations of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

MAX_CHUNK_SAMPLES = 1024
MAX_CHUNK_BYTES = 5_000_000


def chunk(
    sizes_bytes: Sequence[int],
    *,
    max_samples: int = MAX_CHUNK_SAMPLES,
    max_bytes: int = MAX_CHUNK_BYTES,
) -> list[slice]:
    """Consecutive slices that cover samples of these sizes, each of at most so many samples and bytes.

    A sample that is larger than `max_bytes` makes a slice of its own. No samples, no slices.
    """
    slices: list[slice] = []
    start, filled = 0, 0
    for i, size in enumerate(sizes_bytes):
        if i > start and (i - start == max_samples or filled + size > max_bytes):
            slices.append(slice(start, i))
            start, filled = i, 0
        filled += size
    if sizes_bytes:
        slices.append(slice(start, len(sizes_bytes)))
    return slices
