"""Losses and optimiser written a second time, in float64 torch, with autograd for the derivatives."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

# exp(700) is far outside float32 and its square root far inside float64: what is clipped is the same as
# for an infinite ratio, what is not clipped is just as unusable, and autograd meets no 0 * inf.
_LARGEST_LOG_RATIO = 700.0


def terms(
    name: str,
    lp: torch.Tensor,
    inputs: Mapping[str, np.ndarray],
    params: Mapping[str, float],
) -> torch.Tensor:
    """The loss of each position that counts, from float64 logprobs that may require a gradient."""
    given = {key: torch.tensor(np.asarray(a, np.float64)) for key, a in inputs.items()}
    weights = given.get("weights", torch.ones_like(lp))
    if name == "cross_entropy":
        return -(weights * lp)
    advantages, sampling = given["advantages"], given["logprobs"]
    if name == "dro":
        penalty = params["beta"] / 2 * (lp - sampling) ** 2
        return -(weights * (lp * advantages - penalty))
    counts = weights * advantages != 0
    low, high = (
        given.get(key, torch.tensor(params.get(key, 0.0), dtype=torch.float64))
        for key in ("clip_low_threshold", "clip_high_threshold")
    )
    low, high = low.expand(lp.shape)[counts], high.expand(lp.shape)[counts]
    w, a, lp, q = weights[counts], advantages[counts], lp[counts], sampling[counts]
    ratio = (lp - q).clamp(max=_LARGEST_LOG_RATIO).exp()
    clipped = torch.clamp(ratio, low, high)
    if name == "importance_sampling":
        return -(w * ratio * a)
    if name == "ppo":
        return -(w * torch.minimum(ratio * a, clipped * a))
    assert name == "cispo"
    return -(w * clipped.detach() * lp * a)


def value_and_gradient(
    name: str, lp: np.ndarray, inputs: Mapping[str, np.ndarray], params: Mapping[str, float]
) -> tuple[np.ndarray, np.ndarray]:
    """(the terms whose sum is the loss, d loss / d lp), float64."""
    logprobs = torch.tensor(np.asarray(lp, np.float64), requires_grad=True)
    values = terms(name, logprobs, inputs, params)
    if values.requires_grad:
        values.sum().backward()
    gradient = np.zeros(lp.shape) if logprobs.grad is None else logprobs.grad.numpy()
    return values.detach().numpy(), gradient
