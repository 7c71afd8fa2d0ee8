"""Losses written a second time, in float64 torch, with autograd for the derivatives."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

# exp(700) is far outside float32 and its square root far inside float64: what is clipped is the same as
# for an infinite ratio, what is not clipped is just as unusable, and autograd meets no 0 * inf.
_LARGEST_LOG_RATIO = 700.0

Tensor = torch.Tensor
Given = Mapping[str, Tensor]
Params = Mapping[str, float | str]


def terms(name: str, lp: Tensor, inputs: Mapping[str, np.ndarray], params: Params) -> Tensor:
    """Numbers whose sum is the loss, from float64 logprobs that may require a gradient."""
    return torch.cat([part.reshape(-1) for part in parts(name, lp, inputs, params)])


def parts(name: str, lp: Tensor, inputs: Mapping[str, np.ndarray], params: Params) -> list[Tensor]:
    """The objective and, for losses that have one, the penalty, at the positions that count for each."""
    given = {key: torch.tensor(np.asarray(a, np.float64)) for key, a in inputs.items()}
    given.setdefault("weights", torch.ones_like(lp))
    if name == "cross_entropy":
        return [-(given["weights"] * lp)]
    if name == "dro":
        penalty = float(params["beta"]) / 2 * (lp - given["logprobs"]) ** 2
        return [-(given["weights"] * (lp * given["advantages"] - penalty))]
    if name == "stable_reinforce":
        return _stable_reinforce(lp, given, params)
    if name == "grpo":
        return _grpo(lp, given, params)
    return [_policy(name, lp, given, params)]


def _policy(name: str, lp: Tensor, given: Given, params: Params) -> Tensor:
    counts = given["weights"] * given["advantages"] != 0
    w, a, q = (given[key][counts] for key in ("weights", "advantages", "logprobs"))
    ratio = _exp(lp[counts] - q)
    if name == "importance_sampling":
        return -(w * ratio * a)
    if name == "dppo":
        moved = lp[counts].detach().exp() - q.exp()
        is_masked = ((a > 0) & (moved > float(params["delta_high"]))) | (
            (a < 0) & (-moved > float(params["delta_low"]))
        )
        return -(w * ratio * a)[~is_masked]
    if name == "gspo":
        mask = given.get("sequence_ratio_mask", torch.ones_like(lp))
        ratio = _sequence_ratio(lp, given, mask != 0)[counts]
    low, high = (_bound(key, lp, given, params)[counts] for key in ("low", "high"))
    clipped = torch.clamp(ratio, low, high)
    if name == "cispo":
        return -(w * clipped.detach() * lp[counts] * a)
    assert name in ("ppo", "gspo")
    return -(w * torch.minimum(ratio * a, clipped * a))


def _grpo(lp: Tensor, given: Given, params: Params) -> list[Tensor]:
    included = given["weights"] != 0
    if params["ratio_type"] == "TOKEN":
        objective = _policy("ppo", lp, given, params)
    else:
        masked = {**given, "sequence_ratio_mask": included.to(lp)}
        objective = _policy("gspo", lp, masked, params)
    found = [objective]
    if params["beta"]:
        d = (given["reference_logprobs"] - lp)[included].clamp(max=_LARGEST_LOG_RATIO)
        found.append(given["weights"][included] * float(params["beta"]) * (torch.expm1(d) - d))
    share = 1 / float(params["denominator"] or 1)
    if params["agg_type"] == "SEQUENCE_MEAN":
        share /= max(int(included.sum()), 1)
    if params["agg_type"] == "FIXED_HORIZON":
        share /= float(params["horizon"])
    return [share * part for part in found]


def _stable_reinforce(lp: Tensor, given: Given, params: Params) -> list[Tensor]:
    weights = torch.where(given["sampled"] != 0, given["weights"], 0.0)
    included = weights != 0
    w, a = weights[included], given["advantages"][included]
    drift = (lp - given["logprobs"])[included]
    truncated = _exp(drift.detach()).clamp(max=2.0)
    return [-(w * truncated * a * lp[included]), float(params["kl_coeff"]) * w * drift**2 / 2]


def _sequence_ratio(lp: Tensor, given: Given, mask: Tensor) -> Tensor:
    """(N,), each value differentiable by its own lp only.

    numpy's mean, as rounding decides on which side of a bound a ratio lies that is equal to it.
    """
    drift = (lp.detach() - given["logprobs"])[mask].numpy()
    mean = torch.tensor(drift.mean() if drift.size else 0.0)
    return _exp(mean) * torch.exp(lp - lp.detach())


def _bound(which: str, lp: Tensor, given: Given, params: Params) -> Tensor:
    key = f"clip_{which}_threshold"
    return given.get(key, torch.tensor(float(params[key]), dtype=torch.float64)).expand(lp.shape)


def _exp(x: Tensor) -> Tensor:
    return x.clamp(max=_LARGEST_LOG_RATIO).exp()


def value_and_gradient(
    name: str, lp: np.ndarray, inputs: Mapping[str, np.ndarray], params: Params
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(numbers whose sum is the loss, d loss / d lp, the sum of the sizes of what that is summed from), float64."""
    logprobs = torch.tensor(np.asarray(lp, np.float64), requires_grad=True)
    found = parts(name, logprobs, inputs, params)
    gradients = [np.zeros(lp.shape)]
    for part in found:
        (gradient,) = torch.autograd.grad(part.sum(), logprobs)
        gradients.append(gradient.numpy())
    values = torch.cat([part.detach().reshape(-1) for part in found]).numpy()
    return values, np.sum(gradients, axis=0), np.sum(np.abs(gradients), axis=0)
