"""From hidden states to the log-probabilities of targets, and back, a few rows of logits at a time.

For a row with hidden state h, logits z = W h + scale * B A h, targets k and derivatives g_k = d loss / d lp_k:

    lp_k = z_k - logsumexp(z)        dL/dz = sum_k g_k (onehot(k) - softmax(z))

so logits live only in one buffer of CHUNK_VALUES floats, whatever the number of tokens; the derivatives by h, A and B
are summed from it at once. Logits and all that comes of them are float32, whatever W and h are kept in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from backend.trainer import storage
from backend.trainer.lora import Adapters

# 32 MB of float32. Matrix products reach their full speed from about 256 rows on.
CHUNK_VALUES = 2**23
MIN_CHUNK_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetTokens:
    """The tokens that are scored: one or several for each of T rows, E in all.

    ids: int64 (E,), row by row.
    rows: int64 (E,), which row each belongs to, ascending.
    """

    ids: Tensor
    rows: Tensor

    def select(self, rows: Tensor, num_rows: int) -> tuple[TargetTokens, Tensor]:
        """(the targets of these ascending rows, renumbered; where they stood)."""
        device = rows.device
        renumbered = torch.full((num_rows,), -1, device=device)
        renumbered.index_copy_(0, rows, torch.arange(len(rows), device=device))
        new_rows = renumbered[self.rows]
        kept = (new_rows >= 0).nonzero().squeeze(1)
        return TargetTokens(ids=self.ids[kept], rows=new_rows[kept]), kept

    def between(self, start: int, stop: int) -> tuple[TargetTokens, slice]:
        """(the targets of rows start..stop, numbered from 0; where they stood)."""
        wanted = torch.tensor([start, stop], device=self.rows.device)
        bounds = torch.searchsorted(self.rows, wanted).tolist()
        here = slice(*bounds)
        return TargetTokens(ids=self.ids[here], rows=self.rows[here] - start), here


def targets_of(arrays: list[np.ndarray], device: torch.device | None = None) -> TargetTokens:
    """Of packed samples: each array is (N,) or (N, K), and N rows take its values."""
    ids = np.concatenate([array.reshape(-1) for array in arrays])
    widths = np.concatenate(
        [np.full(len(array), 1 if array.ndim == 1 else array.shape[1]) for array in arrays]
    )
    rows = np.repeat(np.arange(len(widths)), widths)
    return TargetTokens(
        ids=torch.from_numpy(ids).to(device), rows=torch.from_numpy(rows).to(device)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadGradients:
    """Where the derivatives by the layer's own parameters are summed: weight (V, H), bias (V,)."""

    weight: Tensor
    bias: Tensor | None

    def add(self, grad_logits_CV: Tensor, hidden_CH: Tensor) -> None:
        self.weight.addmm_(grad_logits_CV.T, hidden_CH)
        if self.bias is not None:
            self.bias.add_(grad_logits_CV.sum(0))


class Head:
    """The output layer, frozen unless its owner sets `gradients`, under whatever adapters its callers name."""

    def __init__(self, linear: nn.Linear, chunk_values: int = CHUNK_VALUES) -> None:
        self._weight = linear.weight.detach()
        self._bias = None if linear.bias is None else linear.bias.detach()
        vocab_size = len(self._weight)
        self.chunk_rows = max(MIN_CHUNK_ROWS, chunk_values // vocab_size)
        self._buffer = torch.empty(0, vocab_size, device=self._weight.device)
        self.gradients: HeadGradients | None = None

    @property
    def buffer_bytes(self) -> int:
        """What the one buffer of logits takes at most."""
        return self.chunk_rows * len(self._weight) * torch.float32.itemsize

    @torch.no_grad()
    def logprobs(self, hidden_TH: Tensor, targets: TargetTokens, adapters: Adapters) -> Tensor:
        """float32 (E,)."""
        logprobs = torch.empty(len(targets.ids), device=hidden_TH.device)
        for start, stop in self._chunks(len(hidden_TH)):
            chunk, here = targets.between(start, stop)
            logits_CV, _, _ = self._logits(hidden_TH[start:stop], adapters.between(start, stop))
            logprobs[here] = _softmax_(logits_CV, chunk)
        return logprobs

    @torch.no_grad()
    def backward(
        self, hidden_TH: Tensor, targets: TargetTokens, gradient: Tensor, adapters: Adapters
    ) -> Tensor:
        """Adds the adapters' gradients to their buffers; rows without a gradient cost nothing.

        Args:
            gradient: d loss / d lp, float32 (E,).

        Returns:
            d loss / d hidden (T, H), float32.
        """
        grad_hidden = torch.zeros_like(hidden_TH, dtype=torch.float32)
        rows = _rows_with(gradient, targets, len(hidden_TH)).nonzero().squeeze(1)
        chosen, where = targets.select(rows, len(hidden_TH))
        _, grad_hidden[rows] = self._sweep(
            hidden_TH[rows], chosen, gradient[where], adapters.select(rows)
        )
        return grad_hidden

    @torch.no_grad()
    def score_and_backward(
        self, hidden_TH: Tensor, targets: TargetTokens, gradient: Tensor, adapters: Adapters
    ) -> tuple[Tensor, Tensor]:
        """(logprobs (E,), d loss / d hidden), as `backward`; logits of a row are computed once for both."""
        logprobs = torch.empty(len(targets.ids), device=hidden_TH.device)
        grad_hidden = torch.zeros_like(hidden_TH, dtype=torch.float32)
        is_active = _rows_with(gradient, targets, len(hidden_TH))
        rows = is_active.nonzero().squeeze(1)
        chosen, where = targets.select(rows, len(hidden_TH))
        logprobs[where], grad_hidden[rows] = self._sweep(
            hidden_TH[rows], chosen, gradient[where], adapters.select(rows)
        )
        rows = (~is_active).nonzero().squeeze(1)
        chosen, where = targets.select(rows, len(hidden_TH))
        logprobs[where] = self.logprobs(hidden_TH[rows], chosen, adapters.select(rows))
        return logprobs, grad_hidden

    def _sweep(
        self, hidden_TH: Tensor, targets: TargetTokens, gradient: Tensor, adapters: Adapters
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets.ids), device=hidden_TH.device)
        grad_hidden = torch.empty_like(hidden_TH, dtype=torch.float32)
        for start, stop in self._chunks(len(hidden_TH)):
            chunk, here = targets.between(start, stop)
            chunk_adapters = adapters.between(start, stop)
            logits_CV, hidden_CH, downs = self._logits(hidden_TH[start:stop], chunk_adapters)
            grad_CH = grad_hidden[start:stop]
            logprobs[here] = _softmax_(logits_CV, chunk)
            _to_gradient_(logits_CV, chunk, gradient[here])
            storage.back_product(logits_CV, self._weight, out=grad_CH)
            if self.gradients is not None:
                self.gradients.add(logits_CV, hidden_CH)
            chunk_adapters.add_gradients(logits_CV, hidden_CH, downs, grad_CH)
        return logprobs, grad_hidden

    def _chunks(self, num_rows: int) -> list[tuple[int, int]]:
        starts = range(0, num_rows, self.chunk_rows)
        return [(start, min(start + self.chunk_rows, num_rows)) for start in starts]

    def _logits(self, hidden_CH: Tensor, adapters: Adapters) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(logits in the one buffer, hidden states in float32, A h of each adapter)."""
        if len(self._buffer) < len(hidden_CH):
            self._buffer = self._weight.new_empty(
                len(hidden_CH), len(self._weight), dtype=torch.float32
            )
        logits_CV, wide_CH = self._buffer[: len(hidden_CH)], hidden_CH.float()
        if hidden_CH.is_cuda and hidden_CH.dtype == self._weight.dtype != torch.float32:
            torch.mm(hidden_CH, self._weight.T, out_dtype=torch.float32, out=logits_CV)
        else:
            storage.product(wide_CH, self._weight, out=logits_CV)
        if self._bias is not None:
            logits_CV += self._bias
        return logits_CV, wide_CH, adapters.add_to(logits_CV, wide_CH)


def _rows_with(gradient: Tensor, targets: TargetTokens, num_rows: int) -> Tensor:
    """bool (T,): whether a row has any target whose logprob matters."""
    by_row = torch.zeros(num_rows, device=gradient.device)
    return by_row.index_add_(0, targets.rows, gradient.abs()) > 0


def _softmax_(logits_CV: Tensor, targets: TargetTokens) -> Tensor:
    """Turns logits into probabilities, in place, and returns the log-probabilities of the targets.

    The normaliser comes from the largest entry of each row, whose probability is at least 1/V and so never
    underflows: logsumexp(z) = max z - log(max p).
    """
    at_target = logits_CV[targets.rows, targets.ids]
    largest = logits_CV.amax(dim=1)
    torch.softmax(logits_CV, dim=1, out=logits_CV)
    log_normaliser = largest - logits_CV.amax(dim=1).log_()
    return at_target - log_normaliser[targets.rows]


def _to_gradient_(probabilities_CV: Tensor, targets: TargetTokens, gradient: Tensor) -> None:
    """Turns probabilities into d loss / d logits, in place."""
    by_row = torch.zeros(len(probabilities_CV), device=gradient.device)
    by_row.index_add_(0, targets.rows, gradient)
    probabilities_CV.mul_(by_row.neg_().unsqueeze(1))
    probabilities_CV.index_put_((targets.rows, targets.ids), gradient, accumulate=True)
