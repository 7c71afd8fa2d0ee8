"""Full weights through Tinker's names: every parameter of a small model, from the first step to plain transformers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker import types
from transformers import AutoModelForCausalLM, AutoTokenizer

import tinker_compat as tinker
from tests.compat.conftest import MODEL, REPOSITORY, running_server

TINY = "builtin:tiny"
TEXT = "To be, or not to be, that is the question."
ADAM = types.AdamParams(learning_rate=2e-3)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("full") / "store"


@pytest.fixture(scope="module")
def tiny_address(store: Path) -> Iterator[str]:
    with running_server(store, "--model", TINY) as address:
        yield address


def datum(tokens: list[int]) -> types.Datum:
    inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def scores(sampler: tinker.SamplingClient, tokens: list[int]) -> np.ndarray:
    """Of all tokens but the first."""
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    return np.array(scored[1:], np.float32)


def step(client: tinker.TrainingClient, tokens: list[int]) -> float:
    passed = client.forward_backward([datum(tokens)], "cross_entropy")
    client.optim_step(ADAM).result()
    return passed.result().metrics["loss:sum"]


def test_full_weights_train_sample_save_resume_and_load_in_plain_transformers(
    tiny_address: str, store: Path
):
    with tinker.ServiceClient(base_url=tiny_address) as service:
        client = service.create_full_training_client(TINY).result()
        info = client.get_info()
        assert (info.is_lora, info.lora_rank, info.model_name) == (False, None, TINY)
        tokens = client.get_tokenizer().encode(TEXT)
        first = client.save_weights_and_get_sampling_client().result()
        losses = [step(client, tokens) for _ in range(15)]
        assert losses[-1] < losses[0] / 4

        assert scores(first, tokens).sum() == pytest.approx(-losses[0], abs=1e-2)
        second = client.save_weights_and_get_sampling_client().result()
        wanted = client.forward([datum(tokens)], "cross_entropy").result()
        logprobs = np.array(wanted.loss_fn_outputs[0]["logprobs"].data)
        np.testing.assert_allclose(scores(second, tokens), logprobs, atol=1e-4)
        greedy = types.SamplingParams(max_tokens=12, temperature=0.0)
        start = types.ModelInput.from_ints(tokens[:6])
        said = second.sample(start, 1, greedy).result().sequences[0].tokens

        state = client.save_state("state").result().path
        saved = client.save_weights_for_sampler("final").result().path
        going_on = [step(client, tokens) for _ in range(2)]

    with tinker.ServiceClient(base_url=tiny_address) as service:
        resumed = service.create_training_client_from_state_with_optimizer(state).result()
        assert not resumed.get_info().is_lora
        assert [step(resumed, tokens) for _ in range(2)] == going_on
        resumed.load_state(state).result()
        assert resumed.forward([datum(tokens)], "cross_entropy").result().metrics[
            "loss:sum"
        ] == pytest.approx(-logprobs.sum(), abs=1e-3)
        sampler = service.create_sampling_client(model_path=saved).result()
        again = sampler.sample(start, 1, greedy).result().sequences[0].tokens
        assert list(again) == list(said)

    directory = store / "checkpoints" / saved.removeprefix("tinker://")
    plain = AutoModelForCausalLM.from_pretrained(directory)
    assert AutoTokenizer.from_pretrained(directory).encode(TEXT) == tokens
    with torch.no_grad():
        lp = plain(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1).numpy()
    np.testing.assert_allclose(lp[np.arange(len(tokens) - 1), tokens[1:]], logprobs, atol=1e-4)


def test_saved_full_weights_are_served_as_a_base_model(tiny_address: str, store: Path):
    with tinker.ServiceClient(base_url=tiny_address) as service:
        client = service.create_full_training_client(TINY).result()
        tokens = client.get_tokenizer().encode(TEXT)
        for _ in range(3):
            step(client, tokens)
        wanted = client.forward([datum(tokens)], "cross_entropy").result().metrics["loss:sum"]
        saved = client.save_weights_for_sampler("base").result().path
    directory = store / "checkpoints" / saved.removeprefix("tinker://")
    with (
        running_server(store.parent / "other", "--model", f"mine={directory}") as address,
        tinker.ServiceClient(base_url=address) as service,
    ):
        client = service.create_lora_training_client("mine", rank=4).result()
        got = client.forward([datum(tokens)], "cross_entropy").result().metrics["loss:sum"]
        assert got == pytest.approx(wanted, abs=1e-3)


SCRIPT = """
import sys
import tinker_compat as tinker

def main():
    client = tinker.ServiceClient(base_url=sys.argv[1]).create_full_training_client(sys.argv[2]).result()
    print(client.model_id)
    client.save_state("last")

main()
exec(sys.argv[3])
"""


@pytest.mark.parametrize("end", ["pass", "1 / 0", "sys.exit(3)", "raise KeyboardInterrupt"])
def test_full_weights_make_room_when_their_script_ends(address: str, end: str):
    """Nobody closes a client, or holds on to it, at the end of an ordinary script."""
    command = [sys.executable, "-c", SCRIPT, address, MODEL, end]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    with tinker.ServiceClient(base_url=address) as service:
        client = service.create_full_training_client(MODEL).result(timeout=5)
        if end == "pass":
            client.load_state(f"tinker://{done.stdout.strip()}/weights/last").result()


def test_second_full_training_client_waits_for_the_first_to_end(address: str):
    first, second = (tinker.ServiceClient(base_url=address) for _ in range(2))
    first.create_full_training_client(MODEL).result()  # Nobody holds on to it.
    waiting = second.create_full_training_client(MODEL)
    with pytest.raises(TimeoutError):
        waiting.result(timeout=0.5)
    first.close("success").result()
    assert not waiting.result(timeout=30).get_info().is_lora
    second.close("success").result()


def test_full_training_client_can_be_awaited(address: str):
    with tinker.ServiceClient(base_url=address) as service:
        client = asyncio.run(service.create_full_training_client_async(MODEL))
        assert not client.get_info().is_lora
