"""What looks misaligned is reported, never shifted and never refused.

Samples whose targets are not the next tokens can be meant (borders of packed documents, targets of a
teacher), so they train as they are; the report becomes metrics of the operation, and one sentence tells where to
look. Batches are examined at once, laid end to end: a thousand aligned samples take a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from together_post_training.samples import Sample

Array = np.ndarray

# Fewer positions could fit better elsewhere by chance.
_ENOUGH = 8
# So many suspicious samples are looked at for the words of a warning.
_EXPLAINED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """metrics: "name:reduction". warning: of the first suspicion, None without any."""

    metrics: dict[str, float]
    warning: str | None


def inspect(samples: Sequence[Sample], logprobs: Sequence[Array] | None = None) -> Alignment:
    """Of checked samples, and the current policy's `logprobs` of them if given. Targets of shape (N, K) are left out.

    "alignment_shifted_targets:sum": positions i with a weight where target_tokens[i] is not
    model_input[i + 1]. 0 for samples made from whole sequences.

    "alignment_shifted_logprobs:sum", if the current policy's `logprobs` are given: samples whose
    sampling logprobs are less than half as far from them one position to the left or right as in
    place. 0 for samples of the policy itself or of one near it.
    """
    shifted = _shifted_targets(samples)
    metrics = {"alignment_shifted_targets:sum": float(sum(len(at) for at in shifted.values()))}
    warning = _explain_targets(samples, shifted) if shifted else None
    if logprobs is not None:
        fitting = _fitting_elsewhere(samples, logprobs)
        metrics["alignment_shifted_logprobs:sum"] = float(len(fitting))
        if fitting and warning is None:
            warning = _explain_logprobs(samples, logprobs, fitting)
    return Alignment(metrics=metrics, warning=warning)


def _shifted_targets(samples: Sequence[Sample]) -> dict[int, Array]:
    """By sample, the counting positions whose target is not the next token; samples without any are left out."""
    flat = [i for i, s in enumerate(samples) if s.inputs["target_tokens"].ndim == 1]
    if not flat:
        return {}
    targets = np.concatenate([samples[i].inputs["target_tokens"] for i in flat])
    tokens = np.concatenate([samples[i].tokens for i in flat])
    ends = np.cumsum([samples[i].num_tokens for i in flat])
    differs = targets[:-1] != tokens[1:]
    differs[ends[:-1] - 1] = False  # A sample's last target follows nothing that was sent.
    if not differs.any():
        return {}
    found: dict[int, Array] = {}
    for place in np.unique(np.searchsorted(ends, np.flatnonzero(differs), side="right")):
        sample = samples[flat[place]]
        start = ends[place] - sample.num_tokens
        own = differs[start : ends[place] - 1]
        at = np.flatnonzero(own & _counts(sample)[:-1])
        if at.size:
            found[flat[place]] = at
    return found


def _fitting_elsewhere(samples: Sequence[Sample], logprobs: Sequence[Array]) -> dict[int, int]:
    """Samples whose sampling logprobs fit better one position away: -1 to the left, 1 to the right."""
    chosen = [
        i
        for i, sample in enumerate(samples)
        if "logprobs" in sample.inputs and sample.num_tokens >= _ENOUGH + 2
    ]
    if not chosen:
        return {}
    current = np.concatenate([logprobs[i] for i in chosen])
    sampling = np.concatenate([samples[i].inputs["logprobs"] for i in chosen])
    counts = np.concatenate([_counts(samples[i]) for i in chosen])
    ends = np.cumsum([samples[i].num_tokens for i in chosen])
    starts = np.concatenate([[0], ends[:-1]])
    inner = np.zeros_like(counts)
    inner[1:-1] = counts[:-2] & counts[1:-1] & counts[2:]
    inner[starts] = inner[ends - 1] = False
    # Rolled values that come from another sample lie at positions that are not inner.
    right, here, left = (
        np.add.reduceat(np.where(inner, np.abs(current - np.roll(sampling, by)), 0.0), starts)
        for by in (1, 0, -1)
    )
    enough = np.add.reduceat(inner.astype(np.int64), starts) >= _ENOUGH
    fits = enough & (np.minimum(left, right) < here / 2)
    return {chosen[k]: -1 if left[k] < right[k] else 1 for k in np.flatnonzero(fits)}


def _counts(sample: Sample) -> Array:
    """Where neither a weight nor an advantage makes the position's loss zero."""
    given = [sample.inputs[key] != 0 for key in ("weights", "advantages") if key in sample.inputs]
    if not given:
        return np.ones(sample.num_tokens, bool)
    return given[0] if len(given) == 1 else given[0] & given[1]


