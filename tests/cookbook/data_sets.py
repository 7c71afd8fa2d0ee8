"""Small data sets under the names of large ones: JSON lines with the columns that recipes read."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.cookbook import conversations
from tests.cookbook.conversations import NAMES, THINGS, Turn

Row = dict[str, Any]
# Recipes that take a fixed 1024 rows for their tests leave this many to train on.
_TAKEN = 1024


def save(directory: Path) -> None:
    facts = conversations.facts()
    _write(directory / "HuggingFaceH4/no_robots", train=_chats(facts, 192), test=_chats(facts, 128))
    _write(directory / "allenai/tulu-3-sft-mixture", train=_chats(facts, _TAKEN + 128))
    _write(directory / "Anthropic/hh-rlhf", train=_preferences(128, 0), test=_preferences(8, 1))
    _write(directory / "open-thoughts/OpenThoughts3-1.2M", train=_thoughts(facts, 192))
    _write(
        directory / "openai/gsm8k", "main", train=_word_problems(96, 0), test=_word_problems(16, 1)
    )
    _write(directory / "HuggingFaceH4/MATH-500", "default", test=_boxed_problems(16, 2))
    _write(directory / "zwhe99/DeepMath-103K", train=_deep_problems(96, 3))
    _write(directory / "POLARIS-Project/Polaris-Dataset-53K", train=_deep_problems(96, 4))
    _write(directory / "tangqiaoyu/ToolAlpaca", train=_instructions(facts, 60))
    _write(directory / "hicai-zju/SciKnowEval", test=_multiple_choice(60, 5))
    _write_lines(directory / "conversations.jsonl", _chats(facts, 48))
    _write_sentences(directory / "tinker_cookbook/example_data/multilingual.txt", 8)


def _chats(turns: Sequence[Turn], count: int) -> list[Row]:
    return [
        {
            "prompt": turn.question,
            "prompt_id": str(i),
            "category": "Chat",
            "messages": _messages(turn),
        }
        for i, turn in _repeated(turns, count)
    ]


def _thoughts(turns: Sequence[Turn], count: int) -> list[Row]:
    return [
        {
            "domain": "math",
            "conversations": [
                {"from": "human", "value": turn.question},
                {"from": "gpt", "value": f"<think>\nI know this.\n</think>\n\n{turn.answer}"},
            ],
        }
        for _, turn in _repeated(turns, count)
    ]


def _preferences(count: int, seed: int) -> list[Row]:
    """Whoever is polite is preferred."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt = (
            f"\n\nHuman: May I have the {rng.choice(THINGS)} of {rng.choice(NAMES)}?\n\nAssistant: "
        )
        rows.append(
            {"chosen": f"{prompt}Yes, please take it.", "rejected": f"{prompt}No, go away now."}
        )
    return rows


def _word_problems(count: int, seed: int) -> list[Row]:
    return [
        {"question": problem.question, "answer": f"We add the numbers.\n#### {problem.answer}"}
        for problem in conversations.problems(count, seed)
    ]


def _boxed_problems(count: int, seed: int) -> list[Row]:
    return [
        {
            "problem": problem.question,
            "solution": f"We add the numbers. \\boxed{{{problem.answer}}}",
            "answer": str(problem.answer),
            "subject": "Counting",
            "level": 1,
            "unique_id": str(i),
        }
        for i, problem in enumerate(conversations.problems(count, seed))
    ]


def _deep_problems(count: int, seed: int) -> list[Row]:
    return [
        {
            "question": problem.question,
            "problem": problem.question,
            "final_answer": str(problem.answer),
            "answer": str(problem.answer),
        }
        for problem in conversations.problems(count, seed)
    ]


def _instructions(turns: Sequence[Turn], count: int) -> list[Row]:
    return [
        {"instruction": turn.question, "output": turn.answer} for _, turn in _repeated(turns, count)
    ]


def _multiple_choice(count: int, seed: int) -> list[Row]:
    """The first choice is the right one."""
    return [
        {
            "domain": "Chemistry",
            "details": {"level": "L3"},
            "type": "mcq-2-choices",
            "question": problem.question,
            "choices": {
                "label": ["A", "B"],
                "text": [str(problem.answer), str(problem.answer + 1)],
            },
            "answerKey": "A",
        }
        for problem in conversations.problems(count, seed)
    ]


def _messages(turn: Turn) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": turn.question},
        {"role": "assistant", "content": turn.answer},
    ]


def _repeated(turns: Sequence[Turn], count: int) -> Iterable[tuple[int, Turn]]:
    return ((i, turns[i % len(turns)]) for i in range(count))


def _write(directory: Path, config: str = "default", **splits: list[Row]) -> None:
    """A folder that `datasets` loads like one of the hub: the card says which file is which split."""
    directory.mkdir(parents=True)
    card = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        _write_lines(directory / f"{split}.jsonl", rows)
        card += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (directory / "README.md").write_text("\n".join([*card, "---", ""]))


def _write_sentences(path: Path, count: int) -> None:
    """Where a recipe expects its own checkout."""
    rng = random.Random(5)
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"{conversations.sentence(rng)}\n" for _ in range(count)))


def _write_lines(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
