"""Runs the base model for the engine: packed tokens in, hidden states and logits out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from backend.generator import attention, experts
from backend.generator.adapter_stack import Stacks
from backend.generator.attention import Part
from backend.generator.kv_cache import Row
from backend.generator.lora import (
    Adapters,
    OneByOne,
    Products,
    Routes,
    SnapshotWeights,
    Span,
    install,
    snapshot_weights,
)
from backend.trainer import targets
from backend.trainer.base import Adapter, LoraConfig
from backend.trainer.base_model import BaseModel
from backend.trainer.families import FAMILIES
from backend.trainer.targets import Layer


class ModelRunner:
    """A view of the base model with this engine's attention and adapters. Shares all weights with other views.

    Owned by the engine's thread. What it is given lies on `device`.

    draws_apart: whether tokens are to be drawn, and scored, for each row of logits by itself.
    """

    draws_apart = False
    _rank_multiple = 1

    def __init__(self, base: BaseModel, products: Products | None = None) -> None:
        view = base.view(attention.NAME)
        self._model_type = view.config.model_type
        self._layers: Mapping[str, Layer] = {}
        self._routes = Routes(products or Products())
        self._stacks = None if products else Stacks(base.device)
        if self._model_type in FAMILIES:
            self._layers = targets.layers_of(view)
            experts.install(view, targets.expert_modules(view), self._routes)
            install(view, targets.linear_layers(view), self._routes)
        self.device = base.device
        self._body = view.base_model
        head = view.get_output_embeddings()
        assert head is not None
        self._head = head

    def adapted(self, lora: LoraConfig) -> list[Layer]:
        """The layers of an adapter of this configuration.

        Raises:
            PostTrainingError: UNIMPLEMENTED for an architecture that is not known to the trainer.
        """
        return targets.select(self._layers, self._model_type, lora)

    def snapshot(self, adapter: Adapter) -> SnapshotWeights:
        """A copy of an adapter, for spans; may be called from any thread.

        Raises:
            PostTrainingError: UNIMPLEMENTED as above; INCOMPATIBLE_CHECKPOINT where its tensors do not fit.
        """
        layers = self.adapted(adapter.lora)
        return snapshot_weights(adapter, layers, self.device, rank_multiple=self._rank_multiple)

    def prefill_plan(self, parts: Sequence[Part]) -> attention.Plan:
        """For `hidden`: parts of prompts, one after another."""
        return attention.PrefillPlan(parts, self.device)

    def decode_plan(self, rows: Sequence[Row], lengths: Sequence[int]) -> attention.Plan:
        """For `hidden`: one token of each running sample, of all that run; lengths with it."""
        return attention.DecodePlan(rows, lengths, self.device)

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        spans: Sequence[Span],
        plan: attention.Plan,
        chosen: list[Tensor] | None = None,
    ) -> Tensor:
        """The last layer's normalised output, (T, H).

        Args:
            spans: which of the T tokens have adapters.
            chosen: takes, for each layer with experts, those that the tokens went through, int64 (T, K).
        """
        with self._routed(spans, chosen):
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
            return self._head(hidden_NH.float())

    def _adapters(self, spans: Sequence[Span]) -> Adapters:
        if self._stacks is None:
            return OneByOne(spans=spans, products=self._routes.products)
        return self._stacks.adapters(spans, self._routes.products)

    @contextmanager
    def _routed(self, spans: Sequence[Span], chosen: list[Tensor] | None = None) -> Iterator[None]:
        """For one forward: afterwards nothing here keeps a snapshot alive."""
        routes = self._routes
        routes.spans, routes.chosen = spans, chosen
        routes.adapters = self._adapters(spans) if spans else None
        try:
            yield
        finally:
            routes.spans, routes.chosen, routes.adapters = (), None, None
