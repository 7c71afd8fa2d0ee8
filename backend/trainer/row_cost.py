"""What a row of tokens takes in memory on its way through a model and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Bytes that a row takes at its peak, beside weights and adapters. Within a tenth of what the system shows
    without holes in the heap (see `free_memory`), for models of 15 and 135 million parameters, with and without
    recomputing.

    fixed: whatever the number of tokens.
    stored: for each token, what all layers keep for backward.
    layer: for each token, the part of one decoder layer.
    inputs: for each token, the inputs of all decoder layers, which is what recomputing keeps.
    ends: for each token, what embedding, head and their gradients take.
    """

    fixed: int
    stored: int
    layer: int
    inputs: int
    ends: int

    def storing(self, num_tokens: int) -> int:
        return self.fixed + num_tokens * (self.stored + self.ends)

    def recomputing(self, num_tokens: int) -> int:
        return self.fixed + num_tokens * (self.inputs + self.layer + self.ends)

    def scoring(self, num_tokens: int) -> int:
        """Of a forward pass alone."""
        return self.fixed + num_tokens * (self.layer + self.ends)

    def most_stored(self, num_bytes: int) -> int:
        """How many tokens can be stored in as much."""
        return max(0, num_bytes - self.fixed) // (self.stored + self.ends)


def measure(
    forward: Callable[[], object],
    besides: Iterable[Tensor],
    *,
    num_tokens: int,
    num_layers: int,
    hidden_size: int,
    dtype: torch.dtype,
    fixed: int,
) -> Cost:
    """The cost of a model, from what autograd keeps of one forward of `num_tokens`; it is proportional to them.

    Args:
        forward: runs the body and returns what holds on to its graph.
        besides: what lives anyway: parameters and buffers.
        fixed: see `Cost`.
    """
    stored = -(-_saved_bytes(forward, besides) // num_tokens)
    return Cost(
        fixed=fixed,
        stored=stored,
        layer=-(-stored // num_layers),
        inputs=num_layers * hidden_size * dtype.itemsize,
        # Embedded and final hidden states, those the head chooses, and the gradients of the two, in float32.
        ends=6 * hidden_size * torch.float32.itemsize,
    )


def _saved_bytes(forward: Callable[[], object], besides: Iterable[Tensor]) -> int:
    """What autograd keeps of a forward, but for these tensors."""
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        # Without its graph: an output that a node saves would keep that node, and with it itself, for ever.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # Held until all is counted: what is freed gives its address to what comes next.
        result = forward()
    known = {tensor.untyped_storage().data_ptr() for tensor in besides}
    del result
    return sum(size for address, size in sizes.items() if address not in known)
