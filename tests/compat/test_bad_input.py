"""Bad input raises Tinker's exception at the call that caused it, says what is accepted, and the session goes on."""

from __future__ import annotations

import math
import socket
import time

import numpy as np
import pytest
from tinker import types

import tinker_compat as tinker
from tests.compat.conftest import MODEL
from tests.compat.data import HIT, datum, greedy, prompt

CE = "cross_entropy"


# (what, call, parts of the message: the value and what is accepted)
REFUSED_BY_THE_SERVER = [
    (
        "fewer targets than tokens",
        lambda c: c.forward_backward([datum(target_tokens=[4, 5])], CE).result(),
        ["Sample 0: target_tokens has 2 values", "3 tokens"],
    ),
    (
        "more targets than tokens, in the second sample",
        lambda c: c.forward_backward([datum(), datum(target_tokens=[4, 5, 9, 9])], CE).result(),
        ["Sample 1: target_tokens has 4 values", "3 tokens"],
    ),
    (
        "fewer weights than targets",
        lambda c: c.forward_backward(
            [datum(target_tokens=[4, 5, 9], weights=[1.0, 1.0])], CE
        ).result(),
        ["Sample 0: weights has 2 values", "3 tokens"],
    ),
    (
        "weights of another shape than 2-D targets",
        lambda c: c.forward_backward(
            [datum(target_tokens=np.ones((3, 2), np.int64), weights=[1.0, 1.0, 1.0])], CE
        ).result(),
        ["Sample 0", "weights", "[3]", "[3, 2]"],
    ),
    (
        "2-D targets for a policy loss",
        lambda c: c.forward_backward(
            [
                datum(
                    target_tokens=np.ones((3, 2), np.int64),
                    logprobs=np.zeros((3, 2), np.float32),
                    advantages=np.zeros((3, 2), np.float32),
                )
            ],
            "ppo",
        ).result(),
        ["Sample 0", "[3, 2]", "(N,)"],
    ),
    (
        "no tokens",
        lambda c: c.forward_backward([datum([], target_tokens=np.zeros(0, np.int64))], CE).result(),
        ["Sample 0", "empty"],
    ),
    (
        "a missing input",
        lambda c: c.forward_backward([datum(target_tokens=[4, 5, 9])], "ppo").result(),
        ["Sample 0", "'logprobs'", "target_tokens, logprobs, advantages"],
    ),
    (
        "an unknown loss",
        lambda c: c.forward_backward([datum()], "crossentropy").result(),
        ["'crossentropy'", "cross_entropy", "ppo"],
    ),
    (
        "an unknown parameter of a loss",
        lambda c: c.forward_backward(
            [datum(target_tokens=[4, 5, 9], logprobs=[0.0] * 3, advantages=[1.0] * 3)],
            "ppo",
            {"epsilon": 0.2},
        ).result(),
        ["'epsilon'", "clip_high_threshold"],
    ),
    (
        "a parameter that is not a number",
        lambda c: c.forward_backward(
            [datum(target_tokens=[4, 5, 9], logprobs=[0.0] * 3, advantages=[1.0] * 3)],
            "ppo",
            {"clip_low_threshold": math.nan},
        ).result(),
        ["clip_low_threshold", "nan", "finite"],
    ),
    (
        "weights that are not a number",
        lambda c: c.forward_backward(
            [datum(target_tokens=[4, 5, 9], weights=[1.0, math.nan, 1.0])], CE
        ).result(),
        ["Sample 0", "weights[1]", "nan", "finite"],
    ),
    (
        "an advantage that is infinite",
        lambda c: c.forward_backward(
            [datum(target_tokens=[4, 5, 9], logprobs=[0.0] * 3, advantages=[1.0, 1.0, math.inf])],
            "importance_sampling",
        ).result(),
        ["Sample 0", "advantages[2]", "inf", "finite"],
    ),
    (
        "a target outside the vocabulary",
        lambda c: c.forward_backward([datum(target_tokens=[4, 5, 16])], CE).result(),
        ["Sample 0", "target_tokens", "16", "0 to 15"],
    ),
    (
        "a token outside the vocabulary",
        lambda c: c.forward_backward([datum([3, -1, 5], target_tokens=[4, 5, 9])], CE).result(),
        ["Sample 0", "model_input", "-1", "0 to 15"],
    ),
    (
        "a sample over the window",
        lambda c: c.forward_backward([datum([1] * 1025, target_tokens=[2] * 1025)], CE).result(),
        ["Sample 0", "1025", "1024"],
    ),
    (
        "a learning rate that is not a number",
        lambda c: c.optim_step(types.AdamParams(learning_rate=math.nan)).result(),
        ["learning_rate", "nan"],
    ),
    (
        "a checkpoint name with a slash",
        lambda c: c.save_state("a/b").result(),
        ["'a/b'", "letters, digits"],
    ),
    (
        "a checkpoint name that no file system has",
        lambda c: c.save_state("naïve\nname").result(),
        ["naïve", "letters, digits"],
    ),
    (
        "a lifetime of nothing",
        lambda c: c.save_state("a", ttl_seconds=0).result(),
        ["ttl", "0 s", "more than 0"],
    ),
    (
        "a path that is none",
        lambda c: c.load_state("somewhere/a").result(),
        ["'somewhere/a'", "tinker://<session>/weights/<name>"],
    ),
]


