"""Which experts a sequence's tokens went through, kept while it is sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray


class ExpertTrace:
    """Of neighbouring tokens, from position `first` on, as they were read for the first time: what is computed from a
    token later (keys and values of a sample that starts over, say) may be rounded otherwise, but its log-probability
    came from that. Owned by the engine's thread."""

    def __init__(self, first: int = 0) -> None:
        self._parts: list[Array] = []
        self._stop = first

    def add(self, start: int, experts_TLK: Array) -> None:
        """Those of the tokens from position `start` on; what is known of some of them already stays as it is."""
        assert start <= self._stop, "the tokens in between were never read"
        fresh = experts_TLK[self._stop - start :]
        if len(fresh):
            self._parts.append(fresh)
            self._stop += len(fresh)

    def experts(self) -> list[Array]:
        """Each int16 (tokens, layers, experts of a token), in order; none for a model without experts."""
        return self._parts


def chosen_by_token(by_layer: Sequence[Tensor]) -> Array:
    """From what each layer's router chose for T tokens, (T, K): int16 (T, L, K)."""
    return torch.stack([chosen_TK.to(torch.int16) for chosen_TK in by_layer], dim=1).cpu().numpy()