def _explain_targets(samples: Sequence[Sample], shifted: dict[int, Array]) -> str:
    """Of the first sample that looks shifted as a whole, if there is one among the first, else of the first."""
    causes = {i: _cause(samples[i]) for i in list(shifted)[:_EXPLAINED]}
    index = next((i for i, cause in causes.items() if cause), next(iter(causes)))
    sample, at = samples[index], int(shifted[index][0])
    return (
        f"Sample {index}: target_tokens[{at}] is {sample.inputs['target_tokens'][at]}, but model_input[{at + 1}] is "
        f"{sample.tokens[at + 1]} (such positions in this sample: {len(shifted[index])} of {sample.num_tokens}; such "
        f"samples: {len(shifted)} of {len(samples)}). {causes[index] or _NO_SHIFT} {_AS_THEY_CAME}"
    )


_NO_SHIFT = (
    "This is right for targets that a teacher chose. At borders between packed documents it trains on what cannot be "
    "known: give these positions the weight 0."
)
_AS_THEY_CAME = "Nothing was shifted: the samples were used as they came."
_RULE = "for tokens t0..tn-1, model_input is t0..tn-2 and target_tokens t1..tn-1."


def _cause(sample: Sample) -> str | None:
    """What shift explains most of the counting positions."""
    tokens, targets, counts = sample.tokens, sample.inputs["target_tokens"], _counts(sample)
    if _mostly(targets == tokens, counts):
        return f"The targets look unshifted, as they equal the model input in place: {_RULE}"
    if _mostly(targets[:-2] == tokens[2:], counts[:-2]):
        return f"The targets look shifted twice, as each is the token after the next: {_RULE}"
    if _mostly(targets[1:] == tokens[:-1], counts[1:]):
        return f"The targets look shifted to the wrong side, as each is the token before: {_RULE}"
    return None


def _mostly(equal: Array, counts: Array) -> bool:
    return 2 * int(np.count_nonzero(equal & counts)) > int(np.count_nonzero(counts))


def _explain_logprobs(
    samples: Sequence[Sample], logprobs: Sequence[Array], fitting: dict[int, int]
) -> str:
    index, side = next(iter(fitting.items()))
    current, sampling = logprobs[index], samples[index].inputs["logprobs"]
    at = _first_better(current, sampling, _counts(samples[index]), side)
    where, cause = (
        ("left", "Drop the first value of the whole sequence's array, not the last")
        if side < 0
        else ("right", "Perhaps the first value was dropped twice")
    )
    return (
        f"Sample {index}: the sampling logprobs fit the current policy better one position to the {where}: at position "
        f"{at} the policy gives {current[at]:.3f}, logprobs[{at}] is {sampling[at]:.3f} and "
        f"logprobs[{at - side}] is {sampling[at - side]:.3f} (such samples: {len(fitting)} of {len(samples)}). "
        f"{cause}: logprobs[i] belongs to target_tokens[i]. {_AS_THEY_CAME}"
    )


def _first_better(current: Array, sampling: Array, counts: Array, side: int) -> int:
    """The first inner position where the neighbour's value is nearer than the own one."""
    inner = counts[:-2] & counts[1:-1] & counts[2:]
    here = np.abs(current[1:-1] - sampling[1:-1])
    beside = np.abs(current - np.roll(sampling, side))[1:-1]
    return 1 + int(np.flatnonzero(inner & (beside < here))[0])
