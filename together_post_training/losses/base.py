"""What a loss is: a pure function, and the contract that says what the function takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

Array = np.ndarray
# Of one sample, by name, each of shape (N,) or (N, K).
Inputs = Mapping[str, Array]
# Numbers and, for parameters that are a choice, one of their names.
Params = Mapping[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossValue:
    """Of one sample: the loss, its derivative by each target log-probability (float64, lp's shape), metrics.

    num_trained: positions that the loss trains on, as far as weights, advantages and masks decide.
    metrics: partial sums, named without reduction; `summarize` turns those of a batch into metrics.
    """

    loss: float
    gradient: Array
    num_trained: int
    metrics: Mapping[str, float] = field(default_factory=dict)


LossFn = Callable[[Array, Inputs, Params], LossValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A parameter that is a number of a closed range."""

    default: float
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A parameter that is one of some names; `prefix` may stand before them, as in the names of an enum."""

    default: str
    accepted: tuple[str, ...]
    prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LossContract:
    """What a loss takes.

    inputs: required of the caller; `optional` may be given.
    provided: required too, but added by the server, from its record of the sequences that it sampled; what a caller
        brings of them must be the same.
    params: by name. An input of the same name holds the value of each position instead.
    takes_2d: targets may be (N, K), each position scored on K tokens.
    linear: the derivative does not depend on the log-probabilities.
    notice: what users of the loss must know; a session that uses it is warned with this text, once.
    """

    fn: LossFn
    inputs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    provided: tuple[str, ...] = ()
    params: Mapping[str, Number | Choice] = field(default_factory=dict)
    takes_2d: bool = False
    linear: bool = False
    notice: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", MappingProxyType(dict(self.params)))


def number(params: Params, name: str) -> float:
    """A parameter of checked ones that is a number."""
    return float(params[name])