@pytest.mark.parametrize(
    ("call", "parts"),
    [(call, parts) for _, call, parts in REFUSED_BY_THE_SERVER],
    ids=[what for what, _, _ in REFUSED_BY_THE_SERVER],
)
def test_bad_training_input_is_a_bad_request_with_its_value_and_the_session_goes_on(
    client, call, parts
):
    with pytest.raises(tinker.BadRequestError) as refused:
        call(client)
    assert refused.value.status_code == 400
    for part in parts:
        assert part in str(refused.value)
    result = client.forward_backward([datum()], CE).result()
    assert result.loss_fn_outputs[0]["logprobs"].tolist()[0] == pytest.approx(HIT, abs=1e-5)
    assert client.optim_step(types.AdamParams()).result()


NOT_FOUND = [
    (
        "a model",
        lambda s: s.create_lora_training_client("no/model").result(),
        ["'no/model'", MODEL],
    ),
    (
        "a model to sample from",
        lambda s: s.create_sampling_client(base_model="no/model").result(),
        ["'no/model'", MODEL],
    ),
    (
        "a checkpoint",
        lambda s: s.create_training_client_from_state("tinker://x/weights/a").result(),
        ["tinker://x/weights/a"],
    ),
    (
        "a checkpoint to sample from",
        lambda s: s.create_sampling_client("tinker://x/sampler_weights/a").result(),
        ["tinker://x/sampler_weights/a"],
    ),
]


@pytest.mark.parametrize(
    ("call", "parts"), [(c, p) for _, c, p in NOT_FOUND], ids=[what for what, _, _ in NOT_FOUND]
)
def test_what_is_not_there_is_not_found_and_named(service, call, parts):
    with pytest.raises(tinker.NotFoundError) as missing:
        call(service)
    assert missing.value.status_code == 404
    for part in parts:
        assert part in str(missing.value)


CREATION = [
    ("rank 0", lambda s: s.create_lora_training_client(MODEL, rank=0).result(), ["rank", "0"]),
    (
        "rank over the maximum",
        lambda s: s.create_lora_training_client(MODEL, rank=4096).result(),
        ["4096"],
    ),
    ("an empty model name", lambda s: s.create_lora_training_client("").result(), []),
    (
        "a path that is none",
        lambda s: s.create_training_client_from_state("weights/a").result(),
        ["'weights/a'", "tinker://"],
    ),
]


@pytest.mark.parametrize(
    ("call", "parts"), [(c, p) for _, c, p in CREATION], ids=[what for what, _, _ in CREATION]
)
def test_bad_input_for_a_new_run_is_refused_with_its_value(service, call, parts):
    with pytest.raises(tinker.APIStatusError) as refused:
        call(service)
    assert refused.value.status_code in (400, 404)
    for part in parts:
        assert part in str(refused.value)
    assert service.create_lora_training_client(MODEL).result()


