"""The model that the benchmarks run on: Qwen3's shape, hidden 256, 8 layers, random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 16_384


def save(directory: Path, *, vocab_size: int = VOCAB_SIZE) -> Path:
    """Writes it as a Hugging Face directory (float32, 60 MB with the usual vocabulary) and returns the directory."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory
