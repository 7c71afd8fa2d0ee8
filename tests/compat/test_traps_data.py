"""Traps of compatibility, one test each, as a user meets them: data, errors, keywords, and what else is worth noting.

The numbers rank what most often breaks scripts that were written for Tinker; the other numbers are in the other
test_traps files.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tinker as genuine
import torch
from tinker import types

import tinker_compat as tinker
from tests.compat.conftest import MODEL
from tests.compat.data import HIT, MISS, close, datum, greedy, prompt
from tests.compat.traps import ADAM, fresh, logprobs, step_metrics
from together_post_training.client.channel import Connection

POLICY: dict[str, Any] = {
    "target_tokens": [4, 5, 9],
    "logprobs": [HIT, HIT, MISS],
    "advantages": [1.0, 0.0, 1.0],
}


def test_trap_12_inputs_are_coerced_by_their_key(client):
    made = datum(
        target_tokens=[4, 5, 9],
        logprobs=np.array([HIT, HIT, MISS]),
        advantages=torch.tensor([1, 0, 1], dtype=torch.bfloat16),
    )
    dtypes = {name: tensor.dtype for name, tensor in made.loss_fn_inputs.items()}
    assert dtypes == {"target_tokens": "int64", "logprobs": "float32", "advantages": "float32"}
    result = client.forward_backward([made], "importance_sampling").result()
    assert result.metrics["loss:sum"] == close(-2.0)
    expected = client.forward([datum(**POLICY)], "importance_sampling").result()
    assert (
        result.loss_fn_outputs[0]["logprobs"].data == expected.loss_fn_outputs[0]["logprobs"].data
    )


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        ({"my_key": [1.0, 2.0, 3.0]}, KeyError),
        ({"target_tokens": (4, 5, 9)}, TypeError),
        ({"target_tokens": [[4, 5], [9]]}, ValueError),
        ({"weights": np.array([True, False, True])}, ValueError),
        ({"weights": 1.0}, TypeError),
    ],
)
def test_trap_12_what_tinker_refuses_to_coerce_is_refused(inputs, error):
    with pytest.raises(error):
        datum(**inputs)


def test_trap_12_loss_fn_inputs_is_a_dict_that_scripts_change(client):
    """The cookbook's own key is taken out before sending."""
    made = datum(**POLICY, mask=torch.ones(3))
    assert made.loss_fn_inputs.pop("mask").tolist() == [1.0, 1.0, 1.0]
    assert client.forward_backward([made], "ppo").result().metrics["loss:sum"] == close(-2.0)
    future = client.forward([made], "ppo")
    made.loss_fn_inputs.clear()
    assert future.result().metrics["loss:sum"] == close(-2.0), "read when the call was made"


def overflowing() -> types.Datum:
    """Accepted, and then its ratio is e^1000."""
    return datum([3], target_tokens=[4], logprobs=[-1000.0], advantages=[1.0])


STATUS: dict[str, tuple[type[Exception], int, Callable[[Any, Any], Any]]] = {
    "lengths": (
        tinker.BadRequestError,
        400,
        lambda s, c: c.forward_backward([datum(target_tokens=[4])], "cross_entropy"),
    ),
    "missing input": (
        tinker.BadRequestError,
        400,
        lambda s, c: c.forward_backward([datum(target_tokens=[4, 5, 9])], "ppo"),
    ),
    "unknown loss": (
        tinker.BadRequestError,
        400,
        lambda s, c: c.forward_backward([datum()], "nonexistent_loss"),
    ),
    "over the window": (
        tinker.BadRequestError,
        400,
        lambda s, c: s.create_sampling_client(base_model=MODEL).sample(prompt(3), 1, greedy(5000)),
    ),
    "rank": (tinker.BadRequestError, 400, lambda s, c: s.create_lora_training_client(MODEL, 0)),
    "unknown model": (
        tinker.NotFoundError,
        404,
        lambda s, c: s.create_lora_training_client(base_model="org/never"),
    ),
    "unknown checkpoint": (
        tinker.NotFoundError,
        404,
        lambda s, c: s.create_sampling_client(f"tinker://{c.model_id}/sampler_weights/never"),
    ),
    "taken name": (
        tinker.ConflictError,
        409,
        lambda s, c: (c.save_state("x"), c.save_state("x"))[1],
    ),
}


