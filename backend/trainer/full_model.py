"""A copy of the whole base model, as its one session computes with it and trains it.

As in `packed_model.PackedModel`, tokens are packed and logits are never stored; autograd and the head add what they
find straight into one flat buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from backend.trainer.attention import PACKED
from backend.trainer.base_model import BaseModel
from backend.trainer.checkpointing import Checkpointing
from backend.trainer.head import CHUNK_VALUES, Head, HeadGradients
from backend.trainer.lora import Segment
from backend.trainer.model_layout import ModelLayout, bind
from backend.trainer.packed_model import Forward, PackedRow, final_hidden, probe_row
from backend.trainer.routers import Replay
from backend.trainer.row_cost import Cost, measure


class FullModel:
    """Owned by the trainer's thread.

    weights: the model's parameters as one float32 buffer, which the model computes with: whoever writes to it changes
        the model. At first those of the base.
    """

    def __init__(
        self, base: BaseModel, layout: ModelLayout, chunk_values: int = CHUNK_VALUES
    ) -> None:
        self._layout = layout
        self.weights = _copy(base, layout)
        self._view = base.view(PACKED)
        views = layout.parameters.views(self.weights)
        self._parameters = bind(self._view, base.module, views)
        for parameter in self._parameters.values():
            parameter.requires_grad_(True)
        head = self._view.get_output_embeddings()
        assert head is not None, "a causal language model has an output head"
        self._replay = Replay(self._view)
        self._checkpointing = Checkpointing(self._view)
        self._linear = head
        self._head = Head(head, chunk_values)
        self.cost = self._measure(base)

    def accumulate_into(self, gradient: Tensor | None) -> None:
        """Backward passes from here on add to this buffer, laid out as the weights are. None: lets go of the last."""
        views = {} if gradient is None else self._layout.parameters.views(gradient)
        for name, parameter in self._parameters.items():
            parameter.grad = views.get(name)
        weight, bias = self._linear.weight.grad, getattr(self._linear.bias, "grad", None)
        self._head.gradients = None if weight is None else HeadGradients(weight=weight, bias=bias)

    def forward(
        self,
        row: PackedRow,
        segments: Sequence[Segment],
        *,
        for_backward: bool = False,
        recompute: bool = False,
    ) -> Forward:
        """See `packed_model.PackedModel.forward`; its one segment has no adapter."""
        again = partial(self._replay.over, row.experts) if recompute else None
        with (
            self._replay.over(row.experts),
            self._checkpointing.over(again),
            torch.set_grad_enabled(for_backward),
        ):
            hidden_TH = final_hidden(self._view, row)
        return Forward(row, segments, hidden_TH, self._head)

    def _measure(self, base: BaseModel) -> Cost:
        row = probe_row(base)
        return measure(
            lambda: self.forward(row, [], for_backward=True),
            (*self._view.parameters(), *self._view.buffers()),
            num_tokens=row.num_tokens,
            num_layers=len(self._checkpointing.layers),
            hidden_size=self._view.config.hidden_size,
            dtype=torch.float32,
            fixed=self._head.buffer_bytes,
        )


def _copy(base: BaseModel, layout: ModelLayout) -> Tensor:
    """The base's parameters, tied ones once."""
    shared = dict(base.module.named_parameters())
    weights = torch.empty(
        layout.parameters.size, dtype=torch.float32, device=next(iter(shared.values())).device
    )
    for name, view in layout.parameters.views(weights).items():
        view.copy_(shared[name])
    return weights
