"""Before a loss is evaluated sample by sample: what its inputs and parameters must be to each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.losses.aggregation import AGG_TYPE, denominator
from together_post_training.losses.base import Array, Inputs, Number, Params, number
from together_post_training.losses.clipping import BOUND_INPUTS, bounds
from together_post_training.losses.params import choose, range_of
from together_post_training.losses.table import CONTRACTS, contract


def prepare(
    name: str, params: Params, batch: Sequence[Inputs], *, max_seq_length: int | None = None
) -> Params:
    """Complete parameters with what the loss needs to know of the batch; the inputs of all samples of a pass.

    Prepared parameters may be prepared again, which changes nothing.

    Args:
        max_seq_length: the trainer's, for a horizon that is not given.

    Raises:
        PostTrainingError: INVALID_ARGUMENT or MISSING_INPUT, naming sample, position and value.
    """
    for sample, inputs in enumerate(batch):
        _check_bounds(name, inputs, params, sample)
        _check_sequence_mask(name, inputs, sample)
        _check_reference(name, inputs, params, sample)
    if "agg_type" not in params:
        return params
    return {
        **params,
        "denominator": _denominator(name, params, batch),
        "horizon": _horizon(name, params, max_seq_length),
    }


def for_whole_call(
    name: str, given: Mapping[str, float | str], batch: Iterable[Inputs]
) -> dict[str, float | str]:
    """The parameters that each operation of a call gets which is sent as several.

    A loss that divides by something of the whole call gets its `denominator`, so that the cut changes nothing.
    `batch` has the inputs of all samples of the call; `target_tokens` and `weights` are read, if the loss divides.
    What cannot be understood is returned as it is, for the server to refuse.
    """
    known = CONTRACTS[name].params if name in CONTRACTS else {}
    agg_type = choose(AGG_TYPE, given.get("agg_type", AGG_TYPE.default))
    if "denominator" not in known or given.get("denominator") or agg_type is None:
        return dict(given)
    return {**given, "denominator": denominator(agg_type, list(batch))}


def _denominator(name: str, params: Params, batch: Sequence[Inputs]) -> float:
    own = denominator(str(params["agg_type"]), batch)
    given = number(params, "denominator")
    if given and given < own:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"Parameter 'denominator' of loss {name!r} is {given:g}, but this operation alone has {own:g}: it must "
            "be that of the whole call. Leave it out for calls that are sent as one operation.",
            loss=name,
            parameter="denominator",
            value=given,
        )
    return given or own


def _horizon(name: str, params: Params, max_seq_length: int | None) -> float:
    given = number(params, "horizon")
    if given or params["agg_type"] != "FIXED_HORIZON":
        return given
    if max_seq_length is None:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"Parameter 'horizon' of loss {name!r} is 0: FIXED_HORIZON needs a number of tokens above 0.",
            loss=name,
            parameter="horizon",
        )
    return float(max_seq_length)


def _check_bounds(name: str, inputs: Inputs, params: Params, sample: int) -> None:
    """What one position gives may be out of range, or not fit what the call gives."""
    given = [key for key in BOUND_INPUTS if key in inputs]
    if not given:
        return
    for key in given:
        spec = contract(name).params[key]
        assert isinstance(spec, Number)
        outside = (inputs[key] < spec.low) | (inputs[key] > spec.high)
        if outside.any():
            at = int(np.flatnonzero(outside)[0])
            raise _wrong_bound(
                sample,
                at,
                f"loss {name!r} needs {key} {range_of(spec)}, got {inputs[key][at]:g}",
            )
    low, high = (np.broadcast_to(b, inputs[given[0]].shape) for b in bounds(inputs, params))
    if (low > high).any():
        at = int(np.flatnonzero(low > high)[0])
        raise _wrong_bound(
            sample, at, f"clip_low_threshold {low[at]:g} is above clip_high_threshold {high[at]:g}"
        )


def _wrong_bound(sample: int, at: int, fault: str) -> PostTrainingError:
    return fail(
        Reason.INVALID_ARGUMENT,
        f"Sample {sample}: at position {at} {fault}. Both are bounds of the ratio itself (0.8 and 1.2, say), not "
        "offsets from 1.",
        sample=sample,
        position=at,
    )


def _check_sequence_mask(name: str, inputs: Inputs, sample: int) -> None:
    mask = inputs.get("sequence_ratio_mask")
    if mask is None or mask.any() or not _trains(inputs).any():
        return
    raise fail(
        Reason.INVALID_ARGUMENT,
        f"Sample {sample}: sequence_ratio_mask is 0 everywhere, so loss {name!r} has no sequence to take a ratio of, "
        "but positions have weights and advantages. Set it to 1 at the sequence's own tokens.",
        sample=sample,
        key="sequence_ratio_mask",
    )


def _trains(inputs: Inputs) -> Array:
    weights = inputs.get("weights")
    return (inputs["advantages"] != 0) & (True if weights is None else weights != 0)


def _check_reference(name: str, inputs: Inputs, params: Params, sample: int) -> None:
    if "reference_logprobs" in inputs or "reference_logprobs" not in contract(name).optional:
        return
    if number(params, "beta"):
        raise fail(
            Reason.MISSING_INPUT,
            f"Sample {sample} lacks 'reference_logprobs': loss {name!r} needs them when beta is not 0 (it is "
            f"{number(params, 'beta'):g}).",
            sample=sample,
            key="reference_logprobs",
            loss=name,
        )
