"""How the metrics of a call's chunks become one call's: the reduction is the name's suffix ("loss:sum")."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float]
# Of one metric: its value in each chunk and the number of samples in each.
Reduction = Callable[[Sequence[float], Sequence[int]], float]


def _mean(values: Sequence[float], num_samples: Sequence[int]) -> float:
    """Weighted by samples; ZeroDivisionError without any."""
    weighted = sum(v * n for v, n in zip(values, num_samples, strict=True))
    return weighted / sum(num_samples)


def _hash2(values: Sequence[float], _: Sequence[int]) -> float:
    return sum(int(v) for v in values) % 2**64


_REDUCTIONS: dict[str, Reduction] = {
    "sum": lambda values, _: float(sum(values)),
    "mean": _mean,
    "min": lambda values, _: min(values),
    "max": lambda values, _: max(values),
    "slack": lambda values, n: max(values) - _mean(values, n),
    "hash2": _hash2,
}


def merge(chunks: Sequence[Metrics], num_samples: Sequence[int]) -> dict[str, float]:
    """Metrics of the whole call, by name, from those of its chunks (one is enough).

    A metric that some chunks lack is that of the others: a chunk without advantages has no ratios, and those of the
    call are its other chunks'. "unique" ones are kept one by one, as name:unique, name:unique_1, ...; those with an
    unknown reduction are left out.

    Raises:
        ValueError: for a name that does not have exactly one colon.
    """
    merged: dict[str, float] = {}
    for key in sorted({key for chunk in chunks for key in chunk}):
        _, reduction = key.split(":")
        values = [chunk[key] for chunk in chunks if key in chunk]
        counts = [n for chunk, n in zip(chunks, num_samples, strict=True) if key in chunk]
        if reduction == "unique":
            merged[key] = values[0]
            merged.update({f"{key}_{i}": v for i, v in enumerate(values[1:], start=1)})
        elif reduction in _REDUCTIONS:
            merged[key] = _REDUCTIONS[reduction](values, counts)
        else:
            logger.debug("metric %s has an unknown reduction and is left out", key)
    return merged
