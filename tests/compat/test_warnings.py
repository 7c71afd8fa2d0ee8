"""What the server warns of is shown once per training client, at the line that gets the result."""

from __future__ import annotations

import asyncio
import linecache
import logging
import re
import threading
import warnings
from typing import Any

import numpy as np
import pytest
from tinker import types

import tinker_compat as tinker
from tests.client.fake_service import FakeService
from tests.compat.data import datum

# Of builtin:bigram16: hits (the token after is one more) and misses in no regular order.
TOKENS = [3, 4, 5, 9, 10, 11, 12, 2, 3, 8, 9, 10, 1, 7, 8]


@pytest.fixture
def training(fake: FakeService) -> tinker.TrainingClient:
    return tinker.ServiceClient(base_url=fake.address).create_lora_training_client("fake").result()


def policy_datum(logprobs: list[float]) -> types.Datum:
    n = len(TOKENS) - 1
    return datum(TOKENS[:-1], target_tokens=TOKENS[1:], logprobs=logprobs, advantages=[1.0] * n)


def current_logprobs(client: tinker.TrainingClient) -> list[float]:
    plain = datum(TOKENS[:-1], target_tokens=TOKENS[1:], weights=[1.0] * (len(TOKENS) - 1))
    done = client.forward([plain], "cross_entropy").result()
    return list(done.loss_fn_outputs[0]["logprobs"].data)


def rolled(values: list[float], by: int) -> list[float]:
    return np.roll(values, by).tolist()


