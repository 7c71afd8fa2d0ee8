"""The cookbook's data sets and evaluators around a loop of one's own. Prints a line of JSON for every evaluation."""

# pyright: reportMissingImports=false
# Runs in the cookbook's environment.

from __future__ import annotations

import asyncio
import json
import sys

import tinker
from tinker_cookbook import checkpoint_utils, tokenizer_utils
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised.common import compute_mean_nll
from tinker_cookbook.supervised.data import HFDatasetSource, InterleavedChatDatasetBuilder
from tinker_cookbook.supervised.nll_evaluator import NLLEvaluator, SamplerNLLEvaluator
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

MODEL, RENDERER = "Qwen/Qwen3-8B", "qwen3"


async def main(log_path: str) -> None:
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=MODEL,
        renderer_name=RENDERER,
        max_length=512,
        batch_size=16,
        train_on_what=TrainOnWhat.LAST_ASSISTANT_MESSAGE,
    )
    sources = [
        HFDatasetSource(path="HuggingFaceH4/no_robots"),
        HFDatasetSource(path="allenai/tulu-3-sft-mixture"),
    ]
    train, held_out = InterleavedChatDatasetBuilder(
        common_config=common, sources=sources, test_size=16
    )()
    assert held_out is not None
    tokenizer = tokenizer_utils.get_tokenizer(MODEL)
    by_forward = NLLEvaluator.from_dataset(held_out, tokenizer=tokenizer)
    by_sampler = SamplerNLLEvaluator.from_dataset(held_out, tokenizer=tokenizer)

    metadata: dict[str, str] = {}
    checkpoint_utils.add_renderer_name_to_user_metadata(metadata, RENDERER)
    service = tinker.ServiceClient(user_metadata=metadata)
    training = await service.create_lora_training_client_async(base_model=MODEL, rank=8)
    for step in range(4):
        sampler = await training.save_weights_and_get_sampling_client_async()
        batch = train.get_batch(step)
        passed = await training.forward_backward_async(batch, loss_fn="cross_entropy")
        stepped = await training.optim_step_async(tinker.AdamParams(learning_rate=3e-3))
        result = await passed.result_async()
        row = {"sampler": await by_sampler(sampler)}
        row["train"] = compute_mean_nll(
            [output["logprobs"] for output in result.loss_fn_outputs],
            [datum.loss_fn_inputs["weights"] for datum in batch],
        )
        await stepped.result_async()
        row["forward_after"] = await by_forward(training)
        print(json.dumps(row), flush=True)

    paths = await checkpoint_utils.save_checkpoint_async(
        training, name="end", log_path=log_path, kind="both", loop_state={"batch": 4}
    )
    renderer = await checkpoint_utils.get_renderer_name_from_checkpoint_async(
        service, paths["sampler_path"]
    )
    last = await service.create_sampling_client_async(model_path=paths["sampler_path"])
    print(json.dumps({"sampler": await by_sampler(last), "renderer": renderer}))


asyncio.run(main(sys.argv[1]))
