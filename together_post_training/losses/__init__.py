"""Losses as pure functions of target log-probabilities.

A loss reads, for one sample, the log-probabilities lp of its targets and its other inputs, and gives the loss,
the derivative d loss / d lp and metrics, all in float64. Every engine trains through this one derivative, and
custom objectives enter at the same point with a derivative of their own.

Notation: p the current policy, q the sampling policy (`logprobs` input), r = p/q, A advantages, w weights
(default 1). All losses are sums over positions, with no normalisation by tokens, sequences or batch.

Terms whose weight or advantage makes them zero contribute exactly zero, even where the ratio overflows: they are
left out, not multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from together_post_training.errors import Reason, fail

Array = np.ndarray

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossValue:
    """Of one sample: the loss, its derivative by each target log-probability (float64, lp's shape), metrics.

    `metrics` are partial sums, named without reduction; `summarize` turns those of a batch into metrics.
    """

    loss: float
    gradient: Array
    metrics: Mapping[str, float] = field(default_factory=dict)


LossFn = Callable[[Array, Mapping[str, Array], Mapping[str, float]], LossValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossContract:
    """What a loss takes. `inputs` are required, `optional` may be given; `params` holds the defaults."""

    fn: LossFn
    inputs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    params: Mapping[str, float] = field(default_factory=dict)
    # Targets may be (N, K), each position scored on K tokens.
    takes_2d: bool = False
    # The derivative does not depend on the log-probabilities.
    linear: bool = False


def cross_entropy(lp: Array, inputs: Mapping[str, Array], params: Mapping[str, float]) -> LossValue:
    """-sum w * lp; w may be fractional or negative. lp and w have shape (N,) or (N, K).

    Source: Tinker's loss reference ("cross_entropy"), also for (N, K).
    """
    weights = _weights(lp, inputs)
    counts = weights != 0
    loss = -float(np.sum(weights[counts] * lp[counts], dtype=np.float64))
    return LossValue(loss=loss, gradient=-weights)


def importance_sampling(
    lp: Array, inputs: Mapping[str, Array], params: Mapping[str, float]
) -> LossValue:
    """-sum w * r * A, differentiated through r: the derivative is -w * r * A.

    Source: Tinker's loss reference ("importance_sampling").
    """
    scale, counts = _scaled_advantages(lp, inputs)
    ratio = _ratio(lp, inputs, counts)
    terms = np.zeros_like(scale)
    terms[counts] = -ratio[counts] * scale[counts]
    return LossValue(
        loss=float(terms.sum()), gradient=terms, metrics=_ratio_metrics(lp, inputs, ratio)
    )


def ppo(lp: Array, inputs: Mapping[str, Array], params: Mapping[str, float]) -> LossValue:
    """-sum w * min(r * A, clip(r, low, high) * A); low and high are bounds of r itself, not offsets from 1.

    Where the clipped term is the smaller one the derivative is 0. Source: Schulman et al. 2017,
    arXiv:1707.06347, equation 7, with Tinker's bounds.
    """
    scale, counts = _scaled_advantages(lp, inputs)
    low, high = _bounds(lp, inputs, params)
    ratio = _ratio(lp, inputs, counts)
    clipped = np.clip(ratio, low, high)
    advantages = np.asarray(inputs["advantages"], np.float64)
    is_clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    used = np.where(is_clipped, clipped, ratio)
    terms = np.zeros_like(scale)
    terms[counts] = -used[counts] * scale[counts]
    gradient = np.where(is_clipped, 0.0, terms)
    metrics = _ratio_metrics(lp, inputs, ratio) | _clip_metrics(is_clipped & counts)
    return LossValue(loss=float(terms.sum()), gradient=gradient, metrics=metrics)


def cispo(lp: Array, inputs: Mapping[str, Array], params: Mapping[str, float]) -> LossValue:
    """-sum w * stopgrad(clip(r, low, high)) * lp * A: every token keeps a gradient.

    Source: MiniMax-M1, arXiv:2506.13585, equation 4, with Tinker's bounds.
    """
    scale, counts = _scaled_advantages(lp, inputs)
    low, high = _bounds(lp, inputs, params)
    ratio = _ratio(lp, inputs, counts)
    clipped = np.clip(ratio, low, high)
    gradient = np.zeros_like(scale)
    gradient[counts] = -clipped[counts] * scale[counts]
    loss = float(np.sum(gradient[counts] * lp[counts], dtype=np.float64))
    metrics = _ratio_metrics(lp, inputs, ratio) | _clip_metrics((clipped != ratio) & counts)
    return LossValue(loss=loss, gradient=gradient, metrics=metrics)


def dro(lp: Array, inputs: Mapping[str, Array], params: Mapping[str, float]) -> LossValue:
    """-sum w * (lp * A - beta / 2 * (lp - log q)^2); the penalty stays where A is 0.

    Source: Direct Reward Optimisation, arXiv:2405.19107, as in Tinker's loss reference.
    """
    weights = _weights(lp, inputs)
    counts = weights != 0
    advantages = np.asarray(inputs["advantages"], np.float64)
    drift = lp.astype(np.float64) - inputs["logprobs"]
    beta = params["beta"]
    terms, gradient = np.zeros_like(weights), np.zeros_like(weights)
    value = -(lp * advantages - 0.5 * beta * drift**2)
    slope = -(advantages - beta * drift)
    terms[counts] = weights[counts] * value[counts]
    gradient[counts] = weights[counts] * slope[counts]
    ratio = _ratio(lp, inputs, counts)
    return LossValue(
        loss=float(terms.sum()), gradient=gradient, metrics=_ratio_metrics(lp, inputs, ratio)
    )


def evaluate(
    name: str,
    lp: Array,
    inputs: Mapping[str, Array],
    params: Mapping[str, float],
    *,
    sample: int,
) -> LossValue:
    """The loss of the batch's sample number `sample`; `params` are complete.

    Raises:
        PostTrainingError: NON_FINITE_LOSS if the loss or its derivative is NaN or outside float32's range, in which
            engines train; INVALID_ARGUMENT if a position's clip bounds are in the wrong order.
    """
    _check_bounds(lp, inputs, params, sample)
    with np.errstate(over="ignore", invalid="ignore"):
        value = contract(name).fn(lp, inputs, params)
    worst = np.array([value.loss, *value.gradient.flat])
    if np.all(np.abs(worst) <= _LARGEST):
        return value
    raise fail(
        Reason.NON_FINITE_LOSS,
        f"Sample {sample}: loss {name!r} is {value.loss:g} and its largest derivative by a log-probability "
        f"{np.abs(worst[1:]).max():g}; both must be finite in float32. Check advantages, weights and sampling logprobs "
        "(a ratio overflows where the sampling logprob is far below the current one).",
        sample=sample,
        loss=name,
    )


def summarize(values: list[LossValue], num_tokens: int) -> dict[str, float]:
    """Metrics of one operation, "name:reduction", from the losses of its samples.

    "loss:sum" and "tokens:sum" always; for policy losses the mean and largest ratio p/q, the estimators k1 and k3
    of KL(q || p) (Schulman, "Approximating KL divergence", 2020) and the clipped fraction, over the positions with
    a non-zero weight and advantage.
    """
    metrics = {"loss:sum": float(sum(v.loss for v in values)), "tokens:sum": float(num_tokens)}
    count = sum(v.metrics.get("count", 0.0) for v in values)
    if not count:
        return metrics
    for name in ("ratio", "kl_k1", "kl_k3", "clip_fraction"):
        if any(name in v.metrics for v in values):
            metrics[f"{name}:mean"] = sum(v.metrics.get(name, 0.0) for v in values) / count
    metrics["ratio:max"] = max(v.metrics.get("ratio_max", 0.0) for v in values)
    return metrics


def _weights(lp: Array, inputs: Mapping[str, Array]) -> Array:
    given = inputs.get("weights")
    return np.ones(lp.shape) if given is None else np.asarray(given, np.float64)


def _scaled_advantages(lp: Array, inputs: Mapping[str, Array]) -> tuple[Array, Array]:
    """(w * A, where it is not 0)."""
    scale = _weights(lp, inputs) * np.asarray(inputs["advantages"], np.float64)
    return scale, scale != 0


def _ratio(lp: Array, inputs: Mapping[str, Array], counts: Array) -> Array:
    """p/q where it counts, 1 elsewhere; inf where it overflows."""
    ratio = np.ones(lp.shape)
    log_ratio = lp.astype(np.float64) - inputs["logprobs"]
    with np.errstate(over="ignore"):
        ratio[counts] = np.exp(log_ratio[counts])
    return ratio


def _bounds(
    lp: Array, inputs: Mapping[str, Array], params: Mapping[str, float]
) -> tuple[Array, Array]:
    """The clip bounds of each position: its own where given, else the call's."""
    low = inputs.get("clip_low_threshold", params["clip_low_threshold"])
    high = inputs.get("clip_high_threshold", params["clip_high_threshold"])
    return np.broadcast_to(low, lp.shape), np.broadcast_to(high, lp.shape)


def _check_bounds(
    lp: Array, inputs: Mapping[str, Array], params: Mapping[str, float], sample: int
) -> None:
    """What one position gives may not fit what the call gives."""
    if "clip_low_threshold" not in params:
        return
    low, high = _bounds(lp, inputs, params)
    wrong = np.flatnonzero(low > high)
    if wrong.size:
        at = int(wrong[0])
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"Sample {sample}: at position {at} clip_low_threshold {low[at]:g} is above clip_high_threshold "
            f"{high[at]:g}. Both are bounds of the ratio itself (0.8 and 1.2, say), not offsets from 1.",
            sample=sample,
            position=at,
        )


