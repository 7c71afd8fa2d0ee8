"""What the losses of samples tell beside their value, and how it becomes the metrics of one operation.

Partial sums are kept by sample and only divided at the end, so metrics of an operation do not depend on the order of
its samples or on how a pass was cut into micro-batches. A client that cut one call into several operations merges
their means weighted by number of samples: exact where the operations have as many counted positions per sample,
close to it otherwise. Sums and maxima are always exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from together_post_training.losses.base import Array, LossValue
from together_post_training.losses.positions import Positions

# What overflows counts as the largest float32, so that metrics stay numbers.
_LARGEST = float(np.finfo(np.float32).max)
# Sum over counted positions: name of the mean.
_MEANS = (
    "ratio",
    "kl_k1",
    "kl_k3",
    "logprob_diff",
    "clip_fraction",
    "clip_high_fraction",
    "clip_low_fraction",
)
# Largest over counted positions: name of the maximum.
_MAXIMA = ("ratio", "logprob_diff")


def ratio_metrics(at: Positions, ratio: Array) -> dict[str, float]:
    """Of positions that count; `ratio` is the one that the loss used, of the token or of its sequence.

    Sums of finite numbers, also where ratios overflow.
    """
    count = at.num_counted
    if not count:
        return {}
    counts = at.counts.astype(np.float64)
    used = np.minimum(ratio, _LARGEST) * counts
    diff = np.abs(at.log_ratio)
    k1 = -float(at.log_ratio.sum())
    return {
        "count": float(count),
        "ratio": float(used.sum()),
        "ratio_squared": float(used.dot(used)),
        "ratio_max": float(used.max()),
        "logprob_diff": float(diff.sum()),
        "logprob_diff_max": float(diff.max()),
        "kl_k1": k1,
        "kl_k3": float(np.minimum(at.ratio, _LARGEST).dot(counts)) - count + k1,
    }


def clip_metrics(is_high: Array, is_low: Array) -> dict[str, float]:
    """How many positions were cut above, and how many below."""
    high, low = float(np.count_nonzero(is_high)), float(np.count_nonzero(is_low))
    return {
        "clip_fraction": high + low,
        "clip_high_fraction": high,
        "clip_low_fraction": low,
    }


def reference_metrics(kl: Array) -> dict[str, float]:
    """`kl`: k3 against the reference at the included positions."""
    return {
        "kl_ref": float(np.minimum(kl, _LARGEST).sum()),
        "kl_ref_count": float(kl.size),
    }


def summarize(values: Sequence[LossValue], num_tokens: int) -> dict[str, float]:
    """Metrics of one operation, "name:reduction", from the losses of its samples.

    Always: "loss:sum"; "tokens:sum", the positions of all samples; "tokens_trained:sum", those that the loss trains
    on, as far as weights, advantages and masks decide.

    For policy losses, over the positions whose weight and advantage are not 0, if there are any:
    "ratio:mean" and "ratio:max" of p / q (of the sequence's where the loss uses that);
    "logprob_diff:mean" and "logprob_diff:max" of |log p - log q|: how far trainer and sampler are apart, on
    samples that were drawn from these very weights;
    "kl_k1:mean" and "kl_k3:mean", estimators of KL(q || p) by tokens drawn from q (Schulman, "Approximating KL
    divergence", 2020);
    "ess:mean", the effective sample size of importance weights over their number, (sum r)^2 / (n * sum r^2): 1 if
    all ratios are equal, 1/n if one outweighs all others (Kish 1965);
    "clip_fraction:mean", "clip_high_fraction:mean" and "clip_low_fraction:mean", where the loss cuts ratios.

    "kl_ref:mean": k3 against the reference policy, over the positions whose weight is not 0.
    """
    sums = _sums(value.metrics for value in values)
    metrics = {
        "loss:sum": float(sum(v.loss for v in values)),
        "tokens:sum": float(num_tokens),
        "tokens_trained:sum": float(sum(v.num_trained for v in values)),
    }
    if count := sums.get("count", 0.0):
        metrics |= {f"{name}:mean": sums[name] / count for name in _MEANS if name in sums}
        metrics |= {
            f"{name}:max": max(v.metrics.get(f"{name}_max", 0.0) for v in values)
            for name in _MAXIMA
        }
        metrics["ess:mean"] = _effective_share(sums["ratio"], sums["ratio_squared"], count)
    if included := sums.get("kl_ref_count", 0.0):
        metrics["kl_ref:mean"] = sums["kl_ref"] / included
    return metrics


def _sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def _effective_share(total: float, total_squared: float, count: float) -> float:
    """1 if all ratios are 0: they are equal."""
    return total**2 / (count * total_squared) if total_squared else 1.0
