"""Tiny models that tests load like any other: directories in Hugging Face's format, made on the spot.

succ16  a closed-form bigram behind a real Llama
rand    random weights, large enough that every fault in a computation moves log-probabilities by whole nats
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 128
MAX_SEQ_LENGTH = 64
_INIT_STD = 0.5
# What some architectures add to the common shape.
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_SPECIAL = {
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    # Its first layer has no experts.
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "gpt2": {"n_inner": 48},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "olmo3": {"sliding_window": 8},
    "olmoe": _EXPERTS,
    "phi3": {"sliding_window": 8},
    # Its first layer has no experts.
    "qwen2_moe": {
        **_EXPERTS,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {**_EXPERTS, "moe_intermediate_size": 24},
    "starcoder2": {"sliding_window": 8},
}


def succ16(directory: Path) -> Path:
    """16 tokens; the successor (x + 1) mod 16 has logit 4, every other 0.

    One-hot embeddings pass through layers whose outputs are zero; the final RMSNorm makes them 4 times a unit vector.
    """
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    module = _initialised(LlamaForCausalLM, config, seed=0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        module.model.embed_tokens.weight.copy_(torch.eye(16))
        module.lm_head.weight.copy_(torch.eye(16).roll(1, dims=0))
    module.save_pretrained(directory)
    return directory


def rand(directory: Path, model_type: str = "llama", *, tied: bool = False, **settings) -> Path:
    """128 tokens, 2 layers, hidden 32, 4 heads over 2 of keys and values, a window of 64 tokens."""
    config = AutoConfig.for_model(
        model_type,
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": MAX_SEQ_LENGTH,
            "tie_word_embeddings": tied,
            "initializer_range": _INIT_STD,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        | _SPECIAL.get(model_type, {})
        | settings,
    )
    module = _initialised(AutoModelForCausalLM.from_config, config, seed=1)
    assert spread(module) > 1, "a model this flat would hide faults"
    module.save_pretrained(directory)
    return directory


def spread(module) -> float:
    """Standard deviation of the log-probabilities of random targets."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(module.config.vocab_size, (1, 48), generator=generator)
    with torch.no_grad():
        logprobs = module(tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
    return float(logprobs.gather(1, tokens[0, 1:, None]).std())


def _initialised(make, config, *, seed: int):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(config).eval()
