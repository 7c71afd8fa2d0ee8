"""Asks what a server has and completes a text: once, and three times in one call. Prints a line of JSON."""

from __future__ import annotations

import asyncio
import json

import tinker
from tinker import types

MODEL, TEXT = "Qwen/Qwen3.5-9B-Base", "What is 20 + 22?"


async def main() -> None:
    service = tinker.ServiceClient()
    capabilities = await service.get_server_capabilities_async()
    sampler = await service.create_sampling_client_async(base_model=MODEL)
    tokenizer = sampler.get_tokenizer()

    prompt = types.ModelInput.from_ints(tokenizer.encode(TEXT))
    one = await sampler.sample_async(
        prompt=prompt,
        sampling_params=types.SamplingParams(max_tokens=30, temperature=0.5),
        num_samples=1,
    )
    three = await sampler.sample_async(
        prompt=prompt,
        sampling_params=types.SamplingParams(max_tokens=30, temperature=0.7),
        num_samples=3,
    )
    (sequence,) = one.sequences
    assert sequence.logprobs is not None
    report = {
        "models": [model.model_name for model in capabilities.supported_models],
        "tokens": len(sequence.tokens),
        "logprobs": sequence.logprobs[:10],
        "stop_reason": sequence.stop_reason,
        "text": tokenizer.decode(sequence.tokens),
        "others": [tokenizer.decode(sequence.tokens) for sequence in three.sequences],
    }
    print(json.dumps(report))


asyncio.run(main())
