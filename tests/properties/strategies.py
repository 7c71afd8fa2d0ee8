"""Generated values that several properties use."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

VOCAB = 50


def tokens(min_size: int = 1, max_size: int = 12) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, VOCAB - 1), min_size=min_size, max_size=max_size)


def floats32(shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    """Any finite float32."""
    return hnp.arrays(
        np.float32, shape, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
    )
