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
    num_shifted_targets = num_shifted_logprobs = 0
    for i, sample in enumerate(samples):
        if sample.inputs["target_tokens"].ndim != 1:
            continue
        counts = _counts(sample)
        num_shifted_targets += _num_shifted(sample, counts)
        if logprobs is not None:
            num_shifted_logprobs += _fits_better_elsewhere(sample, counts, logprobs[i])
    report = {"alignment_shifted_targets:sum": float(num_shifted_targets)}
    if logprobs is not None:
        report["alignment_shifted_logprobs:sum"] = float(num_shifted_logprobs)
    return report


def _num_shifted(sample: Sample, counts: Array) -> int:
    is_shifted = sample.inputs["target_tokens"][:-1] != sample.tokens[1:]
    return int(np.count_nonzero(is_shifted & counts[:-1]))


def _fits_better_elsewhere(sample: Sample, counts: Array, current: Array) -> bool:
    sampling = sample.inputs.get("logprobs")
    if sampling is None:
        return False
    inner = counts[:-2] & counts[1:-1] & counts[2:]
    if np.count_nonzero(inner) < _ENOUGH:
        return False
    left, here, right = (
        float(np.abs(current[1:-1] - moved).sum(where=inner))
        for moved in (sampling[:-2], sampling[1:-1], sampling[2:])
    )
    return min(left, right) < here / 2


def _counts(sample: Sample) -> Array:
    """Where neither a weight nor an advantage makes the position's loss zero."""
    given = [sample.inputs[key] != 0 for key in ("weights", "advantages") if key in sample.inputs]
    return np.logical_and.reduce(given) if given else np.ones(sample.num_tokens, bool)
