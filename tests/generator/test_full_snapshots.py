"""Snapshots of full weights in the embedded generator: right, without copies, and gone when they are."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from backend.generator.embedded import EmbeddedGenerator
from backend.generator.full_snapshots import FullSnapshots
from backend.trainer import base_model
from backend.trainer.base import FullWeights
from backend.trainer.base_model import BaseModel
from backend.trainer.model_layout import ModelLayout, under
from tests import models
from tests.generator.calls import call, random_prompt
from tests.generator.conftest import Wait
from together_post_training.errors import PostTrainingError, Reason

MODELS = ["qwen3", "llama-tied", "qwen3_moe"]


def random_weights(base: BaseModel, seed: int = 0) -> FullWeights:
    """Near the model's own, yet whole nats away from it."""
    stream = np.random.default_rng(seed)
    layout = ModelLayout(base.module)
    flat = torch.cat([p.detach().reshape(-1) for _, p in base.module.named_parameters()])
    tensors = {
        name: tensor + stream.normal(scale=0.1, size=tensor.shape).astype(np.float32)
        for name, tensor in layout.tensors.copies(flat).items()
    }
    return FullWeights(tensors=tensors)


def plain_logprobs(base: BaseModel, weights: FullWeights, tokens: list[int]) -> np.ndarray:
    """Of transformers' own forward, float32 (n - 1,)."""
    module = under(base, ModelLayout(base.module), weights).module
    with torch.no_grad():
        logits = module(torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
    return logits.log_softmax(-1).numpy()[np.arange(len(tokens) - 1), tokens[1:]]


def num_engines() -> int:
    return sum(thread.name == "generator" for thread in threading.enumerate())


def wait_for_engines(number: int) -> None:
    deadline = time.monotonic() + 10
    while num_engines() != number:
        assert time.monotonic() < deadline, f"{num_engines()} engines, not {number}"
        time.sleep(0.01)


@pytest.mark.parametrize("name", MODELS)
def test_full_snapshot_is_sampled_and_scored_as_transformers_computes_it(
    base_of: Callable[[str], BaseModel],
    generator_of: Callable[[str], EmbeddedGenerator],
    wait: Wait,
    name: str,
):
    base, generator = base_of(name), generator_of(name)
    weights = random_weights(base)
    wait(generator.add_snapshot("full", weights))
    prompt = random_prompt(9)
    wanted = plain_logprobs(base, weights, prompt)
    got = wait(generator.sample(call(prompt, snapshot="full", max_tokens=8, prompt_logprobs=True)))
    np.testing.assert_allclose(got.prompt_logprobs[1:], wanted, atol=1e-4)
    whole = prompt + got.sequences[0].tokens.tolist()
    np.testing.assert_allclose(
        got.sequences[0].logprobs, plain_logprobs(base, weights, whole)[8:], atol=1e-4
    )
    # The base is another model, and is what it was.
    of_base = wait(generator.sample(call(prompt, max_tokens=0, prompt_logprobs=True)))
    assert np.abs(of_base.prompt_logprobs[1:] - wanted).max() > 0.1
    generator.drop_snapshot("full")


def test_full_weights_are_not_copied_where_a_file_holds_a_whole_parameter(
    base_of: Callable[[str], BaseModel],
):
    base = base_of("llama-tied")
    weights = random_weights(base)
    parameters = ModelLayout(base.module).parameters_from(weights.tensors)
    for name, tensor in weights.tensors.items():
        assert parameters[name].data_ptr() == tensor.ctypes.data, name


def test_engine_of_a_full_snapshot_runs_from_its_first_sample_until_it_is_dropped(
    base_of: Callable[[str], BaseModel], wait: Wait
):
    before = num_engines()
    generator = EmbeddedGenerator(base_of("qwen3"))
    weights = random_weights(base_of("qwen3"))
    wait(generator.add_snapshot("full", weights))
    assert num_engines() == before + 1, "the base's alone"
    wait(generator.sample(call([1, 2], snapshot="full", max_tokens=2)))
    assert num_engines() == before + 2
    generator.drop_snapshot("full")
    wait_for_engines(before + 1)
    with pytest.raises(PostTrainingError) as caught:
        wait(generator.sample(call([1, 2], snapshot="full", max_tokens=2)))
    assert caught.value.reason == Reason.SNAPSHOT_NOT_FOUND
    wait(generator.add_snapshot("another", weights))
    wait(generator.sample(call([1, 2], snapshot="another", max_tokens=2)))
    wait(generator.close())
    wait_for_engines(before)


def test_full_snapshot_that_was_dropped_leaves_nothing_in_memory(
    base_of: Callable[[str], BaseModel], wait: Wait
):
    before = num_engines()
    generator = EmbeddedGenerator(base_of("qwen3"))
    weights = random_weights(base_of("qwen3"))
    arrays = [weakref.ref(tensor) for tensor in weights.tensors.values()]
    wait(generator.add_snapshot("full", weights))
    wait(generator.sample(call([1, 2], snapshot="full", max_tokens=4, prompt_logprobs=True)))
    del weights
    generator.drop_snapshot("full")
    wait_for_engines(before + 1)
    gc.collect()
    assert [array() for array in arrays if array() is not None] == []
    wait(generator.close())


def test_sample_that_runs_goes_on_when_its_full_snapshot_is_dropped(
    base_of: Callable[[str], BaseModel], wait: Wait
):
    before = num_engines()
    generator = EmbeddedGenerator(base_of("qwen3"))
    weights = random_weights(base_of("qwen3"))
    one = call([1, 2], snapshot="full", max_tokens=40)

    async def drop_meanwhile():
        running = asyncio.create_task(generator.sample(one))
        await asyncio.sleep(0)
        generator.drop_snapshot("full")
        return await running

    wait(generator.add_snapshot("full", weights))
    got = wait(drop_meanwhile())
    wait_for_engines(before + 1)
    wait(generator.add_snapshot("again", weights))
    wanted = wait(generator.sample(call([1, 2], snapshot="again", max_tokens=40)))
    assert got.sequences[0].tokens.tolist() == wanted.sequences[0].tokens.tolist()
    wait(generator.close())


def test_engine_whose_first_sample_is_cancelled_is_not_left_behind(
    base_of: Callable[[str], BaseModel], wait: Wait
):
    base = base_of("qwen3")
    may_start, started = threading.Event(), []

    class RecordedEngine:
        has_ended = False

        def end(self) -> None:
            self.has_ended = True

    def make(model: BaseModel) -> Any:
        may_start.wait(10)
        started.append(RecordedEngine())
        return started[-1]

    snapshots = FullSnapshots(base, make)
    snapshots.add("full", random_weights(base))

    async def use() -> None:
        async with snapshots.engine("full"):
            raise AssertionError("it was cancelled before")

    async def cancel_and_drop() -> None:
        running = asyncio.create_task(use())
        await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        snapshots.drop("full")
        may_start.set()
        while not started or not started[0].has_ended:
            await asyncio.sleep(0.01)

    wait(asyncio.wait_for(cancel_and_drop(), 10))
    assert len(started) == 1


def test_full_snapshot_of_a_bfloat16_model_is_sampled_in_float32(
    wait: Wait, tmp_path_factory: pytest.TempPathFactory
):
    directory = models.rand(tmp_path_factory.mktemp("bf16") / "model", "qwen3")
    base = base_model.load("bf16", str(directory), dtype="bfloat16", device="cpu")
    weights = random_weights(base)
    generator = EmbeddedGenerator(base)
    wait(generator.add_snapshot("full", weights))
    prompt = random_prompt(9)
    got = wait(generator.sample(call(prompt, snapshot="full", max_tokens=0, prompt_logprobs=True)))
    np.testing.assert_allclose(
        got.prompt_logprobs[1:], plain_logprobs(base, weights, prompt), atol=1e-4
    )
    wait(generator.close())


@pytest.mark.parametrize("fault", ["missing", "misshapen"])
def test_full_snapshot_that_does_not_fit_is_refused_by_name(
    generator: EmbeddedGenerator, base_of: Callable[[str], BaseModel], wait: Wait, fault: str
):
    tensors = dict(random_weights(base_of("qwen3")).tensors)
    if fault == "missing":
        del tensors["model.norm.weight"]
    else:
        tensors["model.norm.weight"] = np.zeros(3, np.float32)
    with pytest.raises(PostTrainingError) as caught:
        wait(generator.add_snapshot("bad", FullWeights(tensors=tensors)))
    assert caught.value.reason == Reason.INCOMPATIBLE_CHECKPOINT
    assert f"{fault}: model.norm.weight" in caught.value.message
