"""Traps of compatibility, one test each, as a user meets them: stops, prompt log-probabilities, LoRA. On torch models.

The numbers rank what most often breaks scripts that were written for Tinker; the other numbers are in the other
test_traps files.
"""

from __future__ import annotations

import io
import json
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

import tinker_compat as tinker
from tests import models
from tests.compat.conftest import running_server
from tests.compat.data import HIT, MISS, close, greedy, prompt

# Has a tokenizer and an end-of-sequence token; untrained, so that it samples every token.
TINY = "builtin:tiny"
# 128 tokens, embeddings tied to the head.
TIED = "tied"
# Two implementations of the same float32 arithmetic.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.rand(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="module")
def torch_service(
    base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tinker.ServiceClient]:
    store = tmp_path_factory.mktemp("traps") / "store"
    with (
        running_server(store, "--model", TINY, "--model", f"{TIED}={base}") as address,
        tinker.ServiceClient(base_url=address) as service,
    ):
        yield service


@pytest.mark.parametrize(
    ("stop", "expected", "reason"),
    [
        ("g", [4, 5, 6], "stop"),
        (["zz", "f"], [4, 5], "stop"),
        ([6], [4, 5, 6], "stop"),
        (["ef"], [4, 5], "stop"),
        ([], [4, 5, 6, 7, 8], "length"),
        (None, [4, 5, 6, 7, 8], "length"),
    ],
)
def test_trap_08_stop_tokens_are_part_of_the_tokens(sampler, stop, expected, reason):
    """Letters for tokens: a is 0. This model has no end-of-sequence token."""
    (sequence,) = sampler.sample(prompt(3), 1, greedy(5, stop=stop)).result().sequences
    assert (sequence.tokens, sequence.stop_reason) == (expected, reason)
    assert len(sequence.logprobs) == len(expected)


def test_trap_08_without_a_stop_the_models_own_end_stops_and_an_empty_list_never_does(
    torch_service,
):
    sampler = torch_service.create_sampling_client(base_model=TINY).result()
    end = sampler.get_tokenizer().eos_token_id
    start = types.ModelInput.from_ints(sampler.get_tokenizer().encode("Hello"))

    def sample(stop: Any) -> list[types.SampledSequence]:
        params = types.SamplingParams(max_tokens=600, temperature=1.5, seed=1, stop=stop)
        return sampler.sample(start, 4, params).result().sequences

    endless, default, by_id = sample([]), sample(None), sample([end])
    assert any(end in sequence.tokens for sequence in endless), "the seed was ill chosen"
    for full, stopped, named in zip(endless, default, by_id, strict=True):
        assert (full.stop_reason, len(full.tokens)) == ("length", 600)
        length = full.tokens.index(end) + 1 if end in full.tokens else 600
        assert stopped.tokens == named.tokens == full.tokens[:length]
        assert stopped.stop_reason == ("stop" if length < 600 else "length")
        assert len(stopped.logprobs or []) == length


def test_trap_09_prompt_logprobs_have_the_prompts_length_and_none_first(sampler):
    response = sampler.sample(
        prompt(3, 4, 9), 1, greedy(1), include_prompt_logprobs=True, topk_prompt_logprobs=2
    ).result()
    assert response.prompt_logprobs == [None, close(HIT), close(MISS)]
    assert sampler.compute_logprobs(prompt(3, 4, 9)).result() == [None, close(HIT), close(MISS)]
    first, *rows = response.topk_prompt_logprobs
    assert first is None
    assert [row[0][0] for row in rows] == [4, 5]
    assert all(row[0][1] > row[1][1] for row in rows), "likeliest first"
    without = sampler.sample(prompt(3, 4), 1, greedy(1)).result()
    assert without.prompt_logprobs is None


TOKENS = [5, 17, 90, 3, 44, 101, 60, 8]


def sequence_datum() -> types.Datum:
    inputs: Any = {"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)


def scores(sampler: tinker.SamplingClient) -> np.ndarray:
    """Of all tokens but the first."""
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    return np.array(scored[1:], np.float32)


def download(service: tinker.ServiceClient, path: str, directory: Path) -> Path:
    """As scripts do it: a link, a plain GET, a tar."""
    link = service.create_rest_client().get_checkpoint_archive_url_from_tinker_path(path).result()
    with urllib.request.urlopen(link.url) as response:
        received = io.BytesIO(response.read())
    with tarfile.open(fileobj=received) as archive:
        archive.extractall(directory, filter="data")
    return directory


def with_peft(base: Path, adapter: Path) -> np.ndarray:
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, adapter)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS[:-1]]), use_cache=False).logits[0]
    targets = torch.tensor(TOKENS[1:])[:, None]
    return logits.log_softmax(-1).gather(1, targets)[:, 0].numpy()


PARTS = {
    "train_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "train_mlp": {"gate_proj", "up_proj", "down_proj"},
    "train_unembed": {"lm_head"},
}


# PEFT's advice to those who merge into tied weights.
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("only", [None, *PARTS])
def test_trap_23_lora_is_of_rank_32_scaled_32_and_exported_as_it_is_served(
    torch_service, base, tmp_path, only
):
    flags = {} if only is None else {name: name == only for name in PARTS}
    client = torch_service.create_lora_training_client(TIED, seed=3, **flags).result()
    assert client.get_info().lora_rank == 32
    untrained = client.save_weights_and_get_sampling_client()
    plain = torch_service.create_sampling_client(base_model=TIED)
    assert np.array_equal(scores(untrained), scores(plain)), "B is 0"

    for _ in range(2):
        client.forward_backward([sequence_datum()], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.01)).result()
    path = client.save_weights_for_sampler("exported").result().path
    served = scores(torch_service.create_sampling_client(model_path=path))
    assert np.abs(served - scores(plain)).max() > 100 * TOLERANCE
    trained = client.forward([sequence_datum()], "cross_entropy").result().loss_fn_outputs[0]
    np.testing.assert_allclose(served, trained["logprobs"].to_numpy(), atol=TOLERANCE)

    adapter = download(torch_service, path, tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (32, 32)
    expected = set.union(*PARTS.values()) if only is None else PARTS[only]
    assert set(config["target_modules"]) == expected
    np.testing.assert_allclose(with_peft(base, adapter), served, atol=TOLERANCE)


def test_trap_23_something_must_be_trained(torch_service):
    with pytest.raises(AssertionError, match="At least one of train_mlp, train_attn"):
        torch_service.create_lora_training_client(
            TIED, train_mlp=False, train_attn=False, train_unembed=False
        )


def test_also_the_tokenizer_is_had_at_once_and_without_awaiting(torch_service):
    client = torch_service.create_lora_training_client(TINY, rank=4)
    tokenizer = client.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("Hello, world")) == "Hello, world"
    start_s = time.monotonic()
    for _ in range(100):
        assert client.get_tokenizer() is tokenizer
    assert time.monotonic() - start_s < 1
