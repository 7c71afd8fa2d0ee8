"""The base model as a trainer computes with it: packed tokens in, target log-probabilities and gradients out.

Which session's adapter applies to which tokens is said for each forward by its segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from backend.trainer import experts, routers, targets
from backend.trainer.attention import PACKED
from backend.trainer.base import LoraConfig
from backend.trainer.base_model import BaseModel
from backend.trainer.checkpointing import Checkpointing
from backend.trainer.head import CHUNK_VALUES, Head, TargetTokens, targets_of
from backend.trainer.lora import LoraLinear, LoraWeights, Routing, Segment, adapters_at
from backend.trainer.packing import Run, runs_of
from backend.trainer.row_cost import Cost, measure
from backend.trainer.targets import Layer
from together_post_training.errors import Reason, fail
from together_post_training.samples import Sample

Array = np.ndarray

HEAD_PATH = "lm_head"

# Of the sequences that are compared with the model's own forward.
_CHECK_LENGTHS = (7, 3)
# To measure what passes keep in memory; of adapters, one of this rank on every layer.
_PROBE_TOKENS = 32
_PROBE_RANK = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRow:
    """Samples one after the other: T tokens, E scored targets.

    input_ids, position_ids: int64 (1, T); positions restart with each sample.
    experts: what `routers.Replay.over` takes.
    """

    input_ids: Tensor
    position_ids: Tensor
    runs: tuple[Run, ...]
    targets: TargetTokens
    experts: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]


def pack(
    samples: Sequence[Sample],
    device: torch.device | None = None,
    routed_experts: Sequence[Array | None] = (),
) -> PackedRow:
    """Neighbours of equal length should lie together already: attention computes them as one batch.

    Args:
        routed_experts: of each sample, as in `base.Pass`; empty: of none.
    """
    lengths = [sample.num_tokens for sample in samples]
    tokens = np.concatenate([sample.tokens for sample in samples], dtype=np.int64)
    positions = np.concatenate([np.arange(length) for length in lengths])
    return PackedRow(
        input_ids=torch.from_numpy(tokens).to(device).unsqueeze(0),
        position_ids=torch.from_numpy(positions).to(device).unsqueeze(0),
        runs=runs_of(lengths),
        targets=targets_of([sample.inputs["target_tokens"] for sample in samples], device),
        experts=routers.pack(routed_experts, lengths, device),
    )


def probe_row(base: BaseModel) -> PackedRow:
    """A short one, to measure what a model keeps of it."""
    tokens = np.arange(_PROBE_TOKENS) % base.info.limits.vocab_size
    return pack([Sample(tokens=tokens, inputs={"target_tokens": tokens})], base.device)


def final_hidden(view: PreTrainedModel, row: PackedRow) -> Tensor:
    """What the body of a view with packed attention makes of each token, (T, H)."""
    return view.base_model(
        input_ids=row.input_ids,
        position_ids=row.position_ids,
        # A cache would make transformers mask by its length, and see across sequences.
        use_cache=False,
        runs=row.runs,
    ).last_hidden_state[0]


class Forward:
    """A row that went through the model's body; its hidden states wait for the head."""

    def __init__(
        self, row: PackedRow, segments: Sequence[Segment], hidden: Tensor, head: Head
    ) -> None:
        self._targets = row.targets
        self._adapters = adapters_at(HEAD_PATH, segments)
        self._hidden = hidden
        self._head = head

    def logprobs(self) -> Tensor:
        """float32 (E,)."""
        return self._head.logprobs(self._hidden.detach(), self._targets, self._adapters)

    def backward(self, gradient: Tensor) -> None:
        """Adds to the gradients of the segments' adapters, given d loss / d logprob, float32 (E,)."""
        self._body_backward(
            self._head.backward(self._hidden.detach(), self._targets, gradient, self._adapters)
        )

    def score_and_backward(self, gradient: Tensor) -> Tensor:
        """Both at once, for less than the two one after the other."""
        logprobs, grad_hidden = self._head.score_and_backward(
            self._hidden.detach(), self._targets, gradient, self._adapters
        )
        self._body_backward(grad_hidden)
        return logprobs

    def _body_backward(self, grad_hidden: Tensor) -> None:
        # An adapter of the head alone leaves nothing to do below it.
        if self._hidden.requires_grad:
            self._hidden.backward(grad_hidden.to(self._hidden.dtype))


