"""What the GRPO example makes of a group's rewards."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "grpo.py"


@pytest.fixture(scope="module")
def grpo():
    spec = importlib.util.spec_from_file_location("grpo_example", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1.0], [0.0]), ([1.0] * 4, [0.0] * 4), ([1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25])],
)
def test_group_advantages_are_centred_and_not_scaled(grpo, rewards, expected):
    assert grpo.group_advantages(rewards) == expected


def test_group_advantages_refuse_what_is_not_finite(grpo):
    with pytest.raises(ValueError, match="nan"):
        grpo.group_advantages([1.0, math.nan])
