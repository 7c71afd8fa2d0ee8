"""How much of a device's memory activations get, and what follows: micro-batches, recomputing, refusing."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from backend.trainer.free_memory import available_bytes, gib, give_back, mib
from backend.trainer.row_cost import Cost
from together_post_training.errors import PostTrainingError, Reason, fail

log = logging.getLogger(__name__)

# Of what is free when a trainer starts, for activations; the rest is for holes in the heap (see `free_memory`),
# adapters, the generator's cache, and others.
_SHARE = 0.5
# Tokens of a micro-batch. On a CPU the time per token is flat from about 500 on; a GPU wants more work at a time.
_MOST_TOKENS = {"cpu": 1024, "cuda": 16384}
_FEWEST_TOKENS = 64
# Of what is free when a row is computed: estimates are not exact, and other programs live too.
_MARGIN = 0.9


class Memory:
    """How a device's memory is used for activations. Owned by the trainer's thread.

    Args:
        cost: of the model that most sessions share.
        token_budget: tokens of a micro-batch; None: as many as fit, up to what makes a difference in speed.
        activation_bytes: for activations; None: half of what is free now.
        available: what is free on a device, in bytes.
    """

    def __init__(
        self,
        device: torch.device,
        cost: Cost,
        *,
        token_budget: int | None = None,
        activation_bytes: int | None = None,
        available: Callable[[torch.device], int] | None = None,
    ) -> None:
        self.device = device
        self._available = available or available_bytes
        free = self._available(device)
        self.activation_bytes = activation_bytes or default_activation_bytes(free)
        self.recompute_above = cost.most_stored(self.activation_bytes)
        most = _MOST_TOKENS[device.type]
        self.token_budget = token_budget or max(_FEWEST_TOKENS, min(most, self.recompute_above))
        log.info(
            "%s: %s free, %s for activations; micro-batches of %d tokens, %s a token; layers of samples from %d tokens "
            "on are computed again in backward",
            device,
            gib(free),
            gib(self.activation_bytes),
            self.token_budget,
            mib(cost.stored),
            self.recompute_above + 1,
        )

    def must_recompute(self, cost: Cost, num_tokens: int, *, for_backward: bool) -> bool:
        """Whether layers of a row are to be computed again in backward, because storing them all takes too much.

        Raises:
            PostTrainingError: OUT_OF_MEMORY for a row that does not fit even then.
        """
        free = self._free()
        if for_backward and cost.storing(num_tokens) <= min(self.activation_bytes, free):
            return False
        needed = cost.recomputing(num_tokens) if for_backward else cost.scoring(num_tokens)
        if needed > free:
            give_back(self.device)
            free = self._free()
        if needed > free:
            raise _too_large(num_tokens, needed, free, self.device)
        return for_backward

    def _free(self) -> int:
        return int(self._available(self.device) * _MARGIN)


def _too_large(num_tokens: int, needed: int, free: int, device: torch.device) -> PostTrainingError:
    return fail(
        Reason.OUT_OF_MEMORY,
        f"{num_tokens} tokens at a time take about {gib(needed)} of memory beside the model, even with layers computed "
        f"again in backward, and {gib(free)} may be used on {device} now. Send shorter samples, start the server with "
        "--dtype bfloat16, stop other sessions or programs, or use a machine with more memory.",
        num_tokens=num_tokens,
        needed_bytes=needed,
        available_bytes=free,
    )


def default_activation_bytes(free: int) -> int:
    return int(free * _SHARE)
