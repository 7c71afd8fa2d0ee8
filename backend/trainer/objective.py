"""What a pass differentiates: a loss by name, or derivatives that the caller brought."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backend.trainer.base import Pass
from together_post_training import losses
from together_post_training.losses import LossValue

Array = np.ndarray


class Objective:
    """Of one pass; remembers the loss of every sample it has seen.

    With derivatives of the caller's there is no loss to evaluate or report: only the caller knows it.
    """

    def __init__(self, work: Pass) -> None:
        self._work = work
        self._is_custom = work.gradients is not None
        self._params: losses.Params = {} if self._is_custom else _prepared(work)
        self._values: dict[int, LossValue] = {}

    @property
    def is_linear(self) -> bool:
        """Whether the derivative is the same whatever the log-probabilities are."""
        return self._is_custom or losses.contract(self._work.loss).linear

    def linear_derivative(self, chosen: Sequence[int]) -> list[Array]:
        """d objective / d logprob of these samples, before any logprob is known."""
        if self._work.gradients is not None:
            return [self._work.gradients[i] for i in chosen]
        shapes = [self._work.samples[i].inputs["target_tokens"].shape for i in chosen]
        zeros = [np.zeros(shape, np.float32) for shape in shapes]
        return [self._evaluate(i, lp).gradient for i, lp in zip(chosen, zeros, strict=True)]

    def evaluate(self, chosen: Sequence[int], logprobs: Sequence[Array]) -> list[Array]:
        """Records the losses of these samples; returns d loss / d logprob.

        Raises:
            PostTrainingError: NON_FINITE_LOSS, naming the sample.
        """
        if self._is_custom:
            return self.linear_derivative(chosen)
        for i, lp in zip(chosen, logprobs, strict=True):
            self._values[i] = self._evaluate(i, lp)
        return [self._values[i].gradient for i in chosen]

    def metrics(self) -> dict[str, float]:
        """Of the whole pass, "name:reduction"."""
        num_tokens = sum(sample.num_tokens for sample in self._work.samples)
        if self._is_custom:
            return {"tokens:sum": float(num_tokens)}
        # In the caller's order, so that sums do not depend on how the pass was divided.
        return losses.summarize([self._values[i] for i in sorted(self._values)], num_tokens)

    def _evaluate(self, i: int, logprobs: Array) -> LossValue:
        inputs = self._work.samples[i].inputs
        return losses.evaluate(self._work.loss, logprobs, inputs, self._params, sample=i)


def _prepared(work: Pass) -> losses.Params:
    """What the service has prepared stays as it is; callers of the trainer alone may leave it to this."""
    params = losses.complete_params(work.loss, work.params)
    return losses.prepare(work.loss, params, [sample.inputs for sample in work.samples])
