"""Whether this engine computes a model as transformers does: asked once, before anything is sampled from it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from backend.generator.attention import Part, Plan
from backend.generator.kv_cache import KVCache
from backend.generator.model_runner import ModelRunner
from backend.trainer.base_model import BaseModel
from together_post_training.errors import Reason, fail

_PROMPT_LENGTHS = (7, 3)
_NUM_SAMPLED = 2


@torch.inference_mode()
def check_equals_transformers(base: BaseModel, runner: ModelRunner) -> None:
    """Reads two packed prompts, continues both token by token, and compares with the model's own forward.

    Raises:
        PostTrainingError: UNIMPLEMENTED, with the difference.
    """
    sequences = [
        torch.arange(length + _NUM_SAMPLED, device=base.device) % base.info.limits.vocab_size
        for length in _PROMPT_LENGTHS
    ]
    gap = max(
        float((ours - base.plain_logprobs(tokens)).abs().max())
        for ours, tokens in zip(_ours(runner, sequences), sequences, strict=True)
    )
    if not gap < base.check_tolerance:
        model_type = base.module.config.model_type
        raise fail(
            Reason.UNIMPLEMENTED,
            f"Model type {model_type!r} cannot be sampled from yet: log-probabilities computed here differ from the "
            f"model's own by {gap:g}.",
            model_type=model_type,
            gap=gap,
        )


def _ours(runner: ModelRunner, sequences: list[Tensor]) -> list[Tensor]:
    """For each sequence, log-probabilities (T, V): its prompt read in two parts, the rest one token per step."""
    cache = KVCache(max_tokens=1024)
    rows = [cache.take(len(tokens)) for tokens in sequences]
    parts: list[list[Tensor]] = [[] for _ in sequences]
    bounds = [[0, n // 2, n] for n in _PROMPT_LENGTHS]
    for spans in zip(*(itertools.pairwise(of_one) for of_one in bounds), strict=True):
        plan = runner.prefill_plan(
            [Part(row, lo, hi - lo) for row, (lo, hi) in zip(rows, spans, strict=True)]
        )
        _read(runner, sequences, spans, plan, parts)
    for row in rows:
        row.pool.run(row)
    for step in range(_NUM_SAMPLED):
        spans = [(n + step, n + step + 1) for n in _PROMPT_LENGTHS]
        plan = runner.decode_plan(rows, [stop for _, stop in spans])
        _read(runner, sequences, spans, plan, parts)
    return [runner.logits(torch.cat(of_sequence), []).log_softmax(dim=1) for of_sequence in parts]


def _read(
    runner: ModelRunner,
    sequences: Sequence[Tensor],
    spans: Sequence[tuple[int, int]],
    plan: Plan,
    parts: Sequence[list[Tensor]],
) -> None:
    """Adds the hidden states of a span of each sequence to its parts."""
    hidden_TH = runner.hidden(
        torch.cat([tokens[lo:hi] for tokens, (lo, hi) in zip(sequences, spans, strict=True)]),
        torch.cat([torch.arange(*span, device=runner.device) for span in spans]),
        [],
        plan,
    )
    lengths = [hi - lo for lo, hi in spans]
    for of_one, hidden in zip(parts, hidden_TH.split(lengths), strict=True):
        of_one.append(hidden)