@pytest.mark.parametrize("case", STATUS)
def test_trap_22_what_is_refused_is_the_exception_of_its_status(service, client, case):
    expected, status, call = STATUS[case]
    with pytest.raises(genuine.APIStatusError) as caught:
        call(service, client).result()
    error = caught.value
    assert type(error) is expected
    assert isinstance(error, (tinker.APIError, tinker.TinkerError))
    assert error.status_code == error.response.status_code == status
    assert error.message == str(error) != ""
    assert isinstance(error.body, dict)
    assert error.body["message"] == error.message
    assert isinstance(error.request, httpx.Request)
    assert type(pickle.loads(pickle.dumps(error))) is expected


def test_trap_22_accepted_work_that_fails_is_a_failed_request_and_no_bad_request(client):
    with pytest.raises(tinker.RequestFailedError, match=r"importance_sampling|finite") as caught:
        client.forward_backward([overflowing()], "importance_sampling").result()
    error = caught.value
    assert not isinstance(error, tinker.APIStatusError)
    assert error.category is types.RequestErrorCategory.User
    assert error.category == "user"
    assert error.request_id.endswith("/operations/1")
    assert client.forward_backward([datum()], "cross_entropy").result(), "the client goes on"


def test_trap_22_what_is_checked_before_sending_is_a_value_error(service, client):
    with pytest.raises(ValueError, match="No data provided"):
        client.forward_backward([], "cross_entropy")
    with pytest.raises(ValueError, match="Either model_path or base_model must be provided"):
        service.create_sampling_client()
    with pytest.raises(ValueError, match="model_path must start with 'tinker://'"):
        service.create_sampling_client(model_path="runs/final").result()
    with pytest.raises(ValueError, match="validation error"):
        types.AdamParams(lr=1e-4)  # pyright: ignore[reportCallIssue]
    sampler = service.create_sampling_client(base_model=MODEL).result()
    with pytest.raises(ValueError, match="num_samples"):
        sampler.sample(prompt(3), greedy(1), 1).result()


def test_trap_22_a_server_that_cannot_be_reached_is_a_connection_error(monkeypatch):
    monkeypatch.setenv("TOGETHER_POST_TRAINING_CONNECT_TIMEOUT", "0.2")
    service = tinker.ServiceClient(base_url="grpc://127.0.0.1:9")
    with pytest.raises(tinker.APIConnectionError, match=r"127\.0\.0\.1:9") as caught:
        service.create_lora_training_client(MODEL).result()
    assert isinstance(caught.value, tinker.APIError)


# Also worth noting


def test_also_an_output_has_no_loss_of_its_own(client):
    result = client.forward_backward([datum()], "cross_entropy").result()
    assert not hasattr(result, "loss")
    assert {field.name for field in dataclasses.fields(result)} == {
        "loss_fn_output_type",
        "loss_fn_outputs",
        "metrics",
    }
    assert isinstance(result.loss_fn_output_type, str)


def test_also_sequences_have_the_installed_tinkers_fields(sampler):
    """`sequence_id` is required where Tinker has it, so that scripts which build sequences meet Tinker's own class."""
    (sequence,) = sampler.sample(prompt(3), 1, greedy(2)).result().sequences
    assert type(sequence) is genuine.SampledSequence
    names = {field.name for field in dataclasses.fields(sequence)}
    assert ("sequence_id" in names) == hasattr(sequence, "sequence_id")
    if "sequence_id" in names:
        assert sequence.sequence_id


def test_also_samples_of_one_seed_are_the_same_and_members_of_a_group_differ(sampler):
    params = types.SamplingParams(max_tokens=12, temperature=4.0, seed=0, stop=[])

    def drawn(num_samples: int) -> list[list[int]]:
        response = sampler.sample(prompt(3), num_samples, params).result()
        return [sequence.tokens for sequence in response.sequences]

    assert drawn(3) == drawn(3)
    assert len({tuple(tokens) for tokens in drawn(3)}) == 3
    assert drawn(1) == drawn(3)[:1]


def test_also_sampled_logprobs_are_those_of_the_untempered_model(sampler):
    hot = types.SamplingParams(max_tokens=8, temperature=4.0, seed=2, stop=[])
    (sequence,) = sampler.sample(prompt(3), 1, hot).result().sequences
    scores = sampler.compute_logprobs(prompt(3, *sequence.tokens)).result()
    assert sequence.logprobs == close(scores[1:])


