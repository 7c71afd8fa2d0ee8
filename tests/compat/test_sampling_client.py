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
from tests.compat.data import HIT, MISS, close, datum, greedy, prompt
from tinker_compat.sample_conversion import sample_response
from together_post_training import tensors
from together_post_training.v1 import generator_pb2 as pb

HAS_TOPK_SAMPLE = hasattr(types.SampledSequence, "topk_logprobs")
HAS_PLACES = hasattr(types.SampleResponse, "target_prompt_logprobs")
needs_places = pytest.mark.skipif(
    not HAS_PLACES, reason="the installed tinker has no place for them"
)


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


def test_inflight_client_samples_from_what_was_published_last_and_others_stay(client):
    following = client.save_weights_and_get_sampling_client(kind="inflight").result()
    pinned = client.save_weights_and_get_sampling_client().result()
    before = following.compute_logprobs(prompt(3, 4)).result()
    assert pinned.compute_logprobs(prompt(3, 4)).result() == before
    client.forward_backward([datum()], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=0.5)).result()
    assert following.compute_logprobs(prompt(3, 4)).result() == before
    client.save_weights_and_get_sampling_client(kind="inflight").result()
    after = following.compute_logprobs(prompt(3, 4)).result()
    assert abs(after[1] - before[1]) > 0.01
    assert pinned.compute_logprobs(prompt(3, 4)).result() == before


def test_kinds_of_sampling_clients_that_there_are_not_are_refused_by_name(client):
    with pytest.raises(tinker.BadRequestError, match="kind='live'"):
        client.save_weights_and_get_sampling_client(kind="live")


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
    """The model's text is one letter a token, a for 0; it has no end-of-sequence token. SA-08."""
    (sequence,) = sampler.sample(prompt(3), 1, greedy(10, stop=stop)).result().sequences
    assert (sequence.tokens, sequence.stop_reason) == (expected, reason)
    assert len(sequence.logprobs) == len(expected)


@pytest.mark.parametrize("stop", [[6, "g"], [[]]])
def test_stop_of_mixed_kinds_is_refused_by_tinkers_type(stop):
    """SA-08, SA-12."""
    with pytest.raises(ValueError, match="stop"):
        greedy(10, stop=stop)


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
    """SA-02."""
    params = types.SamplingParams(max_tokens=30, temperature=3.0)
    drawn = [tokens_of(sampler.sample(prompt(3), 1, params).result())[0] for _ in range(3)]
    assert len({tuple(t) for t in drawn}) == 3


def test_hundreds_of_samples_at_once_are_all_answered_in_their_places(sampler):
    async def main() -> list[types.SampleResponse]:
        calls = [sampler.sample_async(prompt(i % 16), 1, greedy(1)) for i in range(400)]
        return await asyncio.gather(*calls)

    responses = asyncio.run(main())
    assert [tokens_of(r) for r in responses] == [[[(i + 1) % 16]] for i in range(400)]


def targets_of(rows: list[list[int]]) -> types.TensorData:
    return types.TensorData(data=np.array(rows), dtype="int64", shape=[len(rows), len(rows[0])])


@needs_places
def test_target_prompt_logprobs_are_those_of_the_named_tokens(sampler):
    """In the shape they were asked for in, 0.0 where nothing was."""
    targets = targets_of([[4, 9, -1], [-1, -1, -1], [6, 6, 0]])
    response = sampler.sample(
        prompt(3, 4, 5, 9), 2, greedy(1), target_prompt_logprobs=targets
    ).result()
    answer = response.target_prompt_logprobs
    assert type(answer) is types.TensorData
    assert (answer.dtype, answer.shape) == ("float32", [3, 3])
    assert answer.tolist() == [
        close([HIT, MISS, 0.0]),
        [0.0, 0.0, 0.0],
        close([HIT, HIT, MISS]),
    ]
    assert response.prompt_logprobs is None


