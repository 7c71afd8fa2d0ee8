"""Clip bounds that look like offsets from 1, as other libraries take them, are told of."""

from __future__ import annotations

from together_post_training.losses.base import Params, number


def offsets_notice(name: str, params: Params) -> str | None:
    """One sentence if a ratio of 1, that of the policy itself, lies outside the bounds, None otherwise.

    `params` are complete.
    """
    if "clip_low_threshold" not in params:
        return None
    low, high = (number(params, f"clip_{side}_threshold") for side in ("low", "high"))
    if low <= 1 <= high:
        return None
    return (
        f"Loss {name!r} clips ratios to {low:g} .. {high:g}, so even those of an unchanged policy, which are 1. Both "
        "thresholds are bounds of the ratio itself (0.8 and 1.2, say), not offsets from 1 (0.2 and 0.2)."
    )
