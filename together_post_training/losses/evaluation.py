"""A loss by name, refused where it is not finite."""

from __future__ import annotations

import numpy as np

from together_post_training.errors import Reason, fail
from together_post_training.losses.base import Array, Inputs, LossValue, Params
from together_post_training.losses.table import contract

_LARGEST = float(np.finfo(np.float32).max)


def evaluate(name: str, lp: Array, inputs: Inputs, params: Params, *, sample: int) -> LossValue:
    """The loss of the batch's sample number `sample`; `params` are prepared.

    Raises:
        PostTrainingError: NON_FINITE_LOSS if the loss or its derivative is NaN or outside float32's range, in which
            engines train.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        value = contract(name).fn(lp, inputs, params)
        steepest = float(np.abs(value.gradient).max())
    if abs(value.loss) <= _LARGEST and steepest <= _LARGEST:
        return value
    raise fail(
        Reason.NON_FINITE_LOSS,
        f"Sample {sample}: loss {name!r} is {value.loss:g} and its largest derivative by a log-probability "
        f"{steepest:g}; both must be finite in float32. Check advantages, weights and sampling logprobs "
        "(a ratio overflows where the sampling logprob is far below the current one).",
        sample=sample,
        loss=name,
    )
