"""Routers of a mixture of experts, and how a router is made to choose what another one chose.

A router scores E experts for each token, chooses K of them, e_1 .. e_K, and weighs them:

    w_k = c * s_{e_k} / Z,    Z = sum_j s_{e_j} where the architecture normalises, else 1

s is the softmax of the router's logits, or their sigmoid; c a constant of the model. Replayed, the choice is given and
the weights are still the router's own: gradients go through them as always. Source: Ma et al. 2025, "Stabilizing MoE
Reinforcement Learning by Aligning Training and Inference Routers", arXiv:2510.11370.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from backend.trainer import targets
from backend.trainer.base import Experts
from backend.trainer.families import FAMILIES, Scores, family

Array = np.ndarray

# Beside the experts, in all known architectures.
_ROUTER = "gate"
# What the architectures call the number of experts of a layer.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# In place of an expert: the router chooses.
FREE = -1


class Replay:
    """Of the routers of one view of a model, in the model's order. Owned by the trainer's thread."""

    def __init__(self, view: PreTrainedModel) -> None:
        self._experts_TLK: Tensor | None = None
        scores = family(view.config.model_type).router
        for layer, router in enumerate(routers_of(view)):
            router.register_forward_hook(partial(self._choose, layer, scores))

    @contextmanager
    def over(self, experts_TLK: Tensor | None) -> Iterator[None]:
        """For one forward of T tokens, the experts that they go through in each of L layers, integers; FREE where the
        router chooses. None: it chooses all."""
        self._experts_TLK = experts_TLK
        try:
            yield
        finally:
            self._experts_TLK = None

    def _choose(
        self, layer: int, scores: Scores, router: nn.Module, _: object, output: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        if self._experts_TLK is None:
            return None
        logits_TE, own_weights_TK, own_TK = output
        given_TK = self._experts_TLK[:, layer].to(own_TK.dtype)
        chosen_TK = torch.where(given_TK == FREE, own_TK, given_TK)
        weights_TK = _weights(router, scores, logits_TE, chosen_TK)
        return logits_TE, weights_TK.to(own_weights_TK.dtype), chosen_TK


def pack(
    routed_experts: Sequence[Array | None],
    lengths: Sequence[int],
    device: torch.device | None = None,
) -> Tensor | None:
    """Of samples of these lengths one after the other, for `Replay.over`: int16 (T, L, K). None: none has any.

    Args:
        routed_experts: of each sample, as in `base.Pass`; empty: of none.
    """
    first = next((routed for routed in routed_experts if routed is not None), None)
    if first is None:
        return None
    packed_TLK = np.full((sum(lengths), *first.shape[1:]), FREE, np.int16)
    start = 0
    for routed, length in zip(routed_experts, lengths, strict=True):
        if routed is not None:
            assert length - 1 <= len(routed) <= length
            packed_TLK[start : start + len(routed)] = routed
        start += length
    return torch.from_numpy(packed_TLK).to(device)


def routers_of(module: PreTrainedModel) -> list[nn.Module]:
    """In the model's order, of a known architecture. Each gives logits (T, E), weights (T, K) and its choice (T, K)."""
    paths = targets.expert_modules(module)
    return [module.get_submodule(f"{path.rpartition('.')[0]}.{_ROUTER}") for path in paths]


def experts_of(module: PreTrainedModel) -> Experts | Literal["unknown"] | None:
    """What `ModelInfo.experts` says of a model."""
    if module.config.model_type not in FAMILIES:
        sizes = [getattr(module.config, name, None) or 1 for name in _NUM_EXPERTS]
        return "unknown" if max(sizes) > 1 else None
    routers = routers_of(module)
    if not routers:
        return None
    return Experts(
        num_layers=len(routers),
        num_experts=len(routers[0].get_parameter("weight")),
        per_token=cast(int, routers[0].top_k),
    )


def _weights(router: nn.Module, scores: Scores, logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    """float32 (T, K), rounded as the router's own are."""
    if scores == "sigmoid":
        scores_TE, eps = logits_TE.float().sigmoid(), 1e-20
    else:
        scores_TE, eps = logits_TE.softmax(dim=1, dtype=torch.float32), 0.0
    weights_TK = scores_TE.gather(1, chosen_TK)
    # Mixtral has no such setting: it always does.
    if getattr(router, "norm_topk_prob", True):
        weights_TK = weights_TK / (weights_TK.sum(dim=1, keepdim=True) + eps)
    return weights_TK * getattr(router, "routed_scaling_factor", 1.0)