SAMPLING = [
    (
        "prompt and tokens over the window",
        lambda s: s.sample(prompt(*[1] * 1020), 1, greedy(5)).result(),
        ["1020 + 5 > 1024"],
    ),
    (
        "a prompt over the window",
        lambda s: s.compute_logprobs(prompt(*[1] * 1025)).result(),
        ["1025"],
    ),
    (
        "a token outside the vocabulary",
        lambda s: s.sample(prompt(3, 16), 1, greedy()).result(),
        ["16", "0 to 15"],
    ),
    ("an empty prompt", lambda s: s.sample(prompt(), 1, greedy()).result(), ["prompt", "empty"]),
    ("no samples", lambda s: s.sample(prompt(1), 0, greedy()).result(), ["num_samples", "0"]),
    (
        "no tokens",
        lambda s: s.sample(prompt(1), 1, greedy(0)).result(),
        ["max_tokens", "0", "1 or more"],
    ),
    (
        "a negative temperature",
        lambda s: s.sample(
            prompt(1), 1, types.SamplingParams(temperature=-1, max_tokens=1)
        ).result(),
        ["temperature", "-1"],
    ),
    (
        "top_p of 0",
        lambda s: s.sample(prompt(1), 1, types.SamplingParams(top_p=0, max_tokens=1)).result(),
        ["top_p", "0", "above 0"],
    ),
    (
        "a stop token outside the vocabulary",
        lambda s: s.sample(prompt(1), 1, greedy(stop=[99])).result(),
        ["stop", "99", "0 to 15"],
    ),
    (
        "a seed that no machine has",
        lambda s: s.sample(prompt(1), 1, greedy(seed=2**64)).result(),
        ["seed", str(2**64), "64 bits"],
    ),
]


@pytest.mark.parametrize(
    ("call", "parts"), [(c, p) for _, c, p in SAMPLING], ids=[what for what, _, _ in SAMPLING]
)
def test_bad_sampling_input_is_a_bad_request_with_its_value_and_sampling_goes_on(
    sampler, call, parts
):
    with pytest.raises(tinker.BadRequestError) as refused:
        call(sampler)
    for part in parts:
        assert part in str(refused.value)
    assert sampler.sample(prompt(3), 1, greedy(2)).result().sequences[0].tokens == [4, 5]


def test_what_tinker_checks_at_the_call_is_raised_at_the_call(service, client, sampler):
    with pytest.raises(ValueError, match="No data provided"):
        client.forward([], CE)
    with pytest.raises(ValueError, match="No data provided"):
        client.forward_backward([], CE)
    with pytest.raises(TypeError, match="put it in a list"):
        client.forward_backward(datum(), CE)
    with pytest.raises(TypeError, match=r"data\[1\] is a dict, must be a Datum"):
        client.forward_backward([datum(), {}], CE)
    for params in (None, 1e-4, "adam"):
        with pytest.raises(TypeError, match="Expected AdamParams or OptimParamsBase"):
            client.optim_step(params)
    with pytest.raises(ValueError, match="both"):
        client.optim_step(types.AdamParams(), adam_params=types.AdamParams())
    with pytest.raises(ValueError, match="lr"):
        client.optim_step({"lr": 1e-4})
    with pytest.raises(TypeError):
        client.optim_step(learning_rate=1e-4)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="generator"):
        client.forward_backward((datum() for _ in range(2)), CE)
    with pytest.raises(TypeError, match="name is 7: must be a string"):
        client.save_state(7)
    with pytest.raises(TypeError, match=r"ttl_seconds is 1\.5: must be a whole number"):
        client.save_state("x", ttl_seconds=1.5)
    with pytest.raises(TypeError, match=r"user_metadata\['step'\] is 3"):
        client.save_state("x", user_metadata={"step": 3})
    with pytest.raises(TypeError, match="path is 7: must be a string"):
        client.load_state(7)
    with pytest.raises(TypeError, match="resume_from is 7: must be a string"):
        service.create_training_client_from_state(7)
    with pytest.raises(TypeError, match="rank is '8': must be an integer"):
        service.create_lora_training_client(MODEL, rank="8")
    with pytest.raises(ValueError, match="rank is 2147483648: must be an integer of 32 bits"):
        service.create_lora_training_client(MODEL, rank=2**31)
    with pytest.raises(ValueError, match=r"seed is -1: must be an integer from 0 to 2\*\*64 - 1"):
        service.create_lora_training_client(MODEL, seed=-1)
    with pytest.raises(TypeError, match="user_metadata"):
        tinker.ServiceClient({"step": 3}, base_url="h:1")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Header"):
        tinker.ServiceClient(base_url="h:1", default_headers_overrides={"a b": "c"})
    with pytest.raises(
        AssertionError, match="At least one of train_mlp, train_attn, or train_unembed"
    ):
        service.create_lora_training_client(
            MODEL, train_mlp=False, train_attn=False, train_unembed=False
        )
    with pytest.raises(ValueError, match="Either model_path or base_model must be provided"):
        service.create_sampling_client()
    with pytest.raises(ValueError, match="sampling_params"):
        sampler.sample(prompt(1), types.SamplingParams(), 1)
    with pytest.raises(ValueError, match="prompt"):
        sampler.sample([1, 2, 3], 1, types.SamplingParams())
    # None of these used a number up.
    assert client.forward_backward([datum()], CE).result()
    assert client._core.session.reserve(1).sequences.start == 2


