"""Tokens and messages through the cookbook's completers, and a model that judges its own answer. Prints a line of
JSON."""

# pyright: reportMissingImports=false
# Runs in the cookbook's environment.

from __future__ import annotations

import asyncio
import json
import re

import tinker
from tinker_cookbook.completers import TinkerMessageCompleter, TinkerTokenCompleter
from tinker_cookbook.renderers import get_renderer, get_text_content

MODEL, RENDERER = "Qwen/Qwen3.5-4B", "qwen3_5_disable_thinking"


async def main() -> None:
    service = tinker.ServiceClient()
    # Used while it is being made.
    sampler = service.create_sampling_client(base_model=MODEL)
    tokenizer = sampler.get_tokenizer()
    renderer = get_renderer(RENDERER, tokenizer)
    tokens = TinkerTokenCompleter(sampling_client=sampler, max_tokens=32, temperature=0.7)
    messages = TinkerMessageCompleter(
        sampling_client=sampler, renderer=renderer, max_tokens=32, temperature=0.7
    )

    async def ask(*texts: str) -> str:
        """Question, answer, question, ..."""
        roles = ("user", "assistant")
        turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        return get_text_content(await messages(turns))

    prompt = renderer.build_generation_prompt([{"role": "user", "content": "What is 7 + 8?"}])
    completed = await tokens(prompt, stop=renderer.get_stop_sequences())
    message = await messages([{"role": "user", "content": "Guess the number."}])
    after = await ask("Guess the number.", "Guess: 12", "Too low")
    candidate = await ask("What is 30 + 12?")
    verdict = await ask(f"Give the answer {candidate!r} a grade from 1 to 5.")
    grade = re.search(r"[1-5]", verdict)
    report = {
        "tokens": len(completed.tokens),
        "logprobs": completed.logprobs,
        "stop_reason": completed.stop_reason,
        "role": message["role"],
        "text": get_text_content(message),
        "after": after,
        "grade": int(grade.group()) if grade else None,
    }
    print(json.dumps(report))


asyncio.run(main())
