"""One client from many loops, threads and processes."""

from __future__ import annotations

import asyncio
import base64
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tinker import types

import tinker_compat as tinker
from tests.compat.conftest import MODEL
from tests.compat.data import HIT, datum, greedy, prompt

REPOSITORY = Path(__file__).parents[2]


async def use(client: tinker.TrainingClient) -> float:
    result = await (await client.forward_async([datum()], "cross_entropy"))
    return result.loss_fn_outputs[0]["logprobs"].tolist()[0]


def test_one_client_serves_one_loop_after_another_threads_and_plain_calls(client):
    values = [asyncio.run(use(client)), asyncio.run(use(client))]
    threads = [
        threading.Thread(target=lambda: values.append(asyncio.run(use(client)))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    values.append(
        client.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data[0]
    )
    for thread in threads:
        thread.join()
    assert values == pytest.approx([HIT] * 5, abs=1e-5)


def test_the_sync_interface_works_inside_a_running_loop(client):
    async def main() -> list[float]:
        first = client.forward([datum()], "cross_entropy").result()
        second = await (await client.forward_async([datum()], "cross_entropy"))
        return [r.loss_fn_outputs[0]["logprobs"].data[0] for r in (first, second)]

    assert asyncio.run(asyncio.wait_for(main(), 20)) == pytest.approx([HIT] * 2, abs=1e-5)


def test_pickled_sampling_clients_sample_from_the_same_weights(client):
    client.forward_backward([datum([3], target_tokens=[9])], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=0.5))
    sampler = client.save_weights_and_get_sampling_client()
    expected = sampler.compute_logprobs(prompt(3, 9)).result()
    for original in (sampler, sampler.result()):
        copy = pickle.loads(pickle.dumps(original))
        assert type(copy) is tinker.SamplingClient
        assert copy.compute_logprobs(prompt(3, 9)).result() == expected
        assert copy.get_base_model() == MODEL


def test_a_handle_is_a_client_without_its_secrets(address, sampler, monkeypatch):
    secret = tinker.ServiceClient(
        base_url=address, api_key="tml-secret", default_headers_overrides={"x-token": "hidden"}
    ).create_sampling_client(base_model=MODEL)
    handle = secret.get_sampler_handle()
    assert not {"tml-secret", "hidden"} & set(base64.urlsafe_b64decode(handle).decode().split('"'))
    monkeypatch.setenv("TINKER_API_KEY", "tml-other")
    copy = tinker.SamplingClient.from_sampler_handle(handle)
    assert copy.holder.connection.key == "tml-other"
    assert (
        tinker.SamplingClient.from_sampler_handle(handle, api_key="k").holder.connection.key == "k"
    )
    assert score(copy) == score(sampler)


def score(sampler: tinker.SamplingClient) -> list[float | None]:
    return sampler.compute_logprobs(prompt(3, 4)).result(timeout=30)


def test_a_spawned_process_samples_with_a_pickled_client(sampler):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(score, (sampler,))[1] == pytest.approx(HIT, abs=1e-5)
    assert score(sampler)[1] == pytest.approx(HIT, abs=1e-5)


FORK = """
import multiprocessing, os, sys, time
import tinker_compat as tinker
from tinker import types

def score(sampler):
    try:
        return sampler.compute_logprobs(types.ModelInput.from_ints([3, 4])).result(timeout=30)
    except RuntimeError as error:
        return str(error)

service = tinker.ServiceClient(base_url=sys.argv[1])
fork = multiprocessing.get_context("fork")
if sys.argv[2] == "before":
    with fork.Pool(1) as pool:
        sampler = service.create_sampling_client(base_model="builtin:bigram16").result()
        print("child", pool.apply(score, (sampler,)))
else:
    sampler = service.create_sampling_client(base_model="builtin:bigram16").result()
    long = types.SamplingParams(max_tokens=900)
    pending = [sampler.sample(types.ModelInput.from_ints([3]), 1, long) for _ in range(4)]
    start_s = time.monotonic()
    with fork.Pool(1) as pool:
        print("child", pool.apply(score, (sampler,)))
    assert time.monotonic() - start_s < 10
    assert len([p.result(timeout=30) for p in pending]) == 4
print("parent", score(sampler))
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forked_process_works_before_the_client_was_used_and_is_refused_after_it(address, when):
    """In any case at once, and the parent goes on, with what it had under way."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK, address, when],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    child, parent = done.stdout.splitlines()
    assert parent.startswith("parent [None, -0.2427")
    if when == "before":
        assert child == parent.replace("parent", "child")
    else:
        assert "not survive a fork" in child
        assert "spawn" in child


def test_a_script_that_ends_with_work_under_way_ends_at_once_and_quietly(address):
    """The server has what it was sent; nothing hangs or complains at exit."""
    script = f"""
import tinker_compat as tinker
from tinker import types
service = tinker.ServiceClient(base_url={address!r})
sampler = service.create_sampling_client(base_model="builtin:bigram16").result()
client = service.create_lora_training_client("builtin:bigram16").result()
for _ in range(8):
    sampler.sample(types.ModelInput.from_ints([3]), 4, types.SamplingParams(max_tokens=1000))
client.save_state("at-the-end")
print(client.model_id)
"""
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - start_s < 60
    again = tinker.ServiceClient(base_url=address)
    path = f"tinker://{done.stdout.strip()}/weights/at-the-end"
    assert again.create_training_client_from_state(path).result().get_info().lora_rank == 32


def test_many_clients_in_many_threads_get_what_is_theirs(address):
    wrong: list[object] = []

    def work(token: int) -> None:
        service = tinker.ServiceClient(base_url=address)
        sampler = service.create_sampling_client(base_model=MODEL)
        for _ in range(5):
            tokens = sampler.sample(prompt(token), 1, greedy(1)).result().sequences[0].tokens
            if tokens != [(token + 1) % 16]:
                wrong.append((token, tokens))
        service.close("success").result()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
