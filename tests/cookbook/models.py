"""Small models under the names of large ones: two layers that have read a few hundred pages, made on the spot.

They write in the form of their chat templates, stop, and put numbers where numbers belong, but know nothing: supervised
losses have far to fall, and rewards are neither all zero nor all one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.cookbook import conversations
from tests.cookbook.conversations import Turn

NAMES = (
    "Qwen/Qwen3-4B-Instruct-2507",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-8B-Base",
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3.5-9B-Base",
    "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.5-35B-A3B-Base",
    "Qwen/Qwen3.6-27B",
    "Qwen/Qwen3.6-35B-A3B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.2-1B",
)
END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"
_SPECIAL = (
    END_OF_TEXT,
    END_OF_TURN,
    "<|im_start|>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
)
# One token each, but part of the text, as Qwen's are.
_MARKS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
_MAX_MERGED = 640
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_ROWS, _ROW_TOKENS, _STEPS, _LEARNING_RATE = 8, 384, 200, 4e-3


def save(directory: Path) -> None:
    """Writes every name's model below `directory`; they share their weights' file."""
    tokenizer = _tokenizer()
    module = _model(tokenizer)
    for name in NAMES:
        target = directory / name
        target.mkdir(parents=True)
        has_chat = not name.endswith(("-Base", "-8B", "-1B")) or name == "Qwen/Qwen3-8B"
        eos = END_OF_TURN if has_chat else END_OF_TEXT
        tokenizer.eos_token = eos
        tokenizer.save_pretrained(target)
        module.config.eos_token_id = _id(tokenizer, eos)
        module.config.save_pretrained(target)
        if name == NAMES[0]:
            module.save_pretrained(target)
        else:
            (target / "model.safetensors").hardlink_to(directory / NAMES[0] / "model.safetensors")


def _tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and what they merge to in our own text; each digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=_MAX_MERGED,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(0)
    pages = ("".join(_written(rng)) for _ in range(400))
    tokenizer.train_from_iterator(pages, trainer)
    tokenizer.add_tokens(list(_MARKS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )


def _model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32768,
        # It reads the end of a prompt as it read in training, however long the beginning is.
        use_sliding_window=True,
        sliding_window=_ROW_TOKENS // 4,
        max_window_layers=0,
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=_id(tokenizer, END_OF_TEXT),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Qwen3ForCausalLM(config)
    _train(module, _rows(tokenizer))
    return module.eval()


def _id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    (found,) = tokenizer.encode(token, add_special_tokens=False)
    return found


def _train(module: Qwen3ForCausalLM, rows: Iterator[list[int]]) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=_STEPS)
    for _ in range(_STEPS):
        tokens = torch.tensor([next(rows) for _ in range(_ROWS)])
        loss = module(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _rows(tokenizer: PreTrainedTokenizerFast) -> Iterator[list[int]]:
    rng = random.Random(1)
    row: list[int] = []
    while True:
        for piece in _written(rng):
            row += tokenizer.encode(piece, add_special_tokens=False)
        if len(row) >= _ROW_TOKENS:
            yield row[:_ROW_TOKENS]
            row = []


def _written(rng: random.Random) -> Sequence[str]:
    """A conversation in one of the templates, in the pieces that renderers encode one by one."""
    turns = conversations.read(rng)
    template = rng.choice((_role_colon, _chat, _thinking, _not_thinking, _llama))
    return [*template(turns), END_OF_TEXT]


def _role_colon(turns: Sequence[Turn]) -> list[str]:
    pieces = [
        piece
        for turn in turns
        for piece in ("User:", f" {turn.question}\n\n", "Assistant:", f" {turn.answer}\n\n")
    ]
    return [*pieces, "User:"]


def _chat(turns: Sequence[Turn]) -> list[str]:
    return _marked(turns, opening="", thought="")


def _thinking(turns: Sequence[Turn]) -> list[str]:
    return _marked(turns, opening="<think>\n", thought="\n</think>\n\n")


def _not_thinking(turns: Sequence[Turn]) -> list[str]:
    return _marked(turns, opening="<think>\n\n</think>\n\n", thought="")


def _marked(turns: Sequence[Turn], *, opening: str, thought: str) -> list[str]:
    pieces = []
    for turn in turns:
        pieces += [f"<|im_start|>user\n{turn.question}<|im_end|>\n"]
        pieces += [f"<|im_start|>assistant\n{opening}", f"{thought}{turn.answer}<|im_end|>", "\n"]
    return pieces


def _llama(turns: Sequence[Turn]) -> list[str]:
    pieces = ["<|begin_of_text|>"]
    for turn in turns:
        for role, text in (("user", turn.question), ("assistant", turn.answer)):
            pieces += [f"<|start_header_id|>{role}<|end_header_id|>\n\n", f"{text}<|eot_id|>"]
    return pieces
