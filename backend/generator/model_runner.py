"""Runs the base model for the engine: packed tokens in, hidden states and logits out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from backend.generator import attention
from backend.generator.lora import Routes, Span, install
from backend.trainer import targets
from backend.trainer.base_model import BaseModel


class ModelRunner:
    """A view of the base model with this engine's attention and adapters. Shares all weights with other views.

    Owned by the engine's thread. layers: those that may carry adapters, by path; an architecture that is not known
    to the trainer has none.
    """

    def __init__(self, base: BaseModel) -> None:
        view = base.view(attention.NAME)
        is_known = view.config.model_type in targets.FAMILIES
        self.layers = targets.linear_layers(view) if is_known else {}
        self._routes = Routes()
        install(view, self.layers, self._routes)
        self._body = view.base_model
        head = view.get_output_embeddings()
        assert head is not None
        self._head = head

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        spans: Sequence[Span],
        plan: attention.Plan,
    ) -> Tensor:
        """The last layer's normalised output, float32 (T, H). `spans`: which of the T tokens have adapters."""
        with self._routed(spans):
            out = self._body(
                input_ids=tokens_T[None],
                position_ids=positions_T[None],
                use_cache=False,
                plan=plan,
            )
        return out.last_hidden_state[0]

    def logits(self, hidden_NH: Tensor, spans: Sequence[Span]) -> Tensor:
        """float32 (N, V). `spans`: which of the N rows have adapters."""
        with self._routed(spans):
            return self._head(hidden_NH)

    @contextmanager
    def _routed(self, spans: Sequence[Span]) -> Iterator[None]:
        """For one forward: afterwards nothing here keeps a snapshot alive."""
        self._routes.spans = spans
        try:
            yield
        finally:
            self._routes.spans = ()
