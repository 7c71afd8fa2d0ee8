"""The parameters of a loss: checked, with defaults filled in."""

from __future__ import annotations

import math
from collections.abc import Mapping

from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.losses.base import Choice, Number
from together_post_training.losses.table import contract


def complete_params(name: str, given: Mapping[str, float | str]) -> dict[str, float | str]:
    """The loss's parameters with defaults filled in, choices by their short names.

    Raises:
        PostTrainingError: UNKNOWN_PARAMETER, NOT_FINITE or INVALID_ARGUMENT, with the value.
    """
    known = contract(name).params
    params = {key: spec.default for key, spec in known.items()}
    for key, value in given.items():
        if key not in known:
            raise fail(
                Reason.UNKNOWN_PARAMETER,
                f"Unknown parameter {key!r} for loss {name!r}: known are {', '.join(sorted(known)) or 'none'}.",
                loss=name,
                parameter=key,
            )
        spec = known[key]
        check = _chosen if isinstance(spec, Choice) else _checked_number
        params[key] = check(name, key, value, spec)  # pyright: ignore[reportArgumentType]
    _check_clip_order(name, params)
    return params


def choose(spec: Choice, value: float | str) -> str | None:
    """The accepted name that `value` stands for, in any case and with or without the prefix; None if none."""
    short = str(value).upper().removeprefix(spec.prefix)
    if short == "UNSPECIFIED":
        return spec.default
    return short if short in spec.accepted else None


def range_of(spec: Number) -> str:
    """In words."""
    if math.isinf(spec.low) and math.isinf(spec.high):
        return "a finite number"
    if math.isinf(spec.high):
        return f"at least {spec.low:g}"
    return f"at most {spec.high:g}" if math.isinf(spec.low) else f"{spec.low:g} to {spec.high:g}"


def _chosen(name: str, key: str, value: float | str, spec: Choice) -> str:
    chosen = choose(spec, value)
    if chosen is None:
        raise _refused(name, key, value, f"one of {', '.join(spec.accepted)}")
    return chosen


def _checked_number(name: str, key: str, value: float | str, spec: Number) -> float:
    if isinstance(value, str):
        raise _refused(name, key, value, "a number")
    if not math.isfinite(value):
        raise _refused(name, key, value, "a finite number", Reason.NOT_FINITE)
    if not spec.low <= value <= spec.high:
        raise _refused(name, key, value, range_of(spec))
    return float(value)


def _refused(
    name: str,
    key: str,
    value: float | str,
    accepted: str,
    reason: Reason = Reason.INVALID_ARGUMENT,
) -> PostTrainingError:
    hint = ""
    if key.startswith("clip_"):
        hint = " It is a bound of the ratio itself (0.8 or 1.2, say), not an offset from 1."
    return fail(
        reason,
        f"Parameter {key!r} of loss {name!r} is {value!r}: it must be {accepted}.{hint}",
        loss=name,
        parameter=key,
        value=value,
    )


def _check_clip_order(name: str, params: Mapping[str, float | str]) -> None:
    low, high = params.get("clip_low_threshold"), params.get("clip_high_threshold")
    if isinstance(low, float) and isinstance(high, float) and low > high:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"Loss {name!r}: clip_low_threshold {low} is above clip_high_threshold {high}. Both are bounds of the "
            "ratio itself (0.8 and 1.2, say), not offsets from 1.",
            loss=name,
        )