class PackedModel:
    """A view of the base model whose linear layers read a routing. Owned by the trainer's thread."""

    def __init__(self, base: BaseModel, chunk_values: int = CHUNK_VALUES) -> None:
        """Raises UNIMPLEMENTED for an architecture that it does not know, or does not compute as transformers does."""
        self._view = base.view(PACKED)
        self._routing = Routing()
        self._layers = targets.layers_of(self._view)
        linear = targets.linear_layers(self._view)
        self._head = Head(linear[HEAD_PATH], chunk_values)
        experts.install(self._view, targets.expert_modules(self._view), self._routing)
        for path in linear.keys() - {HEAD_PATH}:
            self._view.set_submodule(path, LoraLinear(linear[path], path, self._routing))
        self._replay = routers.Replay(self._view)
        self._checkpointing = Checkpointing(self._view)
        self._check_equals(base)
        self.cost = self._measure(base)

    def layers(self, lora: LoraConfig) -> list[Layer]:
        """Those that an adapter of this configuration trains, in the model's order."""
        return targets.select(self._layers, self._view.config.model_type, lora)

    def forward(
        self,
        row: PackedRow,
        segments: Sequence[Segment],
        *,
        for_backward: bool = False,
        recompute: bool = False,
    ) -> Forward:
        """Runs the body.

        Args:
            segments: in ascending order, covering the row.
            for_backward: keeps what `Forward.backward` needs.
            recompute: keeps less, and computes the rest again in backward.
        """
        again = partial(self._over, row, segments) if recompute else None
        with (
            self._over(row, segments),
            self._checkpointing.over(again),
            torch.set_grad_enabled(for_backward),
        ):
            hidden_TH = final_hidden(self._view, row)
        return Forward(row, segments, hidden_TH, self._head)

    @contextmanager
    def _over(self, row: PackedRow, segments: Sequence[Segment]) -> Iterator[None]:
        with self._routing.over(segments), self._replay.over(row.experts):
            yield

    def _check_equals(self, base: BaseModel) -> None:
        """Compares with the model's own forward, one short sequence at a time."""
        sequences = [
            torch.arange(n, device="cpu") % base.info.limits.vocab_size for n in _CHECK_LENGTHS
        ]
        samples = [Sample(tokens=s.numpy(), inputs={"target_tokens": s.numpy()}) for s in sequences]
        row = pack(samples, base.device)
        ours = self.forward(row, [whole_row(row)]).logprobs()
        at_targets = [
            base.plain_logprobs(s).gather(1, s[:, None].to(base.device))[:, 0] for s in sequences
        ]
        gap = float((ours - torch.cat(at_targets)).abs().max())
        if not gap < base.check_tolerance:
            raise fail(
                Reason.UNIMPLEMENTED,
                f"Model type {self._view.config.model_type!r} cannot be trained: log-probabilities computed here "
                f"differ from the model's own by {gap:g}.",
                model_type=self._view.config.model_type,
                gap=gap,
            )

    def _measure(self, base: BaseModel) -> Cost:
        row = probe_row(base)
        # A single zero, however large the matrix.
        zero = torch.zeros(1, 1, device=base.device)
        weights = {}
        for path, layer in self._layers.items():
            a, b = (zero.expand(shape) for shape in layer.shapes(_PROBE_RANK))
            weights[path] = LoraWeights(a=a, b=b, grad_a=a, grad_b=b, scale=1.0)
        segment = whole_row(row, weights, zero.clone().requires_grad_())
        return measure(
            lambda: self.forward(row, [segment], for_backward=True),
            (*self._view.parameters(), *self._view.buffers()),
            num_tokens=row.num_tokens,
            num_layers=len(self._checkpointing.layers),
            hidden_size=self._view.config.hidden_size,
            dtype=base.dtype,
            fixed=self._head.buffer_bytes,
        )


def whole_row(
    row: PackedRow,
    weights: Mapping[str, LoraWeights] = MappingProxyType({}),
    anchor: Tensor | None = None,
) -> Segment:
    """The one segment of a row that belongs to one session, or to the base."""
    return Segment(start=0, stop=row.input_ids.shape[1], weights=weights, anchor=anchor)