@pytest.mark.parametrize("by", [-1, 1])
def test_shifted_logprobs_are_warned_of_once_with_place_and_hint_and_measured_each_time(client, by):
    shifted = [policy_datum(rolled(current_logprobs(client), by))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = [client.forward(shifted, "importance_sampling").result() for _ in range(3)]
        done.append(client.forward_backward(shifted, "importance_sampling").result())
    (warning,) = caught
    assert warning.category is UserWarning
    assert warning.filename == __file__
    text = str(warning.message)
    where = "left" if by > 0 else "right"
    assert re.match(rf"Sample 0: .* one position to the {where}: at position \d+", text), text
    assert "logprobs[i] belongs to target_tokens[i]" in text
    assert [one.metrics["alignment_shifted_logprobs:sum"] for one in done] == [1.0] * 4


def test_aligned_data_is_not_warned_of(client):
    aligned = [policy_datum(current_logprobs(client))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = client.forward_backward(aligned, "ppo").result()
    assert done.metrics["alignment_shifted_logprobs:sum"] == 0.0


def test_shifted_targets_and_shifted_logprobs_are_told_apart(client):
    """Who trains on a teacher's targets is still told of shifted logprobs, and each client is told."""
    odd = [datum([3, 4, 5], target_tokens=[9, 9, 9], weights=[1.0] * 3)]
    shifted = [policy_datum(rolled(current_logprobs(client), 1))]
    with pytest.warns(UserWarning, match=r"target_tokens\[0\] is 9, but model_input\[1\] is 4"):
        client.forward(odd, "cross_entropy").result()
    with pytest.warns(UserWarning, match="fit the current policy better"):
        client.forward(shifted, "importance_sampling").result()


def test_each_client_is_warned(service):
    odd = [datum([3, 4, 5], target_tokens=[9, 9, 9], weights=[1.0] * 3)]
    for _ in range(2):
        client = service.create_lora_training_client("builtin:bigram16", rank=4)
        with pytest.warns(UserWarning, match="target_tokens"):
            client.forward_backward(odd, "cross_entropy").result()


def step(client: tinker.TrainingClient) -> Any:
    return client.optim_step(types.AdamParams())


def shown(fake: FakeService, get: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        get()
    return list(caught)


def test_warnings_come_where_the_result_is_awaited(fake, training):
    fake.warnings[1] = ["mind the gap"]

    async def wait() -> Any:
        await step(training)
        return await step(training)

    (warning,) = shown(fake, lambda: asyncio.run(wait()))
    assert str(warning.message) == "mind the gap"
    assert "await step(training)" in linecache.getline(warning.filename, warning.lineno)


def test_warnings_of_a_result_that_nobody_gets_come_with_the_next(fake, training):
    fake.warnings[1] = ["mind the gap"]
    step(training)
    (warning,) = shown(fake, step(training).result)
    assert str(warning.message) == "mind the gap"


def test_a_text_is_shown_once_however_often_it_comes(fake, training):
    fake.warnings.update({1: ["one", "two"], 2: ["two", "one"], 3: ["three"]})

    def three_steps() -> None:
        for _ in range(3):
            future = step(training)
            future.result()
            future.result()

    texts = [str(warning.message) for warning in shown(fake, three_steps)]
    assert texts == ["one", "two", "three"]


def test_warnings_come_with_a_call_of_several_operations_and_with_a_custom_loss(fake, training):
    pytest.importorskip("torch")
    fake.warnings.update({1: ["of a forward pass"], 2: ["of a backward pass"], 4: ["of a chunk"]})
    custom = training.forward_backward_custom([datum()], lambda data, lps: (lps[0].sum(), {}))
    assert len(shown(fake, custom.result)) == 2
    many = training.forward_backward([datum()] * 1025, "cross_entropy")
    assert [str(one.message) for one in shown(fake, many.result)] == ["of a chunk"]


@pytest.mark.parametrize("style", ["result", "await"])
def test_warnings_that_are_errors_are_logged_and_the_result_is_delivered(
    fake, training, style, caplog
):
    """As under `python -W error`: a warning must not cost the result that it came with."""
    fake.warnings[1] = ["mind the gap"]
    future = training.forward_backward([datum()], "cross_entropy")
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        done = future.result() if style == "result" else asyncio.run(future.coroutine())
    assert done.metrics["loss:sum"] == 1.0
    assert [r.getMessage() for r in caplog.records if r.name.startswith("tinker_compat")] == [
        "mind the gap"
    ]


def test_warnings_are_never_given_in_a_thread_of_the_clients_own(fake):
    """Closing looks at what nobody has looked at, on the client's own loop."""
    service = tinker.ServiceClient(base_url=fake.address)
    training = service.create_lora_training_client("fake").result()
    fake.warnings[1] = ["mind the gap"]
    threads: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            warnings, "warn", lambda *a, **k: threads.append(threading.current_thread().name)
        )
        future = step(training)
        service.close("success").result()
        assert threads == []
        future.result()
    assert threads == [threading.current_thread().name]


def test_bounds_that_are_offsets_are_warned_of_once(client):
    given = {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2}
    data = [policy_datum(current_logprobs(client))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            client.forward_backward(data, "ppo", given).result()
    (warning,) = caught
    assert "0.2 .. 0.2" in str(warning.message)


def test_warnings_of_samples_and_scores_are_shown_once_per_client_at_the_callers_line(fake):
    fake.sample_warnings = [["no seeds here"], ["no seeds here", "two"], ["three"]]
    service = tinker.ServiceClient(base_url=fake.address)
    sampler = service.create_sampling_client(base_model="fake").result()
    prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)

    async def wait() -> None:
        await sampler.sample(prompt, 1, params)
        await sampler.compute_logprobs_async(prompt)

    def use() -> None:
        sampler.sample(prompt, 1, params).result()
        asyncio.run(wait())

    caught = shown(fake, use)
    assert [str(warning.message) for warning in caught] == ["no seeds here", "two", "three"]
    assert [warning.category for warning in caught] == [UserWarning] * 3
    lines = [linecache.getline(warning.filename, warning.lineno).strip() for warning in caught]
    assert lines == [
        "sampler.sample(prompt, 1, params).result()",
        "await sampler.sample(prompt, 1, params)",
        "await sampler.compute_logprobs_async(prompt)",
    ]
    fake.sample_warnings = [["no seeds here"]]
    other = service.create_sampling_client(base_model="fake").result()
    assert len(shown(fake, other.sample(prompt, 1, params).result)) == 1