OLD_IDIOMS = """
import asyncio, sys
import tinker_compat as tinker
from tinker import types
service = tinker.ServiceClient(base_url=sys.argv[1])
client = service.create_lora_training_client(base_model="builtin:bigram16", rank=4)
inputs = {"target_tokens": [4, 5], "weights": [1.0, 1.0]}
data = [types.Datum(model_input=types.ModelInput.from_ints([3, 4]), loss_fn_inputs=inputs)]
client.forward_backward(data, "cross_entropy").result()
client.optim_step(adam_params=types.AdamParams(learning_rate=1e-3)).result()
path = client.save_state("a").result().path
client.load_state(path).result()
client.load_state_with_optimizer(path).result()
sampler = client.save_weights_and_get_sampling_client()
future = sampler.sample(types.ModelInput.from_ints([3]), 1, types.SamplingParams(max_tokens=1))
future.add_done_callback(lambda f: None)
future.done(), future.result()
service.get_server_capabilities(), client.get_info(), service.create_rest_client()
async def main():
    again = await service.create_lora_training_client_async("builtin:bigram16", rank=4)
    await (await again.forward_backward_async(data, "cross_entropy"))
    await (await again.optim_step_async(types.AdamParams()))
    await again.save_weights_and_get_sampling_client_async()
    await service.create_training_client_from_state_async(path)
asyncio.run(main())
print("done")
"""


def test_also_old_idioms_raise_nothing_where_warnings_are_errors(address):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", OLD_IDIOMS, address],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.stdout == "done\n", done.stderr


def test_also_only_request_types_forbid_unknown_fields():
    params = types.SamplingParams(max_tokens=3, stop_token_ids=[1], return_logprobs=True)  # pyright: ignore[reportCallIssue]
    assert params == types.SamplingParams(max_tokens=3)
    assert types.LoraConfig(rank=4).rank == 4
    with pytest.raises(ValueError, match="lora_alpha"):
        types.LoraConfig(rank=4, lora_alpha=16)  # pyright: ignore[reportCallIssue]


# Keywords that occur in other people's code


def test_sampling_params_drops_names_that_it_does_not_know(sampler):
    params = types.SamplingParams(
        max_tokens=2,
        temperature=0.0,
        stop_strings=["e"],  # pyright: ignore[reportCallIssue]
        return_logprobs=True,  # pyright: ignore[reportCallIssue]
        stop_token_ids=[4],  # pyright: ignore[reportCallIssue]
    )
    (sequence,) = sampler.sample(prompt(3), 1, params).result().sequences
    assert (sequence.tokens, sequence.stop_reason) == ([4, 5], "length"), (
        "as if they were not there"
    )


NOT_TINKERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "learning_rate": lambda s, c, p: c.optim_step(learning_rate=1e-4),
    "optimizer": lambda s, c, p: c.load_state("tinker://run/weights/a", optimizer=True),
    "tokenizer": lambda s, c, p: s.create_sampling_client(base_model=MODEL, tokenizer=None),
    "debug_train_only": lambda s, c, p: s.create_lora_training_client(MODEL, debug_train_only=True),
    "temperature": lambda s, c, p: p.sample(prompt(3), 1, greedy(1), temperature=0.5),
    "return_loss_fn_outputs": lambda s, c, p: c.forward_backward(
        [datum()], "cross_entropy", return_loss_fn_outputs=True
    ),
}


@pytest.mark.parametrize("keyword", NOT_TINKERS)
def test_keywords_of_other_sdks_are_type_errors(service, client, sampler, keyword):
    with pytest.raises(TypeError, match=keyword):
        NOT_TINKERS[keyword](service, client, sampler)


def test_positional_habits_work(service, client):
    state = client.save_state("habit").result().path
    assert client.forward_backward([datum()], "cross_entropy").result()
    assert client.optim_step(ADAM).result()
    assert client.load_state(state).result()
    resumed = service.create_training_client_from_state(state, {"renderer_name": "chat"}).result()
    run = service.create_rest_client().get_training_run(resumed.model_id).result()
    assert run.user_metadata == {"renderer_name": "chat"}, "its place in older versions"
    sampler = resumed.save_weights_and_get_sampling_client()
    response = sampler.sample(prompt(3), sampling_params=greedy(1), num_samples=2).result()
    assert [sequence.tokens for sequence in response.sequences] == [[4], [4]]
    assert types.ModelInput.from_ints(tokens=[3, 4]) == types.ModelInput.from_ints([3, 4])


# What else scripts rely on


def test_other_calls_take_no_place_in_a_clients_order(client):
    """Neither information nor sampling is numbered: a request's number tells which operation it is."""

    def number(future: Any) -> str:
        with pytest.raises(tinker.RequestFailedError) as failed:
            future.result()
        return failed.value.request_id.rpartition("/")[2]

    for operation in (
        client.forward([datum()], "cross_entropy"),
        client.forward_backward([datum()], "cross_entropy"),
        client.optim_step(ADAM),
        client.save_state("a"),
        client.load_state(f"tinker://{client.model_id}/weights/a"),
    ):
        operation.result()
    client.get_info()
    sampler = client.save_weights_and_get_sampling_client().result()
    sampler.sample(prompt(3), 1, greedy(1)).result()
    failing = client.forward_backward([overflowing()], "importance_sampling")
    assert number(failing) == "7"


