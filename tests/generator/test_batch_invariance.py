"""The batch-invariant option: the same call gives the same bits, whatever is computed beside it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from backend.generator import invariant
from backend.generator.base import SampleResult
from backend.generator.embedded import EmbeddedGenerator
from backend.generator.invariant import tiles
from backend.generator.invariant_runner import InvariantRunner
from backend.generator.kv_cache import bytes_per_token
from backend.trainer import base_model
from backend.trainer.base_model import BaseModel
from backend.trainer.families import FAMILIES
from tests import models
from tests.generator.calls import call, random_prompt
from tests.generator.oracle import assert_logprobs_are_of, merged, publish, random_adapter
from together_post_training.errors import PostTrainingError, Reason

RANKS = (1, 5, 16)
# Dense and mixtures, with windows and without, tied, with learned positions, with an expert that all share.
SOME_FAMILIES = ["llama-tied", "qwen3", "gemma3_text", "gpt2", "qwen3_moe", "qwen2_moe"]
SNAPSHOTS = (None, *(f"rank {rank}" for rank in RANKS))


@pytest.fixture(scope="module")
def invariant_of(base_of, wait) -> Iterator[Callable[..., EmbeddedGenerator]]:
    """Generators on base_of's model, with adapters, that read as many tokens of prompts at a time; made once."""
    made: list[EmbeddedGenerator] = []

    @cache
    def make(name: str, num_read: int, **options: int) -> EmbeddedGenerator:
        base = base_of(name)
        generator = EmbeddedGenerator(
            base, batch_invariant=True, max_prefill_tokens=num_read, **options
        )
        made.append(generator)
        for seed, rank in enumerate(RANKS):
            adapter = random_adapter(base, seed=seed, rank=rank)
            wait(generator.add_snapshot(f"rank {rank}", adapter))
        return generator

    yield make
    for generator in made:
        wait(generator.close())


def assert_same_bits(one: SampleResult, other: SampleResult) -> None:
    """All but how much of the prompt was known."""
    assert len(one.sequences) == len(other.sequences)
    for a, b in zip(one.sequences, other.sequences, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
        assert a.stop_reason == b.stop_reason
        assert_equal_topk(a.topk, b.topk)
        if a.routed_experts is not None:
            np.testing.assert_array_equal(a.routed_experts, b.routed_experts)
    assert_equal_topk(one.topk_prompt, other.topk_prompt)
    if one.prompt_logprobs is not None:
        np.testing.assert_array_equal(one.prompt_logprobs, other.prompt_logprobs)


def assert_equal_topk(one, other) -> None:
    assert (one is None) == (other is None)
    if one is not None:
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


# Prompts that begin alike, so that some is known already; and every way to draw.
CALLS = st.builds(
    lambda length, seed, **options: call(
        random_prompt(length, seed=seed % 2), seed=seed, **options
    ),
    length=st.integers(1, 40),
    seed=st.integers(0, 5),
    max_tokens=st.integers(0, 8),
    num_samples=st.integers(1, 3),
    snapshot=st.sampled_from(SNAPSHOTS),
    temperature=st.sampled_from([0.0, 0.6, 1.0]),
    top_p=st.sampled_from([0.8, 1.0]),
    top_k=st.sampled_from([0, 5]),
    prompt_logprobs=st.booleans(),
    topk_prompt_logprobs=st.sampled_from([0, 2]),
    topk_sample_logprobs=st.sampled_from([0, 3]),
    return_routed_experts=st.booleans(),
)
FULL = [
    call(
        random_prompt(1 + 6 * i, seed=i % 2),
        max_tokens=6,
        seed=i,
        num_samples=1 + i % 3,
        snapshot=SNAPSHOTS[i % 4],
        prompt_logprobs=True,
    )
    for i in range(7)
]


@pytest.mark.parametrize("name", SOME_FAMILIES)
@given(calls=st.lists(CALLS, min_size=2, max_size=6), num_read=st.sampled_from([3, 16, 512]))
@example(calls=FULL, num_read=16)
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_call_gives_the_same_bits_alone_and_among_others(
    invariant_of, sample_all, name, calls, num_read
):
    """Law: in one batch, in another order, with prompts read in other parts, after others, its prefix known or not."""
    alone = [sample_all(invariant_of(name, 512), asked)[0] for asked in calls]
    generator = invariant_of(name, num_read)
    for order in (calls, calls[::-1]):
        together = sample_all(generator, *order)
        for one, other in zip(alone, together if order is calls else together[::-1], strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - set(SOME_FAMILIES)))