def _ratio_metrics(lp: Array, inputs: Mapping[str, Array], ratio: Array) -> dict[str, float]:
    counts = _scaled_advantages(lp, inputs)[1]
    log_ratio = (lp.astype(np.float64) - inputs["logprobs"])[counts]
    used = ratio[counts]
    if not used.size or not np.isfinite(used).all():
        return {}
    return {
        "count": float(used.size),
        "ratio": float(used.sum()),
        "ratio_max": float(used.max()),
        "kl_k1": float(-log_ratio.sum()),
        "kl_k3": float((used - 1 - log_ratio).sum()),
    }


def _clip_metrics(clipped: Array) -> dict[str, float]:
    return {"clip_fraction": float(clipped.sum())}


_POLICY = ("target_tokens", "logprobs", "advantages")
_PER_TOKEN_CLIP = ("weights", "clip_low_threshold", "clip_high_threshold")

CONTRACTS: Mapping[str, LossContract] = MappingProxyType(
    {
        "cross_entropy": LossContract(
            fn=cross_entropy,
            inputs=("target_tokens",),
            optional=("weights",),
            takes_2d=True,
            linear=True,
        ),
        "importance_sampling": LossContract(
            fn=importance_sampling, inputs=_POLICY, optional=("weights",)
        ),
        "ppo": LossContract(
            fn=ppo,
            inputs=_POLICY,
            optional=_PER_TOKEN_CLIP,
            params=MappingProxyType({"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        ),
        "cispo": LossContract(
            fn=cispo,
            inputs=_POLICY,
            optional=_PER_TOKEN_CLIP,
            params=MappingProxyType({"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
        ),
        "dro": LossContract(
            fn=dro,
            inputs=_POLICY,
            optional=("weights",),
            params=MappingProxyType({"beta": 0.05}),
        ),
    }
)


def contract(name: str) -> LossContract:
    """Raises UNKNOWN_LOSS with the list of known ones."""
    if name in CONTRACTS:
        return CONTRACTS[name]
    known = ", ".join(sorted(CONTRACTS))
    raise fail(Reason.UNKNOWN_LOSS, f"Unknown loss {name!r}: this server knows {known}.", loss=name)


def complete_params(name: str, given: Mapping[str, float]) -> dict[str, float]:
    """The loss's parameters with defaults filled in.

    Raises:
        PostTrainingError: UNKNOWN_PARAMETER or NOT_FINITE, with the value.
    """
    defaults = contract(name).params
    for key, value in given.items():
        if key not in defaults:
            known = ", ".join(sorted(defaults)) or "none"
            raise fail(
                Reason.UNKNOWN_PARAMETER,
                f"Unknown parameter {key!r} for loss {name!r}: known are {known}.",
                loss=name,
                parameter=key,
            )
        if not np.isfinite(value):
            raise fail(
                Reason.NOT_FINITE,
                f"Parameter {key!r} of loss {name!r} is {value}: it must be a finite number.",
                loss=name,
                parameter=key,
                value=value,
            )
    params = {**defaults, **given}
    _check_clip_order(name, params)
    return params


def _check_clip_order(name: str, params: Mapping[str, float]) -> None:
    low, high = params.get("clip_low_threshold"), params.get("clip_high_threshold")
    if low is not None and high is not None and low > high:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"Loss {name!r}: clip_low_threshold {low} is above clip_high_threshold {high}. Both are bounds of the "
            "ratio itself (0.8 and 1.2, say), not offsets from 1.",
            loss=name,
        )