def test_a_rejected_call_leaves_a_gap_that_nobody_trips_over(service):
    client, undisturbed = fresh(service), fresh(service)
    rejected = client.forward_backward([datum(target_tokens=[4])], "cross_entropy")
    with pytest.raises(tinker.BadRequestError):
        rejected.result()
    for run in (client, undisturbed):
        run.forward_backward([datum()], "cross_entropy").result()
        step_metrics(run, ADAM)
    assert logprobs(client) == logprobs(undisturbed)


def test_calls_survive_connections_that_break_and_servers_that_are_busy(fake):
    service = tinker.ServiceClient(base_url=fake.address)
    client = service.create_lora_training_client("fake").result()
    sampler = client.save_weights_and_get_sampling_client().result()
    for method in ("ForwardBackward", "OptimStep", "WaitOperation", "Sample", "ListModels"):
        fake.inject(method, times=2, code=grpc.StatusCode.UNAVAILABLE, retry_s=0.01)
    result = client.forward_backward([datum()], "cross_entropy").result(timeout=20)
    assert result.metrics["loss:sum"] == 1.0
    assert client.optim_step(ADAM).result(timeout=20)
    assert sampler.sample(prompt(1), 1, greedy(2)).result(timeout=20).sequences
    assert service.get_server_capabilities().supported_models
    sent = fake.received("ForwardBackward")
    assert len(sent) == 3
    assert len({request.SerializeToString(deterministic=True) for request in sent}) == 1


def test_inputs_that_a_loss_does_not_read_are_refused_by_name(client):
    """Tinker does not say what becomes of them. A mask that is dropped trains on what it was to leave out."""
    for name in ("mask", "values"):
        inputs: dict[str, Any] = POLICY | {name: np.ones(3, np.float32)}
        unread = datum(**inputs)
        with pytest.raises(tinker.BadRequestError, match=f"'{name}'.*does not read"):
            client.forward_backward([unread], "ppo").result()


def test_image_chunks_count_the_tokens_that_they_say(client):
    """A model of text refuses them by name; what has no length cannot be counted by Tinker either."""
    image = types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=2)
    chunks = [types.EncodedTextChunk(tokens=[3]), image]
    assert types.ModelInput(chunks=chunks).length == 3
    made = types.Datum(
        model_input=types.ModelInput(chunks=chunks),
        loss_fn_inputs={"target_tokens": [4, 5, 6], "weights": [0.0, 0.0, 1.0]},  # pyright: ignore[reportArgumentType]
    )
    with pytest.raises(tinker.BadRequestError, match=re.compile("image", re.IGNORECASE)):
        client.forward([made], "cross_entropy").result()


def test_a_closed_client_refuses_everything_and_first_close_wins(address):
    service = tinker.ServiceClient(base_url=address)
    client = fresh(service)
    service.close("success").result()
    assert service.close("errored").done()
    for call in (
        lambda: client.forward([datum()], "cross_entropy"),
        lambda: service.create_lora_training_client(MODEL),
        lambda: service.create_sampling_client(base_model=MODEL),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "success"), (KeyError("x"), "errored"), (KeyboardInterrupt(), "interrupted")],
)
def test_leaving_a_with_block_closes_with_how_it_was_left(address, monkeypatch, error, status):
    closed: list[str] = []
    original = tinker.ServiceClient.close

    def recording(self: Any, how: Any, detail: str | None = None) -> Any:
        closed.append(how)
        return original(self, how, detail)

    monkeypatch.setattr(tinker.ServiceClient, "close", recording)

    def block() -> None:
        with tinker.ServiceClient(base_url=address) as service:
            fresh(service)
            if error is not None:
                raise error

    if error is None:
        block()
    else:
        with pytest.raises(type(error)):
            block()
    assert closed == [status]


def test_nothing_is_sent_before_it_is_needed(monkeypatch):
    def refuse(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("a call was made")

    monkeypatch.setattr(Connection, "call", refuse)
    service = tinker.ServiceClient(base_url="grpc://127.0.0.1:9")
    assert service.holder.get_session_id()
    assert service.create_rest_client()


def test_futures_of_training_go_to_create_task_by_their_coroutine(client):
    async def main() -> None:
        task = asyncio.create_task(client.forward([datum()], "cross_entropy").coroutine())
        assert (await task).metrics["loss:sum"] > 0

    asyncio.run(main())
