"""Evaluators of one's own: one asks a trainer, one a sampler. Prints a line of JSON."""

# pyright: reportMissingImports=false
# Runs in the cookbook's environment.

from __future__ import annotations

import asyncio
import json

import tinker
import torch
from tinker import TensorData
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator, TrainingClientEvaluator
from tinker_cookbook.renderers import Renderer, get_renderer, get_text_content

MODEL, RENDERER, RANK = "Qwen/Qwen3.5-4B", "qwen3_5_disable_thinking", 16
TEXTS = ("Anna has a red brick.", "Is David a friend of Emma?", "What is 3 + 4?")
ANSWERS = {"What is 1 + 2?": "3", "Guess the number.": "guess", "What is 50 + 9?": "59"}


class Surprise(TrainingClientEvaluator):
    """How improbable texts are to the trainer: nats a token."""

    def __init__(self, data: list[tinker.Datum]) -> None:
        self.data = data

    async def __call__(self, training_client: tinker.TrainingClient) -> dict[str, float]:
        future = await training_client.forward_async(self.data, loss_fn="cross_entropy")
        result = await future.result_async()
        nats = count = 0.0
        for datum, output in zip(self.data, result.loss_fn_outputs, strict=True):
            weights = datum.loss_fn_inputs["weights"].to_torch()
            nats -= (output["logprobs"].to_torch() * weights).sum().item()
            count += weights.sum().item()
        return {"nll": nats / count, "sum": nats, "loss": result.metrics["loss:sum"]}


class Accuracy(SamplingClientEvaluator):
    """How many of the most probable answers hold what they should."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        params = tinker.SamplingParams(
            max_tokens=32, temperature=0.0, stop=self.renderer.get_stop_sequences()
        )
        right = 0
        for question, answer in ANSWERS.items():
            prompt = self.renderer.build_generation_prompt([{"role": "user", "content": question}])
            response = await sampling_client.sample_async(
                prompt=prompt, sampling_params=params, num_samples=1
            )
            message, _ = self.renderer.parse_response(response.sequences[0].tokens)
            right += answer in get_text_content(message).lower()
        return {"accuracy": right / len(ANSWERS), "right": float(right)}


async def main() -> None:
    service = tinker.ServiceClient()
    training = await service.create_lora_training_client_async(base_model=MODEL, rank=RANK)
    tokenizer = training.get_tokenizer()
    data = [datum(tokenizer.encode(text)) for text in TEXTS]
    surprise = await Surprise(data)(training)
    sampler = await training.save_weights_and_get_sampling_client_async()
    renderer = get_renderer(RENDERER, tokenizer)
    accuracies = [await Accuracy(renderer)(sampler) for _ in range(2)]
    print(json.dumps({"surprise": surprise, "accuracies": accuracies}))


def datum(tokens: list[int]) -> tinker.Datum:
    inputs = {
        "target_tokens": torch.tensor(tokens[1:]),
        "weights": torch.ones(len(tokens) - 1),
    }
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: TensorData.from_torch(value) for name, value in inputs.items()},
    )


asyncio.run(main())
