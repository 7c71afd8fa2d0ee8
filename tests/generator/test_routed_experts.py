"""The experts that an answer lists are those that its tokens went through."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from backend.generator.base import SampleCall, SampledSequence
from backend.generator.embedded import EmbeddedGenerator
from backend.generator.expert_trace import ExpertTrace
from backend.trainer import base_model, targets
from tests import models
from tests.generator.calls import call, random_prompt
from tests.generator.oracle import merged, publish, random_adapter

MOE = ("glm4_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")


def asked(num_tokens: int, *, seed: int = 0, **options) -> SampleCall:
    prompt = random_prompt(num_tokens, seed=seed)
    return call(prompt, seed=seed, return_routed_experts=True, **options)


def read(one: SampleCall, sequence: SampledSequence) -> list[int]:
    """What the model has read: all but the last token."""
    return [*one.prompt.tolist(), *sequence.tokens.tolist()][:-1]


@torch.no_grad()
def choices(module: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    """What the routers of a plain model choose in one forward of these tokens: (T, layers, K)."""
    chosen = []
    experts = targets.expert_modules(module).values()
    hooks = [
        part.register_forward_pre_hook(lambda _, inputs: chosen.append(inputs[1]))
        for part in experts
    ]
    module(torch.tensor(tokens)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).numpy()


def assert_are_the_models_own(
    module: PreTrainedModel, one: SampleCall, sequence: SampledSequence
) -> None:
    """As sets: an order that rounding may turn round says nothing about where a token went."""
    assert sequence.routed_experts is not None
    assert sequence.routed_experts.dtype == np.int16
    wanted = choices(module, read(one, sequence))
    assert sequence.routed_experts.shape == wanted.shape
    assert np.array_equal(np.sort(sequence.routed_experts), np.sort(wanted))


@pytest.mark.parametrize("model_type", MOE)
def test_routed_experts_are_those_of_the_models_own_forward(
    base_of, generator_of, sample_all, model_type
):
    """Two prompts of other lengths, two samples each and one under an adapter of all layers, side by side."""
    base, generator = base_of(model_type), generator_of(model_type)
    adapter = random_adapter(base, seed=3)
    calls = [
        asked(5, seed=1, max_tokens=8, num_samples=2),
        asked(9, seed=2, max_tokens=12, num_samples=2, snapshot=publish(generator, adapter)),
    ]
    models = [merged(base, None), merged(base, adapter)]
    for module, one, result in zip(models, calls, sample_all(generator, *calls), strict=True):
        for sequence in result.sequences:
            assert_are_the_models_own(module, one, sequence)


def test_routed_experts_are_left_out_unless_asked_for(generator_of, sample_all):
    generator = generator_of("qwen3_moe")
    wanting = asked(6, max_tokens=4)
    other = replace(wanting, return_routed_experts=False)
    with_experts, without = sample_all(generator, wanting, other)
    assert with_experts.sequences[0].routed_experts is not None
    assert without.sequences[0].routed_experts is None
    assert np.array_equal(with_experts.sequences[0].tokens, without.sequences[0].tokens)


def test_routed_experts_of_one_token_are_the_prompts(generator_of, sample_all):
    one = asked(6, max_tokens=1, num_samples=3)
    (result,) = sample_all(generator_of("qwen3_moe"), one)
    first, *others = [sequence.routed_experts for sequence in result.sequences]
    assert first is not None
    assert first.shape == (6, 2, 2)
    for other in others:
        assert np.array_equal(other, first)


def test_dense_model_returns_no_routed_experts(generator_of, sample_all):
    (result,) = sample_all(generator_of("qwen3"), asked(6, max_tokens=4))
    assert result.sequences[0].routed_experts is None
    assert not result.warnings


def test_samples_that_start_over_keep_their_experts(tmp_path, wait, sample_all, monkeypatch):
    """Room for one whole window: the younger samples lose their rows to older ones, and read their tokens again."""
    again: list[int] = []
    plain = ExpertTrace.add

    def add(trace: ExpertTrace, start: int, experts: np.ndarray) -> None:
        if start and start < trace._stop:
            again.append(start)
        plain(trace, start, experts)

    monkeypatch.setattr(ExpertTrace, "add", add)
    directory = models.rand(
        tmp_path / "small", "qwen3_moe", max_position_embeddings=512, num_hidden_layers=1
    )
    base = base_model.load("small", str(directory))
    tight = EmbeddedGenerator(base, cache_bytes=512 * 2 * 8 * 2 * 4)
    one = asked(50, max_tokens=220, num_samples=3)
    (result,) = sample_all(tight, one)
    wait(tight.close())
    assert again
    for sequence in result.sequences:
        assert_are_the_models_own(merged(base, None), one, sequence)


def test_prompt_that_was_read_before_is_read_again_for_its_experts(
    base_of, generator_of, sample_all
):
    """Keys and values may be reused; where their tokens went is not kept with them."""
    generator = generator_of("qwen3_moe")
    one = asked(40, seed=4, max_tokens=4)
    sample_all(generator, replace(one, return_routed_experts=False))
    for (again,) in (sample_all(generator, one) for _ in range(2)):
        assert again.cache_hit_tokens == 0
        assert_are_the_models_own(merged(base_of("qwen3_moe"), None), one, again.sequences[0])


def test_prompts_that_are_read_in_parts_have_all_their_experts(base_of, wait, sample_all):
    base = base_of("qwen3_moe")
    generator = EmbeddedGenerator(base, max_prefill_tokens=8)
    calls = [asked(n, seed=n, max_tokens=6, num_samples=2) for n in (30, 3, 21)]
    results = sample_all(generator, *calls)
    wait(generator.close())
    for one, result in zip(calls, results, strict=True):
        for sequence in result.sequences:
            assert_are_the_models_own(merged(base, None), one, sequence)


def test_experts_of_a_call_that_moved_are_those_of_each_tokens_first_reading(
    base_of, wait, monkeypatch
):
    """Whoever samples on under other weights reads all tokens again; what came of the first reading stays."""
    base = base_of("qwen3_moe")
    adapters = [random_adapter(base, seed=seed) for seed in (3, 4)]
    generator = EmbeddedGenerator(base)
    old, new = (publish(generator, adapter) for adapter in adapters)
    one = asked(10, seed=1, max_tokens=50, snapshot=old, follows=True)
    has_begun, may_go_on = threading.Event(), threading.Event()
    plain = ExpertTrace.add

    def add(trace: ExpertTrace, start: int, experts: np.ndarray) -> None:
        plain(trace, start, experts)
        if start == 25:
            has_begun.set()
            may_go_on.wait(10)

    monkeypatch.setattr(ExpertTrace, "add", add)

    async def moved() -> SampledSequence:
        running = asyncio.ensure_future(generator.sample(one))
        await asyncio.to_thread(has_begun.wait, 10)
        generator.move(old, new)
        for _ in range(20):  # Until the engine has been told.
            await asyncio.sleep(0)
        may_go_on.set()
        (sequence,) = (await running).sequences
        return sequence

    sequence = wait(moved())
    wait(generator.close())
    assert [segment.snapshot for segment in sequence.segments] == [old, new]
    assert sequence.routed_experts is not None
    # To draw the first token under other weights the one before it was read, under these for the first time.
    first = 10 + sequence.segments[1].first_token - 1
    before, after = (choices(merged(base, a), read(one, sequence)) for a in adapters)
    assert not np.array_equal(np.sort(before[:first]), np.sort(after[:first]))
    assert np.array_equal(np.sort(sequence.routed_experts[:first]), np.sort(before[:first]))
    assert np.array_equal(np.sort(sequence.routed_experts[first:]), np.sort(after[first:]))


def rows(*values: int) -> np.ndarray:
    return np.array(values, np.int16).reshape(-1, 1, 1)


def test_trace_keeps_the_first_reading_of_each_token():
    trace = ExpertTrace(first=2)
    trace.add(2, rows(2, 3))
    trace.add(2, rows(9, 9, 4))
    trace.add(3, rows(9))
    trace.add(5, rows(5))
    assert np.concatenate(trace.experts()).ravel().tolist() == [2, 3, 4, 5]


def test_trace_refuses_tokens_that_follow_unread_ones():
    with pytest.raises(AssertionError):
        ExpertTrace().add(1, rows(1))
