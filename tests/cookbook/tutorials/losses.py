"""Gives two samples to every kind of loss, without a step between. Prints a line of JSON: the sums."""

from __future__ import annotations

import asyncio
import json

import tinker
import torch
from tinker import TensorData
from tinker.types import LossFnType

POLICY_LOSSES: tuple[LossFnType, ...] = ("importance_sampling", "ppo", "cispo")
MODEL, RANK = "Qwen/Qwen3.5-4B", 16
QUESTION, ANSWER = "The horse is", " white."
# What the sampler is said to have given to every token of the answer.
LOGPROB = -0.7
CLIPS = {
    "tight": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "wide": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
}


async def main() -> None:
    service = tinker.ServiceClient()
    training = await service.create_lora_training_client_async(base_model=MODEL, rank=RANK)
    tokenizer = training.get_tokenizer()
    prompt, answer = tokenizer.encode(QUESTION), tokenizer.encode(ANSWER)
    tokens, before = prompt + answer, [0.0] * (len(prompt) - 1)

    def datum(**inputs: list[float]) -> tinker.Datum:
        named = {"target_tokens": torch.tensor(tokens[1:])}
        named |= {name: torch.tensor(before + values) for name, values in inputs.items()}
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={name: TensorData.from_torch(value) for name, value in named.items()},
        )

    written = datum(weights=[1.0] * len(answer))
    sampled = datum(logprobs=[LOGPROB] * len(answer), advantages=[1.0] * len(answer))

    async def run(
        sample: tinker.Datum, loss: LossFnType, config: dict[str, float] | None = None
    ) -> tinker.ForwardBackwardOutput:
        future = await training.forward_backward_async(
            [sample], loss_fn=loss, loss_fn_config=config
        )
        return await future.result_async()

    def squares(
        data: list[tinker.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        loss = sum(((lp**2).sum() for lp in logprobs), start=torch.tensor(0.0))
        return loss, {"squares": loss.item()}

    results: dict[str, tinker.ForwardBackwardOutput] = {
        "cross_entropy": await run(written, "cross_entropy")
    }
    for loss in POLICY_LOSSES:
        results[loss] = await run(sampled, loss)
    for name, config in CLIPS.items():
        results[name] = await run(sampled, "ppo", config)
    custom = await (await training.forward_backward_custom_async([written], squares)).result_async()

    logprobs = {name: result.loss_fn_outputs[0]["logprobs"] for name, result in results.items()}
    report = {
        **{name: result.metrics["loss:sum"] for name, result in results.items()},
        **{name: custom.metrics[name] for name in ("squares", "loss:sum")},
        "logprobs": logprobs["cross_entropy"].tolist(),
        "rl_logprobs": logprobs["importance_sampling"].tolist(),
        "answer_length": len(answer),
    }
    print(json.dumps(report))


asyncio.run(main())
