"""Gradient checkpointing: decoder layers that keep nothing but their input, and are computed again in backward.

Memory for activations then grows with one layer instead of all; a step takes about a third longer. Numbers do not
change: a layer is computed again by the same operations on the same values.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel

Context = Callable[[], AbstractContextManager]


class Checkpointing:
    """Of the decoder layers of one view of a model. Owned by the trainer's thread."""

    def __init__(self, view: PreTrainedModel) -> None:
        """Changes the layers of the view, which nobody else may hold."""
        self._again: Context | None = None
        self.layers = decoder_layers(view)
        for layer in self.layers:
            # An attribute of this one layer. In a module of its own, every path below would be another.
            layer.forward = self._checkpointed(layer.forward)

    @contextmanager
    def over(self, again: Context | None) -> Iterator[None]:
        """For one forward: its layers are computed again in backward, each within a context that `again` makes.

        None: they keep what backward needs.
        """
        self._again = again
        try:
            yield
        finally:
            self._again = None

    def _checkpointed(self, forward: Callable) -> Callable:
        def run(*args, **kwargs):
            again = self._again
            if again is None:
                return forward(*args, **kwargs)
            return checkpoint(
                forward,
                *args,
                use_reentrant=False,
                # Nothing in a layer draws from torch's random stream.
                preserve_rng_state=False,
                context_fn=lambda: (nullcontext(), again()),
                **kwargs,
            )

        return run


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """In the model's order, none within another."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            found.append(child)
        else:
            found += decoder_layers(child)
    return found
