"""Sampling and scoring through the client. Real server, exact model: after x comes (x + 1) mod 16."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from tinker import types

import tinker_compat as tinker
from tests.compat.conftest import MODEL
from tests.compat.data import HIT, MISS, close, greedy, prompt

HAS_TOPK_SAMPLE = hasattr(types.SampledSequence, "topk_logprobs")


def tokens_of(response: types.SampleResponse) -> list[list[int]]:
    return [sequence.tokens for sequence in response.sequences]


def test_a_sample_is_tinkers_with_tokens_logprobs_and_a_reason(sampler):
    response = sampler.sample(prompt(3), 1, greedy(4)).result()
    assert type(response) is types.SampleResponse
    (sequence,) = response.sequences
    assert type(sequence) is types.SampledSequence
    assert sequence.tokens == [4, 5, 6, 7]
    assert sequence.logprobs == close([HIT] * 4)
    assert sequence.stop_reason == "length"
    assert response.prompt_logprobs is None
    assert response.topk_prompt_logprobs is None


def test_sampled_sequences_have_ids_of_their_own(sampler):
    response = sampler.sample(prompt(3), 3, greedy(1)).result()
    ids = [getattr(s, "sequence_id", i) for i, s in enumerate(response.sequences)]
    assert len(set(ids)) == 3
    assert all(ids[1:])


@pytest.mark.parametrize(
    ("stop", "expected", "reason"),
    [
        ("g", [4, 5, 6], "stop"),
        (["g"], [4, 5, 6], "stop"),
        ([6], [4, 5, 6], "stop"),
        (["efg"], [4, 5, 6], "stop"),
        (["zz", "f"], [4, 5], "stop"),
        ([], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13], "length"),
        (None, [4, 5, 6, 7, 8, 9, 10, 11, 12, 13], "length"),
    ],
)
def test_stop_is_a_string_strings_or_token_ids_and_is_kept_in_the_tokens(
    sampler, stop, expected, reason
):
    """The model's text is one letter a token, a for 0; it has no end-of-sequence token."""
    (sequence,) = sampler.sample(prompt(3), 1, greedy(10, stop=stop)).result().sequences
    assert (sequence.tokens, sequence.stop_reason) == (expected, reason)
    assert len(sequence.logprobs) == len(expected)


def test_stop_of_mixed_kinds_is_refused_by_tinkers_type():
    with pytest.raises(ValueError, match="stop"):
        greedy(10, stop=[6, "g"])


def test_no_stop_and_an_empty_stop_differ_on_the_wire(fake):
    opened = tinker.ServiceClient(base_url=fake.address).create_sampling_client(base_model="fake")
    for stop in (None, [], "x", [7]):
        opened.sample(prompt(1), 1, greedy(2, stop=stop)).result()
    sent = [request.params for request in fake.received("Sample")]
    assert [params.HasField("stop") for params in sent] == [False, True, True, True]
    assert [list(p.stop.strings) for p in sent] == [[], [], ["x"], []]
    assert [list(p.stop.tokens) for p in sent] == [[], [], [], [7]]


def test_explicit_zeros_are_sent_and_what_is_absent_is_not(fake):
    opened = tinker.ServiceClient(base_url=fake.address).create_sampling_client(base_model="fake")
    opened.sample(prompt(1), 2, types.SamplingParams(temperature=0, seed=0, top_k=0)).result()
    opened.sample(prompt(1), 1, types.SamplingParams()).result()
    zero, default = [request.params for request in fake.received("Sample")]
    assert (zero.temperature, zero.seed, zero.top_k, zero.top_p) == (0.0, 0, 0, 1.0)
    assert zero.HasField("seed")
    assert not zero.HasField("max_tokens")
    assert (default.temperature, default.top_k) == (1.0, -1)
    assert not default.HasField("seed")
    assert [r.num_samples for r in fake.received("Sample")] == [2, 1]


def test_prompt_logprobs_have_the_prompts_length_and_none_first(sampler):
    response = sampler.sample(prompt(3, 4, 9), 1, greedy(1), include_prompt_logprobs=True).result()
    assert response.prompt_logprobs[0] is None
    assert response.prompt_logprobs[1:] == close([HIT, MISS])


def test_topk_prompt_logprobs_are_pairs_likeliest_first_and_none_first(sampler):
    response = sampler.sample(
        prompt(3, 4, 9), 1, greedy(1), include_prompt_logprobs=True, topk_prompt_logprobs=2
    ).result()
    first, *rows = response.topk_prompt_logprobs
    assert first is None
    assert [row[0][0] for row in rows] == [4, 5]
    for row in rows:
        assert len(row) == 2
        assert [lp for _, lp in row] == close([HIT, MISS])


