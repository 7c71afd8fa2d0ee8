"""What a model computes from files alone, with transformers and PEFT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tests.cookbook import conversations

BASE = "Qwen/Qwen3.5-9B-Base"


def known_tokens(hub: Path) -> list[int]:
    """A conversation that runs on the data set no_robots train on."""
    fact = conversations.facts()[0]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(hub / BASE)
    return tokenizer.encode(f"User: {fact.question}\n\nAssistant: {fact.answer}\n\nUser:")


def model_logprobs(directory: Path, tokens: Sequence[int]) -> list[float]:
    """Of each token but the first."""
    return _logprobs(AutoModelForCausalLM.from_pretrained(directory), tokens)


def adapter_logprobs(hub: Path, directory: Path, tokens: Sequence[int]) -> list[float]:
    """With an adapter of the base model that runs train by default."""
    base = AutoModelForCausalLM.from_pretrained(hub / BASE)
    return _logprobs(PeftModel.from_pretrained(base, str(directory)), tokens)


def _logprobs(module: PreTrainedModel | PeftModel, tokens: Sequence[int]) -> list[float]:
    row = torch.tensor([tokens])
    with torch.no_grad():
        logprobs = module(row, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, row[0, 1:, None])[:, 0].tolist()