@needs_places
def test_sparse_targets_are_answered_in_their_own_layout(sampler):
    """Columns 1 and 3 of row 0, none of row 1, column 0 of row 2; a stored -1 is answered with 0."""
    targets = types.TensorData(
        data=[4, -1, 6],
        dtype="int64",
        shape=[3, 5],
        sparse_crow_indices=[0, 2, 2, 3],
        sparse_col_indices=[1, 3, 0],
    )
    response = sampler.sample(
        prompt(3, 4, 5, 9), 1, greedy(1), target_prompt_logprobs=targets
    ).result()
    answer = response.target_prompt_logprobs
    assert (answer.dtype, answer.shape) == ("float32", [3, 5])
    assert answer.sparse_crow_indices == [0, 2, 2, 3]
    assert answer.sparse_col_indices == [1, 3, 0]
    assert answer.data == close([HIT, 0.0, HIT])


@needs_places
def test_targets_that_torch_made_sparse_come_back_as_it_reads_them(sampler):
    """As Tinker's documentation does: one candidate at the last position of the prompt."""
    torch = pytest.importorskip("torch")
    ids = torch.full((9, 2), -1, dtype=torch.int64)
    ids[8, 1] = 2
    targets = types.TensorData.from_torch_sparse(ids, pad_value=-1)
    assert targets.sparse_crow_indices is not None
    tokens = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    response = sampler.sample(
        prompt(*tokens), 1, greedy(1), include_prompt_logprobs=True, target_prompt_logprobs=targets
    ).result()
    assert response.target_prompt_logprobs.to_torch()[8, 1].item() == close(MISS)
    assert response.prompt_logprobs[9] == close(HIT)


@needs_places
def test_prompt_alt_tokens_are_drawn_at_every_position_after_the_first(sampler):
    params = types.SamplingParams(max_tokens=3, seed=5, temperature=3.0)
    plain = sampler.sample(prompt(3, 4, 5), 2, params).result()
    response = sampler.sample(prompt(3, 4, 5), 2, params, prompt_alt_tokens_k=100).result()
    drawn = response.prompt_alt_tokens
    assert (drawn.tokens.dtype, drawn.tokens.shape) == ("int64", [2, 100])
    assert (drawn.logprobs.dtype, drawn.logprobs.shape) == ("float32", [2, 100])
    tokens, logprobs = drawn.tokens.to_numpy(), drawn.logprobs.to_numpy()
    expected = np.where(tokens == [[4], [5]], HIT, MISS)
    np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    assert len(np.unique(tokens)) > 8
    assert tokens[0].tolist() != tokens[1].tolist()
    again = sampler.sample(prompt(3, 4, 5), 2, params, prompt_alt_tokens_k=100).result()
    assert again.prompt_alt_tokens.tokens.tolist() == tokens.tolist()
    assert tokens_of(response) == tokens_of(plain), "asking for them changes no sample"
    greedily = sampler.sample(prompt(3, 4, 5), 1, greedy(1), prompt_alt_tokens_k=2).result()
    assert greedily.prompt_alt_tokens.tokens.tolist() == [[4, 4], [5, 5]]


@needs_places
def test_everything_can_be_asked_of_a_prompt_at_once(sampler):
    """Of 4 samples the prompt is scored once (LG-05)."""
    response = sampler.sample(
        prompt(3, 4, 5, 9),
        4,
        greedy(2),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=1,
        target_prompt_logprobs=targets_of([[4], [-1], [-1]]),
        prompt_alt_tokens_k=3,
        prompt_logprobs_last_n=1,
    ).result()
    assert len(response.sequences) == 4
    assert response.prompt_logprobs == [None, None, None, close(MISS)]
    assert [row is None for row in response.topk_prompt_logprobs] == [True, True, True, False]
    assert response.target_prompt_logprobs.tolist() == [close([HIT]), [0.0], [0.0]]
    assert response.prompt_alt_tokens.tokens.shape == [3, 3]
    assert [len(s.topk_logprobs) for s in response.sequences] == [2] * 4


@needs_places
@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (targets_of([[4], [5], [6]]), r"shape \[3, 1\].*3 tokens"),
        (targets_of([[4], [16]]), "token id 16"),
        (targets_of([[-2], [4]]), "token id -2"),
        (targets_of([[-1], [-1]]), "name at least one"),
    ],
)
def test_targets_that_do_not_fit_the_prompt_or_the_model_are_refused(sampler, targets, says):
    with pytest.raises(tinker.BadRequestError, match=says):
        sampler.sample(prompt(3, 4, 5), 1, greedy(1), target_prompt_logprobs=targets).result()