def test_only_the_last_prompt_logprobs_are_given_when_so_many_are_asked_for(sampler):
    response = sampler.sample(
        prompt(3, 4, 5, 9),
        1,
        greedy(1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=1,
        prompt_logprobs_last_n=2,
    ).result()
    assert response.prompt_logprobs[:2] == [None, None]
    assert response.prompt_logprobs[2:] == close([HIT, MISS])
    assert [row is None for row in response.topk_prompt_logprobs] == [True, True, False, False]
    scores = sampler.compute_logprobs(prompt(3, 4, 5, 9), prompt_logprobs_last_n=1).result()
    assert scores == [None, None, None, close(MISS)]


@pytest.mark.skipif(not HAS_TOPK_SAMPLE, reason="the installed tinker has no place for them")
def test_topk_sample_logprobs_are_given_for_each_sampled_token(sampler):
    (sequence,) = sampler.sample(prompt(3), 1, greedy(2), topk_sample_logprobs=3).result().sequences
    assert [row[0] for row in sequence.topk_logprobs] == [
        (4, close(HIT)),
        (5, close(HIT)),
    ]
    assert [len(row) for row in sequence.topk_logprobs] == [3, 3]


def test_compute_logprobs_gives_a_list_with_none_first(sampler):
    scores = sampler.compute_logprobs(prompt(3, 4, 9)).result()
    assert scores == [None, close(HIT), close(MISS)]
    assert sampler.compute_logprobs(prompt(3)).result() == [None]
    assert asyncio.run(sampler.compute_logprobs_async(prompt(3, 4)))[0] is None


def test_the_same_seed_gives_the_same_tokens_and_the_members_of_a_group_differ(sampler):
    params = types.SamplingParams(max_tokens=30, temperature=3.0, seed=11)
    first = tokens_of(sampler.sample(prompt(3), 4, params).result())
    assert tokens_of(sampler.sample(prompt(3), 4, params).result()) == first
    assert len({tuple(t) for t in first}) == 4
    alone = types.SamplingParams(max_tokens=30, temperature=3.0, seed=13)
    assert tokens_of(sampler.sample(prompt(3), 1, alone).result()) == [first[2]]


def test_samples_without_a_seed_differ(sampler):
    params = types.SamplingParams(max_tokens=30, temperature=3.0)
    drawn = [tokens_of(sampler.sample(prompt(3), 1, params).result())[0] for _ in range(3)]
    assert len({tuple(t) for t in drawn}) == 3


def test_hundreds_of_samples_at_once_are_all_answered_in_their_places(sampler):
    async def main() -> list[types.SampleResponse]:
        calls = [sampler.sample_async(prompt(i % 16), 1, greedy(1)) for i in range(400)]
        return await asyncio.gather(*calls)

    responses = asyncio.run(main())
    assert [tokens_of(r) for r in responses] == [[[(i + 1) % 16]] for i in range(400)]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k=2"),
        (
            {"target_prompt_logprobs": types.TensorData(data=[1], dtype="int64", shape=[1, 1])},
            "target_prompt_logprobs",
        ),
    ],
)
def test_options_that_are_not_supported_are_refused_by_name(sampler, options, name):
    with pytest.raises(tinker.BadRequestError, match=name):
        sampler.sample(prompt(3, 4), 1, greedy(1), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_logprobs_last_n": 0, "include_prompt_logprobs": True}, "1 or greater, got 0"),
        ({"prompt_logprobs_last_n": 1}, "set include_prompt_logprobs"),
    ],
)
def test_the_number_of_last_prompt_logprobs_is_checked_at_the_call(sampler, options, message):
    with pytest.raises(ValueError, match=message):
        sampler.sample(prompt(3, 4), 1, greedy(1), **options)


def test_options_that_have_no_effect_warn_with_the_consequence(service, client, sampler):
    with pytest.warns(UserWarning, match=r"retry_config is ignored.*5 minutes"):
        service.create_sampling_client(base_model=MODEL, retry_config=object())
    with pytest.warns(DeprecationWarning, match="name='step' has no effect"):
        named = client.save_weights_and_get_sampling_client(name="step")
    assert tokens_of(named.sample(prompt(3), 1, greedy(1)).result()) == [[4]]
    with pytest.raises(tinker.BadRequestError, match="kind='inflight'"):
        client.save_weights_and_get_sampling_client(kind="inflight")


def test_sampling_arguments_may_be_a_dict_where_tinkers_types_take_one(sampler):
    params: Any = {"max_tokens": 2, "temperature": 0}
    assert tokens_of(sampler.sample(prompt(3), 1, params).result()) == [[4, 5]]


def test_the_names_of_a_sampling_client(sampler):
    assert sampler.get_base_model() == MODEL
    assert sampler._sampling_session_id.startswith("snapshots/")
    assert asyncio.run(sampler.get_base_model_async()) == MODEL


def test_arrays_of_a_response_may_be_written_to(sampler):
    """torch warns of, and misuses, arrays that may not."""
    response = sampler.sample(prompt(3, 4), 1, greedy(2), include_prompt_logprobs=True).result()
    arrays = [response.prompt_logprobs_np, response.sequences[0].tokens_np]
    assert all(a.flags.writeable for a in arrays)
    assert (arrays[1].dtype, arrays[0].dtype) == (np.int32, np.float32)
    assert math.isnan(arrays[0][0])
