"""Plain models in float64 whose tokens go through given experts, each weighed as its architecture's paper has it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Array = np.ndarray


def random_experts(seed: int, num_tokens: int, *, layers: int = 2, per_token: int = 2) -> Array:
    """int16 (T, L, K), of 4, no token through one of them twice: mostly not what a router would choose."""
    rng = np.random.default_rng(seed)
    draws = [rng.permutation(4)[:per_token] for _ in range(num_tokens * layers)]
    return np.array(draws, np.int16).reshape(num_tokens, layers, per_token)


class Forced:
    """A model (plain, or PEFT's) whose routers choose `experts`, (T, L, K), while these are set; -1 and tokens beyond
    them are the router's own."""

    def __init__(self, module: nn.Module) -> None:
        self.experts: Array | None = None
        routers = [part for part in module.modules() if type(part).__name__.endswith("outer")]
        assert routers
        self.num_layers = len(routers)
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._force, layer))

    def _force(self, layer: int, router: nn.Module, _: object, output: tuple[Tensor, ...]) -> Any:
        logits, _, own = output
        choice = own.clone()
        if self.experts is not None:
            given = torch.from_numpy(self.experts[:, layer].astype(np.int64))
            choice[: len(given)] = torch.where(given < 0, choice[: len(given)], given)
        rows = [
            _weigh(router, scores, chosen) for scores, chosen in zip(logits, choice, strict=True)
        ]
        return logits, torch.stack(rows), choice


def _weigh(router: Any, logits_E: Tensor, chosen_K: Tensor) -> Tensor:
    name = type(router).__name__
    if name.startswith("Glm4Moe"):
        odds = 1 / (1 + torch.exp(-logits_E[chosen_K]))
        total = odds.sum() if router.norm_topk_prob else 1
        return router.routed_scaling_factor * odds / total
    exponentials = torch.exp(logits_E)
    normalises = name.startswith("Mixtral") or router.norm_topk_prob
    among = exponentials[chosen_K] if normalises else exponentials
    return exponentials[chosen_K] / among.sum()


def each(forced: Forced, routed: Sequence[Array | None]):
    """Goes through samples with their experts set."""
    for index, experts in enumerate(routed):
        forced.experts = experts
        yield index
    forced.experts = None
