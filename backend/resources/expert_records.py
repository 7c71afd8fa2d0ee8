"""Which experts sampled tokens went through, kept for training samples that replay them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from backend.generator.base import SampleCall, SampleResult
from backend.resources.records import LIFETIME_S, Records

Array = np.ndarray

# A token of a model with 48 layers and 8 experts a token takes 384 bytes: room for 5 million.
MAX_BYTES = 2 * 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRecord:
    """One sampled sequence, and the experts of all its tokens that the model has read: all but the last.

    model: the base model's name. prompt, tokens: int32 (P,) and (N,). prompt_experts, experts: uint8, or int16 where
    there are more than 256 of them, (P, L, K) and (N - 1, L, K).
    """

    model: str
    prompt: Array
    tokens: Array
    prompt_experts: Array
    experts: Array

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.prompt, self.tokens, self.prompt_experts, self.experts

    @property
    def all_tokens(self) -> Array:
        """int32 (P + N,)."""
        return np.concatenate([self.prompt, self.tokens])

    @property
    def all_experts(self) -> Array:
        """(P + N - 1, L, K), as they are kept."""
        return np.concatenate([self.prompt_experts, self.experts])


class ExpertRecords(Records[ExpertRecord]):
    """See `Records`."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        lifetime_s: float = LIFETIME_S,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__(clock, lifetime_s=lifetime_s, max_bytes=max_bytes)


def expert_records(model: str, call: SampleCall, result: SampleResult) -> list[ExpertRecord | None]:
    """Of each sequence; None where the engine gave no experts.

    What they share is kept once. Copies: an engine's arrays may be parts of larger ones.
    """
    prompt = np.array(call.prompt, np.int32)
    shared: Array | None = None
    records: list[ExpertRecord | None] = []
    for sequence in result.sequences:
        if sequence.routed_experts is None:
            records.append(None)
            continue
        of_prompt, own = np.split(_compact(sequence.routed_experts), [len(prompt)])
        if shared is None or not np.array_equal(shared, of_prompt):
            # An engine that read the prompt twice may have sent a token elsewhere the second time.
            shared = of_prompt.copy()
        record = ExpertRecord(
            model=model,
            prompt=prompt,
            tokens=np.array(sequence.tokens, np.int32),
            prompt_experts=shared,
            experts=own.copy(),
        )
        assert len(record.experts) == len(record.tokens) - 1, "all tokens but the last were read"
        records.append(record)
    return records


def _compact(experts: Array) -> Array:
    return experts.astype(np.uint8 if experts.max() < 256 else np.int16)
