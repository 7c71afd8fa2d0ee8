"""Samples one after the other, all at once, and in groups. Prints a line of JSON: how many, and in what time."""

# pyright: reportMissingImports=false
# Runs in the cookbook's environment.

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Sequence

import tinker
from tinker_cookbook.renderers import get_renderer, get_text_content

MODEL, GROUP_SIZE = "Qwen/Qwen3.5-4B", 4
QUESTIONS = [f"What is {x} + {x + 1}?" for x in range(16)]


async def main() -> None:
    service = tinker.ServiceClient()
    sampler = await service.create_sampling_client_async(base_model=MODEL)
    renderer = get_renderer("qwen3_5", sampler.get_tokenizer())
    params = tinker.SamplingParams(
        max_tokens=60, temperature=0.7, stop=renderer.get_stop_sequences()
    )

    async def sample(question: str, count: int = 1) -> list[str]:
        prompt = renderer.build_generation_prompt([{"role": "user", "content": question}])
        response = await sampler.sample_async(
            prompt=prompt, num_samples=count, sampling_params=params
        )
        messages = (renderer.parse_response(sequence.tokens)[0] for sequence in response.sequences)
        return [get_text_content(message) for message in messages]

    async def in_turn() -> list[list[str]]:
        return [await sample(question) for question in QUESTIONS]

    report = {
        "in_turn": await timed(in_turn()),
        "at_once": await timed(asyncio.gather(*map(sample, QUESTIONS))),
        "group": await timed(asyncio.gather(sample(QUESTIONS[0], GROUP_SIZE))),
        "group_in_turn": await timed(
            asyncio.gather(*(sample(QUESTIONS[0]) for _ in range(GROUP_SIZE)))
        ),
        "groups_at_once": await timed(
            asyncio.gather(*(sample(question, GROUP_SIZE) for question in QUESTIONS))
        ),
    }
    print(json.dumps(report))


async def timed(texts: Awaitable[Sequence[list[str]]]) -> dict[str, float]:
    start = time.perf_counter()
    count = sum(map(len, await texts))
    return {"count": count, "seconds": time.perf_counter() - start}


asyncio.run(main())
