"""What looks misaligned is reported, never shifted and never refused.

Samples whose targets are not the next tokens can be meant (borders of packed documents, targets of a
teacher), so they train as they are; the report becomes metrics of the operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from together_post_training.samples import Sample

Array = np.ndarray

# Fewer positions could fit better elsewhere by chance.
_ENOUGH = 8


def alignment_report(
    samples: Sequence[Sample], logprobs: Sequence[Array] | None = None
) -> dict[str, float]:
    """Metrics, "name:reduction", of checked samples. Targets of shape (N, K) are left out.

    "alignment_shifted_targets:sum": positions i with a weight where target_tokens[i] is not
    model_input[i + 1]. 0 for samples made from whole sequences.

    "alignment_shifted_logprobs:sum", if the current policy's `logprobs` are given: samples whose
    sampling logprobs are less than half as far from them one position to the left or right as in
    place. 0 for samples of the policy itself or of one near it.
    """
    flat = [i for i, s in enumerate(samples) if s.inputs["target_tokens"].ndim == 1]
    report = {
        "alignment_shifted_targets:sum": float(sum(_num_shifted(samples[i]) for i in flat)),
    }
    if logprobs is not None:
        shifted = (_fits_better_elsewhere(samples[i], logprobs[i]) for i in flat)
        report["alignment_shifted_logprobs:sum"] = float(sum(shifted))
    return report


def _num_shifted(sample: Sample) -> int:
    is_shifted = sample.inputs["target_tokens"][:-1] != sample.tokens[1:]
    return int(np.sum(is_shifted & _counts(sample)[:-1]))


def _fits_better_elsewhere(sample: Sample, current: Array) -> bool:
    sampling = sample.inputs.get("logprobs")
    if sampling is None:
        return False
    counts = _counts(sample)
    inner = counts[:-2] & counts[1:-1] & counts[2:]
    if inner.sum() < _ENOUGH:
        return False
    left, here, right = (
        float(np.mean(np.abs(current[1:-1] - moved)[inner]))
        for moved in (sampling[:-2], sampling[1:-1], sampling[2:])
    )
    return min(left, right) < here / 2


def _counts(sample: Sample) -> Array:
    """Where neither a weight nor an advantage makes the position's loss zero."""
    counts = np.ones(sample.num_tokens, bool)
    for key in ("weights", "advantages"):
        if key in sample.inputs:
            counts &= sample.inputs[key] != 0
    return counts