def test_every_architecture_keeps_the_promise(base_of, wait, sample_all, name):
    base = base_of(name)
    generator = EmbeddedGenerator(base, batch_invariant=True, max_prefill_tokens=16)
    snapshot = publish(generator, random_adapter(base, seed=1, rank=3))
    calls = [
        replace(asked, snapshot=snapshot if i % 2 else None) for i, asked in enumerate(FULL[:4])
    ]
    alone = [sample_all(generator, asked)[0] for asked in calls]
    for one, other in zip(alone, sample_all(generator, *calls), strict=True):
        assert_same_bits(one, other)
    wait(generator.close())


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_moe"])
def test_numbers_are_those_of_transformers(base_of, wait, sample_all, name):
    """Law 15."""
    base = base_of(name)
    generator = EmbeddedGenerator(base, batch_invariant=True, max_prefill_tokens=16)
    adapter = random_adapter(base, seed=3, rank=5)
    snapshot = publish(generator, adapter)
    calls = [
        call(random_prompt(n, seed=n), max_tokens=20, snapshot=which)
        for n, which in ((1, None), (20, None), (20, snapshot))
    ]
    for asked, result in zip(calls, sample_all(generator, *calls), strict=True):
        module = merged(base, adapter if asked.snapshot else None)
        assert_logprobs_are_of(module, asked, result.sequences[0])
    wait(generator.close())


def test_prefix_that_is_known_changes_no_bit(invariant_of, sample_all):
    asked = call(random_prompt(50, seed=9), max_tokens=6, snapshot="rank 5", topk_sample_logprobs=3)
    generator = invariant_of("qwen3", 512)
    (cold,), (warm,) = (sample_all(generator, asked) for _ in range(2))
    assert cold.cache_hit_tokens == 0
    assert warm.cache_hit_tokens > 0
    assert_same_bits(cold, warm)


def test_sample_that_starts_over_changes_no_bit(base_of, invariant_of, wait, sample_all):
    """Room for one window and a little: samples lose their rows, and read again what they had sampled."""
    base = base_of("qwen3")
    asked = [call(random_prompt(9, seed=i), max_tokens=55, seed=i, num_samples=2) for i in range(2)]
    alone = [sample_all(invariant_of("qwen3", 512), one)[0] for one in asked]
    size = 64 * 2 * bytes_per_token(base.module.config, base.dtype)
    generator = EmbeddedGenerator(base, batch_invariant=True, cache_bytes=size)
    for one, other in zip(alone, sample_all(generator, *asked), strict=True):
        assert_same_bits(one, other)
    wait(generator.close())


def test_vocabulary_that_fills_no_vectors_changes_no_bit(tmp_path, wait, sample_all):
    """Functions of logits, over several rows at once, would treat the end of the last row apart."""
    base = base_model.load("odd", str(models.rand(tmp_path / "odd", "llama", vocab_size=99)))
    generator = EmbeddedGenerator(base, batch_invariant=True)
    calls = [
        call(
            random_prompt(length, seed=i, vocab_size=99),
            max_tokens=12,
            seed=i,
            num_samples=2,
            prompt_logprobs=True,
            topk_prompt_logprobs=3,
        )
        for i, length in enumerate((3, 9, 10, 21))
    ]
    alone = [sample_all(generator, replace(asked, num_samples=1))[0] for asked in calls]
    for one, other in zip(alone, sample_all(generator, *calls), strict=True):
        assert_same_bits(one, replace(other, sequences=other.sequences[:1]))
    wait(generator.close())


