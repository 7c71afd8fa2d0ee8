"""Runs the base model so that nothing a request gets depends on what is computed beside it, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.generator import attention, invariant
from backend.generator.attention import Part
from backend.generator.invariant import (
    FEW_DIVISOR,
    FEW_SIZES,
    RANK_MULTIPLE,
    SIZES,
    TokenPlan,
    cut,
    filled_up,
    tiles,
)
from backend.generator.kv_cache import KVCache, Row
from backend.generator.lora import Span
from backend.generator.model_runner import ModelRunner
from backend.trainer.base_model import BaseModel
from together_post_training.errors import Reason, fail

Array = np.ndarray

# All others are compared with it.
_REFERENCE_SIZE = 32
# What is read to find sizes, and how far apart its tokens are.
_NUM_TOKENS = 64
_STRIDE = 37


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
        num_threads: torch's, at most, while it computes: it is always the same, as another may be another rounding.

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
        # What a thread does not fill with whole vectors is rounded in another way, so that it matters where work is
        # divided. Sizes of models are divisible by powers of two.
        self._num_threads = 1 << (num_threads.bit_length() - 1)
        self._vocab_size = base.info.limits.vocab_size
        self._max_seq_length = base.info.limits.max_seq_length
        self._sizes = (_REFERENCE_SIZE,)
        self._candidates = _candidates(base)
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
        """Those in which each token of a sequence gives the same bits in whatever place, and the same as in others."""
        row = KVCache(max_tokens=_NUM_TOKENS).take(_NUM_TOKENS)
        in_order = np.arange(min(_NUM_TOKENS, self._max_seq_length))
        expected = self._read(row, in_order, _REFERENCE_SIZE)
        rng = np.random.default_rng(0)

        def is_sound(size: int) -> bool:
            positions = np.resize(rng.permutation(in_order), max(size, len(in_order)))
            return torch.equal(self._read(row, positions, size), expected[positions])

        _set_threads_elsewhere(max(1, self._num_threads - 1))
        try:
            is_stable = is_sound(_REFERENCE_SIZE)
        finally:
            _set_threads_elsewhere(self._num_threads)
        if not is_stable:
            raise invariant.unsound(f"in forwards of {_REFERENCE_SIZE} tokens")
        return tuple(size for size in self._candidates if is_sound(size))

    def _read(self, row: Row, positions: Array, size: int) -> Tensor:
        """Reads a sequence's tokens at these positions, in tiles of this size: hidden states and logits, (n, H + V).

        What has been read before is there already. A token that would give other bits would change those after it.
        """
        self._sizes = (size,)
        positions_T = torch.from_numpy(positions).to(self.device)
        hidden = self.hidden(
            positions_T * _STRIDE % self._vocab_size,
            positions_T,
            [],
            self.prefill_plan([Part(row, position, 1) for position in positions.tolist()]),
        )
        return torch.cat((hidden.float(), self.logits(hidden, [])), dim=1)


def _candidates(base: BaseModel) -> tuple[int, ...]:
    """Sizes of tiles in which a token's numbers fill vectors; those of the vocabulary are looked at row by row."""
    dims = {dim for parameter in base.module.parameters() for dim in parameter.shape}
    dims.discard(base.info.limits.vocab_size)
    return SIZES if any(dim % FEW_DIVISOR for dim in dims) else (*FEW_SIZES, *SIZES)


def _set_threads_elsewhere(num_threads: int) -> None:
    """As another engine's thread does, which changes what is common to all."""
    thread = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
    thread.start()
    thread.join()
