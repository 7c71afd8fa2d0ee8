"""Whether this engine computes a model as transformers does: asked once, before anything is sampled from it."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.generator.attention import DecodePlan, PrefillPlan
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
    """For each sequence, log-probabilities (T, V): its prompt read at once, the rest one token per step."""
    cache = KVCache(max_tokens=1024)
    rows = [cache.take(len(tokens)) for tokens in sequences]
    lengths = list(_PROMPT_LENGTHS)
    hidden = runner.hidden(
        torch.cat([tokens[:n] for tokens, n in zip(sequences, lengths, strict=True)]),
        torch.cat([torch.arange(n, device=runner.device) for n in lengths]),
        [],
        PrefillPlan([(n, [row]) for n, row in zip(lengths, rows, strict=True)], runner.device),
    )
    parts = [list(hidden.split(lengths))]
    for step in range(_NUM_SAMPLED):
        positions = [n + step for n in lengths]
        hidden = runner.hidden(
            torch.stack([tokens[i] for tokens, i in zip(sequences, positions, strict=True)]),
            torch.tensor(positions, device=runner.device),
            [],
            DecodePlan(rows, [i + 1 for i in positions], runner.device),
        )
        parts.append(list(hidden.split(1)))
    return [
        runner.logits(torch.cat(of_sequence), []).log_softmax(dim=1)
        for of_sequence in zip(*parts, strict=True)
    ]
