"""A step of training, saved in every way; resumed, sampled from, listed, published and downloaded. Prints a line of
JSON.

    python checkpoints.py DIRECTORY state|sampler|external      what of the three is downloaded
"""

# pyright: reportMissingImports=false
# Runs in the cookbook's environment.

from __future__ import annotations

import asyncio
import json
import sys

import tinker
from tinker_cookbook import model_info, renderers, weights
from tinker_cookbook.supervised.data import conversation_to_datum

MODEL, RANK, DAY_S = "Qwen/Qwen3.5-4B", 16, 24 * 3600
QUESTION, ANSWER = "What is the drum?", "The drum is red."


async def main(directory: str, kind: str) -> None:
    service = tinker.ServiceClient()
    training = await service.create_lora_training_client_async(base_model=MODEL, rank=RANK)
    name = model_info.get_recommended_renderer_name(MODEL)
    renderer = renderers.get_renderer(name, training.get_tokenizer())
    question = {"role": "user", "content": QUESTION}
    datum = conversation_to_datum(
        [question, {"role": "assistant", "content": ANSWER}],
        renderer,
        max_length=256,
        train_on_what=renderers.TrainOnWhat.LAST_ASSISTANT_MESSAGE,
    )
    passed = await training.forward_backward_async([datum], loss_fn="cross_entropy")
    await passed.result_async()
    stepped = await training.optim_step_async(tinker.AdamParams(learning_rate=1e-3))
    await stepped.result_async()

    sampler_path = (await training.save_weights_for_sampler("sampler").result_async()).path
    state_path = (await training.save_state("state").result_async()).path
    short_lived = training.save_weights_for_sampler("short-lived", ttl_seconds=3600)
    short_lived_path = (await short_lived.result_async()).path

    resumed = await service.create_training_client_from_state_async(state_path)
    resumed_info = await resumed.get_info_async()
    sampler = await service.create_sampling_client_async(model_path=sampler_path)
    response = await sampler.sample_async(
        prompt=renderer.build_generation_prompt([question]),
        sampling_params=tinker.SamplingParams(
            max_tokens=40, temperature=0.5, stop=renderer.get_stop_sequences()
        ),
        num_samples=3,
    )

    rest = service.create_rest_client()
    run = (await training.get_info_async()).model_id
    expiries = []
    await rest.set_checkpoint_ttl_from_tinker_path_async(sampler_path, ttl_seconds=7 * DAY_S)
    expiries.append(await expires(rest, run, sampler_path))
    await rest.set_checkpoint_ttl_from_tinker_path_async(sampler_path, ttl_seconds=None)
    expiries.append(await expires(rest, run, sampler_path))
    await rest.publish_checkpoint_from_tinker_path_async(sampler_path)
    published = (await find(rest, run, sampler_path)).public
    await rest.unpublish_checkpoint_from_tinker_path_async(sampler_path)
    everyones = await rest.list_user_checkpoints_async(limit=5)

    if kind == "external":
        wanted = (await training.save_weights_external("external").result_async()).path
    else:
        wanted = {"state": state_path, "sampler": sampler_path}[kind]
    saved = await asyncio.to_thread(weights.download, tinker_path=wanted, output_dir=directory)

    report = {
        "run": run,
        "resumed": resumed_info.model_id,
        "rank": resumed_info.lora_rank,
        "answers": len(response.sequences),
        "paths": [sampler_path, state_path, short_lived_path],
        "listed": [
            [checkpoint.checkpoint_type, checkpoint.checkpoint_id]
            for checkpoint in (await rest.list_checkpoints_async(run)).checkpoints
        ],
        "everyones": [checkpoint.tinker_path for checkpoint in everyones.checkpoints],
        "expires": expiries,
        "short_lived_expires": await expires(rest, run, short_lived_path),
        "published": [published, (await find(rest, run, sampler_path)).public],
        "saved": saved,
    }
    print(json.dumps(report))


async def expires(rest: tinker.RestClient, run: str, path: str) -> bool:
    return (await find(rest, run, path)).expires_at is not None


async def find(rest: tinker.RestClient, run: str, path: str) -> tinker.Checkpoint:
    listed = await rest.list_checkpoints_async(run)
    return next(found for found in listed.checkpoints if found.tinker_path == path)


asyncio.run(main(*sys.argv[1:]))