@pytest.mark.parametrize("is_invariant", [False, True])
def test_identical_calls_in_one_batch_get_identical_answers(
    generator_of, invariant_of, sample_all, is_invariant
):
    """Also without the option, up to rounding."""
    for name in ("qwen3", "qwen3_moe"):
        generator = invariant_of(name, 512) if is_invariant else generator_of(name)
        asked = call(random_prompt(7), max_tokens=12, prompt_logprobs=True)
        first, *others = sample_all(generator, *[asked] * 9)
        for other in others:
            np.testing.assert_array_equal(first.sequences[0].tokens, other.sequences[0].tokens)
            np.testing.assert_allclose(
                first.sequences[0].logprobs, other.sequences[0].logprobs, rtol=0, atol=2e-5
            )
            if is_invariant:
                assert_same_bits(first, other)


# What it stands on.


@given(num_rows=st.integers(1, 1000), sizes=st.sets(st.integers(1, 64), min_size=1))
def test_tiles_hold_all_rows_once_and_only_the_last_is_not_full(num_rows, sizes):
    found = list(tiles(num_rows, sorted(sizes)))
    assert [row for start, stop, _ in found for row in range(start, stop)] == list(range(num_rows))
    assert all(size in sizes for *_, size in found)
    assert all(stop - start == size for start, stop, size in found[:-1])
    start, stop, size = found[-1]
    assert stop - start <= size


def test_no_size_is_relied_on_in_which_a_place_changes_a_row(base_of, monkeypatch):
    """As a library would that computes the last row of 64 in another way."""
    spoil(monkeypatch, 64)
    assert InvariantRunner(base_of("llama"), 1)._sizes == (8, 16, 32, 96, 128, 256)


def test_machine_whose_rows_depend_on_their_place_is_refused(base_of, monkeypatch):
    spoil(monkeypatch, 32)
    with pytest.raises(PostTrainingError, match="do not: in forwards of 32 tokens") as error:
        EmbeddedGenerator(base_of("llama"), batch_invariant=True)
    assert error.value.reason is Reason.UNIMPLEMENTED


def spoil(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    """Linear layers add something to the last of so many rows."""
    plain = invariant.PRODUCTS.linear

    def linear(x, weight, bias):
        y = plain(x, weight, bias)
        if len(x) == num_rows:
            y[-1] += 1e-6
        return y

    monkeypatch.setattr(
        invariant, "PRODUCTS", dataclasses.replace(invariant.PRODUCTS, linear=linear)
    )


def test_tokens_that_fill_no_vectors_are_computed_in_tiles_that_do(base_of):
    """Qwen2-MoE's gate of the shared expert is one number a token; the sigmoid of 8 is not that of 32."""
    assert InvariantRunner(base_of("qwen2_moe"), 1)._sizes == (32, 64, 96, 128, 256)


def test_product_with_few_columns_is_looked_at_before_it_is_used(monkeypatch):
    def linear(x, weight):
        y = x @ weight.T
        y[3] += 1e-6
        return y

    monkeypatch.setattr(invariant.F, "linear", linear)
    invariant._check_places.cache_clear()
    with pytest.raises(PostTrainingError, match=r"16 rows with a matrix \[24, 32\]"):
        invariant.PRODUCTS.part_linear(torch.ones(2, 32), torch.ones(24, 32), None)
    invariant._check_places.cache_clear()


def test_threads_are_those_it_was_checked_with(base_of, wait, sample_all):
    """Whatever number others set meanwhile."""
    seen = []
    generator = EmbeddedGenerator(base_of("llama"), batch_invariant=True)
    stepper = generator._engine._stepper
    plain = stepper._draw

    def draw(samples, hidden):
        seen.append(torch.get_num_threads())
        torch.set_num_threads(2)
        return plain(samples, hidden)

    stepper._draw = draw  # pyright: ignore[reportAttributeAccessIssue]
    try:
        sample_all(generator, call(random_prompt(3), max_tokens=3))
    finally:
        torch.set_num_threads(1)
    assert seen == [1, 1, 1]
    wait(generator.close())


def test_gpu_is_refused_by_name(base_of):
    """Any device but the CPU is one on which nobody looked."""
    base: BaseModel = base_of("llama")
    module = copy.deepcopy(base.module)
    torch.nn.Module.to(module, "meta")
    elsewhere = dataclasses.replace(base, module=module)
    with pytest.raises(
        PostTrainingError, match="runs on a CPU only, and this model is on meta"
    ) as error:
        InvariantRunner(elsewhere, 1)
    assert error.value.reason is Reason.UNIMPLEMENTED