@pytest.mark.parametrize("path", ["weights/a", 7])
def test_a_model_path_of_another_form_is_refused_when_the_client_is_asked_for(service, path):
    opened = service.create_sampling_client(model_path=path)
    with pytest.raises(ValueError, match=f"model_path must start with 'tinker://', got {path!r}"):
        opened.result()


@pytest.mark.parametrize("handle", ["", "x", "aGVsbG8=", "e30=", 5])
def test_what_is_no_handle_is_refused_with_its_value(handle):
    with pytest.raises(ValueError, match=f"handle is {handle!r}: expected what get_sampler"):
        tinker.SamplingClient.from_sampler_handle(handle)


def test_a_token_id_beyond_32_bits_is_refused_with_its_value(client):
    with pytest.raises(tinker.BadRequestError, match=str(2**40)):
        client.forward([datum([2**40], target_tokens=[1])], CE)
    with pytest.raises(tinker.BadRequestError, match=str(2**40)):
        client.forward_backward([datum([3], target_tokens=[2**40])], CE).result()


def test_a_dead_server_is_a_connection_error_that_names_it(monkeypatch):
    monkeypatch.setenv("TOGETHER_POST_TRAINING_CONNECT_TIMEOUT", "1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    service = tinker.ServiceClient(base_url=f"grpc://127.0.0.1:{port}")
    start_s = time.monotonic()
    for call in (
        lambda: service.create_lora_training_client(MODEL).result(),
        service.get_server_capabilities,
    ):
        with pytest.raises(tinker.APIConnectionError, match=f"127.0.0.1:{port}"):
            call()
    assert time.monotonic() - start_s < 5


def test_a_bad_sample_of_a_call_that_is_sent_in_parts_is_named_by_its_place_in_data(client):
    data = [datum()] * 1100
    data[1050] = datum(target_tokens=[4, 5, 16])
    with pytest.raises(tinker.BadRequestError, match=r"^Sample 1050: .*token id 16"):
        client.forward(data, CE).result()


@pytest.mark.parametrize("key", [7, b"bytes", "two\nlines", "schlüssel"])
def test_a_key_that_cannot_be_sent_is_refused_at_once(key):
    with pytest.raises(tinker.TinkerError, match="api_key") as refused:
        tinker.ServiceClient(base_url="grpc://h:1", api_key=key)
    assert str(key) not in str(refused.value)


def test_a_key_from_the_environment_that_cannot_be_sent_is_named(monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "two\nlines")
    with pytest.raises(tinker.TinkerError, match="TINKER_API_KEY"):
        tinker.ServiceClient(base_url="grpc://h:1")


@pytest.mark.parametrize("url", ["https://tinker.example.com", "http://127.0.0.1:8000"])
def test_a_web_address_is_refused_at_once_with_advice(url):
    with pytest.raises(ValueError, match=r"web address.*grpc://host:port"):
        tinker.ServiceClient(base_url=url)