@pytest.mark.parametrize("last_n", [3, 4])
def test_as_many_last_logprobs_as_the_prompt_has_tokens_are_refused(sampler, last_n):
    """The first token has none."""
    with pytest.raises(tinker.BadRequestError, match=f"is {last_n}: .*has 3 tokens"):
        sampler.compute_logprobs(prompt(3, 4, 5), prompt_logprobs_last_n=last_n).result()
    options = {"include_prompt_logprobs": True, "prompt_logprobs_last_n": last_n}
    with pytest.raises(tinker.BadRequestError, match=f"is {last_n}: "):
        sampler.sample(prompt(3, 4, 5), 1, greedy(1), **options).result()


@pytest.mark.skipif(HAS_PLACES, reason="the installed tinker has places for them")
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k=2"),
        ({"target_prompt_logprobs": targets_of([[1]])}, "target_prompt_logprobs"),
    ],
)
def test_what_an_older_tinker_has_no_place_for_is_refused_by_name(sampler, options, name):
    with pytest.raises(tinker.BadRequestError, match=name):
        sampler.sample(prompt(3, 4), 1, greedy(1), **options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k=2"),
        ({"target_prompt_logprobs": targets_of([[1]])}, "target_prompt_logprobs"),
        (
            {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 1},
            "prompt_logprobs_last_n=1",
        ),
    ],
)
def test_what_an_old_server_passes_over_is_no_answer(options, name):
    """It does not know the fields, and answers all the same."""
    request = pb.SampleRequest()
    if "prompt_alt_tokens_k" in options:
        request.prompt_alt_tokens_k = 2
    elif "target_prompt_logprobs" in options:
        request.target_prompt_logprobs.SetInParent()
    else:
        request.prompt_logprobs_last_n = 1
    answer = pb.SampleResponse(
        prompt_logprobs=tensors.encode(np.array([np.nan, -1, -1], np.float32))
    )
    with pytest.raises(RuntimeError, match=f"{name} was asked for.*too old"):
        sample_response(answer, request)


def test_the_server_is_told_how_many_last_tokens_to_score(fake):
    """It leaves the others out itself, which makes the call cheaper."""
    opened = tinker.ServiceClient(base_url=fake.address).create_sampling_client(base_model="fake")
    opened.sample(
        prompt(1, 2, 3), 1, greedy(1), include_prompt_logprobs=True, prompt_logprobs_last_n=1
    ).result()
    opened.sample(prompt(1, 2), 1, greedy(1)).result()
    opened.compute_logprobs(prompt(1, 2), prompt_logprobs_last_n=1).result()
    opened.compute_logprobs(prompt(1, 2)).result()
    some, every = fake.received("Sample")
    assert (some.prompt_logprobs_last_n, every.HasField("prompt_logprobs_last_n")) == (1, False)
    some, every = fake.received("ComputeLogprobs")
    assert (some.last_n, every.HasField("last_n")) == (1, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_logprobs_last_n": 0, "include_prompt_logprobs": True}, "1 or greater, got 0"),
        ({"prompt_logprobs_last_n": 1}, "set include_prompt_logprobs"),
        ({"prompt_alt_tokens_k": -1}, "0 or greater, got -1"),
        (
            {"target_prompt_logprobs": types.TensorData(data=[1.0], dtype="float32", shape=[1, 1])},
            "float32",
        ),
        (
            {"target_prompt_logprobs": types.TensorData(data=[1], dtype="int64", shape=[1])},
            r"shape \[1\]: it must be 2-D",
        ),
        (
            {"target_prompt_logprobs": types.TensorData(data=[1], dtype="int64")},
            "shape None: it must be 2-D",
        ),
    ],
)
def test_what_is_asked_of_a_prompt_is_checked_at_the_call(sampler, options, message):
    with pytest.raises(ValueError, match=message):
        sampler.sample(prompt(3, 4), 1, greedy(1), **options)


def test_options_that_have_no_effect_warn_with_the_consequence(service, client, sampler):
    with pytest.warns(UserWarning, match=r"retry_config is ignored.*5 minutes"):
        service.create_sampling_client(base_model=MODEL, retry_config=object())
    with pytest.warns(DeprecationWarning, match="name='step' has no effect"):
        named = client.save_weights_and_get_sampling_client(name="step")
    assert tokens_of(named.sample(prompt(3), 1, greedy(1)).result()) == [[4]]


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
