"""Runs the base model so that nothing a request gets depends on what is computed beside it, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.generator import attention, invariant
from backend.generator.attention import Part
from backend.generator.invariant import RANK_MULTIPLE, SIZES, TokenPlan, cut, filled_up, tiles
from backend.generator.kv_cache import KVCache, Row
from backend.generator.lora import Span
from backend.generator.model_runner import ModelRunner
from backend.trainer.base_model import BaseModel
from together_post_training.errors import Reason, fail

# All others are compared with it.
_REFERENCE_SIZE = 32


@dataclass(frozen=True, slots=True)
class _Parts:
    """The plan of a forward; each of its tiles has one of its own."""

    parts: Sequence[Part]

    def attend(self, *_: object, **__: object) -> Tensor:
        raise AssertionError("a forward runs in tiles")

    def between(self, start: int, stop: int) -> list[Part]:
        """The parts of these of the packed tokens."""
        inside, end = [], 0
        for part in self.parts:
            begin, end = end, end + part.num_tokens
            lo, hi = max(begin, start), min(end, stop)
            if lo < hi:
                inside.append(Part(part.row, part.start + lo - begin, hi - lo))
        return inside


class InvariantRunner(ModelRunner):
    """See `invariant`. Forwards run in tiles of the sizes that were found to give the same bits on this machine.

    Args:
        num_threads: torch's, while it computes: another number may be another rounding.

    Raises:
        PostTrainingError: UNIMPLEMENTED on a GPU, and where this machine's products are not sound.
    """

    draws_apart = True
    _rank_multiple = RANK_MULTIPLE

    def __init__(self, base: BaseModel, num_threads: int) -> None:
        if base.device.type != "cpu":
            raise fail(
                Reason.UNIMPLEMENTED,
                f"Batch-invariant generation runs on a CPU only, and this model is on {base.device}: it was never "
                "checked there. Sample without it, or use --device cpu.",
                device=str(base.device),
            )
        super().__init__(base, invariant.PRODUCTS)
        self._num_threads = num_threads
        self._sizes = (_REFERENCE_SIZE,)
        self._sizes = self._sound_sizes()

    def prefill_plan(self, parts: Sequence[Part]) -> attention.Plan:
        return _Parts(parts)

    def decode_plan(self, rows: Sequence[Row], lengths: Sequence[int]) -> attention.Plan:
        return _Parts([Part(row, n - 1, 1) for row, n in zip(rows, lengths, strict=True)])

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        spans: Sequence[Span],
        plan: attention.Plan,
        chosen: list[Tensor] | None = None,
    ) -> Tensor:
        assert isinstance(plan, _Parts)
        self._pin_threads()
        pieces, choices = [], []
        for start, stop, size in tiles(len(tokens_T), self._sizes):
            of_tile = None if chosen is None else []
            hidden = super().hidden(
                filled_up(tokens_T[start:stop], size),
                filled_up(positions_T[start:stop], size),
                cut(spans, start, stop),
                TokenPlan(plan.between(start, stop), self.device),
                of_tile,
            )
            pieces.append(hidden[: stop - start])
            choices.append([experts[: stop - start] for experts in of_tile or ()])
        if chosen is not None:
            chosen += [torch.cat(of_layer) for of_layer in zip(*choices, strict=True)]
        return torch.cat(pieces)

    def logits(self, hidden_NH: Tensor, spans: Sequence[Span]) -> Tensor:
        self._pin_threads()
        return torch.cat(
            [
                super(InvariantRunner, self).logits(
                    filled_up(hidden_NH[start:stop], size), cut(spans, start, stop)
                )[: stop - start]
                for start, stop, size in tiles(len(hidden_NH), self._sizes)
            ]
        )

    def _pin_threads(self) -> None:
        """Each thread has a number of its own, that of the library that multiplies is common to all."""
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)

    @torch.inference_mode()
    def _sound_sizes(self) -> tuple[int, ...]:
        """Those in which a token gives the same bits in every place, and the same as in other sizes."""
        expected = self._rows(_REFERENCE_SIZE)
        _set_threads_elsewhere(max(1, self._num_threads - 1))
        try:
            is_stable = torch.equal(self._rows(_REFERENCE_SIZE), expected)
        finally:
            _set_threads_elsewhere(self._num_threads)
        if not (is_stable and torch.equal(expected, expected[:1].expand_as(expected))):
            raise invariant.unsound(f"in a forward of {_REFERENCE_SIZE} tokens")
        return tuple(n for n in SIZES if torch.equal(self._rows(n), expected[:1].expand(n, -1)))

    def _rows(self, size: int) -> Tensor:
        """What the same token gives in each place of a tile, (size, H + V)."""
        row = KVCache(max_tokens=64).take(4)
        tokens = torch.full((size,), 1, device=self.device)
        parts = [Part(row, 2, 1)] * size
        self._sizes = (size,)
        hidden = self.hidden(tokens, torch.full_like(tokens, 2), [], self.prefill_plan(parts))
        return torch.cat((hidden.float(), self.logits(hidden, [])), dim=1)


def _set_threads_elsewhere(num_threads: int) -> None:
    """As another engine's thread does, which changes what is common to all."""
    thread = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
    thread.start()
    thread.join()
