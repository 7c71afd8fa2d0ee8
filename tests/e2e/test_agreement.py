"""Three ways to the same number: the trainer, the sampler, and plain transformers + peft from the saved files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM

import tinker_compat as tinker
from benchmarks.server import serve
from tests import models

# float32 on both sides, sums taken in another order: the three were seen to differ by up to 4e-6.
TOLERANCE = 1e-4
RNG = np.random.default_rng(7)
SEQUENCES = [RNG.integers(0, models.VOCAB_SIZE, n).tolist() for n in (20, 5, 33, 2)]


@pytest.fixture(scope="module", params=["untied", "tied"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp(request.param) / "model"
    return models.rand(where, "qwen3", tied=request.param == "tied")


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[tuple[tinker.ServiceClient, Path]]:
    store = directory.parent / "store"
    with serve(f"rand={directory}", store=store) as server:
        service = tinker.ServiceClient(base_url=server.address)
        yield service, store
        service.close("success").result()


@pytest.fixture(scope="module")
def trained(served: tuple[tinker.ServiceClient, Path]) -> tinker.TrainingClient:
    client = served[0].create_lora_training_client("rand", rank=4, seed=3).result()
    for _ in range(3):
        client.forward_backward([datum(s) for s in SEQUENCES], "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=0.02)).result()
    return client


def datum(tokens: list[int], **inputs: list[float]) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64"),
            **{k: tinker.TensorData(data=v, dtype="float32") for k, v in inputs.items()},
        },
    )


def score(client: tinker.SamplingClient, tokens: list[int]) -> np.ndarray:
    """float64 (num tokens - 1,): the first token has no logprob."""
    first, *rest = client.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
    assert first is None
    return np.array(rest, np.float64)


def forward(client: tinker.TrainingClient, sequences: list[list[int]]) -> list[np.ndarray]:
    data = [datum(s, weights=[0.0] * (len(s) - 1)) for s in sequences]
    outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
    return [o["logprobs"].to_numpy() for o in outputs]


def test_forward_sampler_and_plain_peft_agree(
    served: tuple[tinker.ServiceClient, Path], trained: tinker.TrainingClient, directory: Path
) -> None:
    service, store = served
    by_trainer = forward(trained, SEQUENCES)
    sampler = trained.save_weights_and_get_sampling_client().result()
    path = trained.save_weights_for_sampler("agree").result().path
    saved = service.create_sampling_client(model_path=path).result()
    (adapter,) = store.rglob("agree/adapter_config.json")
    plain = AutoPeftModelForCausalLM.from_pretrained(adapter.parent, dtype=torch.float32)
    assert plain.peft_config["default"].base_model_name_or_path == str(directory)
    base_logprobs = forward(
        service.create_lora_training_client("rand", rank=1, seed=0).result(), SEQUENCES
    )
    for tokens, ours, untrained in zip(SEQUENCES, by_trainer, base_logprobs, strict=True):
        assert np.abs(ours - untrained).max() > 0.1
        for client in (sampler, saved):
            np.testing.assert_allclose(score(client, tokens), ours, atol=TOLERANCE)
        with torch.no_grad():
            logprobs = plain(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        reference = logprobs[torch.arange(len(tokens) - 1), tokens[1:]].numpy()
        np.testing.assert_allclose(ours, reference, atol=TOLERANCE)


def test_sampled_logprobs_fed_back_give_ratio_one(trained: tinker.TrainingClient) -> None:
    sampler = trained.save_weights_and_get_sampling_client().result()
    prompt = [5, 9, 17]
    params = tinker.SamplingParams(max_tokens=6, seed=1, temperature=1.0, stop=[])
    response = sampler.sample(tinker.ModelInput.from_ints(prompt), 4, params).result()
    data = []
    for sequence in response.sequences:
        assert sequence.logprobs is not None
        tokens = prompt + sequence.tokens
        data.append(
            datum(tokens, logprobs=[0.0, 0.0, *sequence.logprobs], advantages=[0.0] * 2 + [1.0] * 6)
        )
    output = trained.forward(data, "importance_sampling").result()
    assert output.metrics["loss:sum"] == pytest.approx(-24, abs=1e-3)
    for sequence, fields in zip(response.sequences, output.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(
            fields["logprobs"].to_numpy()[2:], np.array(sequence.logprobs), atol=TOLERANCE
        )


def test_snapshot_keeps_its_weights_when_training_goes_on(trained: tinker.TrainingClient) -> None:
    pinned = trained.save_weights_and_get_sampling_client().result()
    before = score(pinned, SEQUENCES[0])
    path = trained.save_state("pinned", overwrite=True).result().path
    trained.forward_backward([datum(SEQUENCES[2])], "cross_entropy")
    trained.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
    later = trained.save_weights_and_get_sampling_client().result()
    np.testing.assert_array_equal(score(pinned, SEQUENCES[0]), before)
    assert np.abs(score(later, SEQUENCES[0]) - before).max() > 0.1
    trained.load_state_with_optimizer(path).result()


def test_resumed_session_goes_on_as_if_it_had_never_stopped(
    served: tuple[tinker.ServiceClient, Path], trained: tinker.TrainingClient
) -> None:
    path = trained.save_state("resume").result().path
    resumed = served[0].create_training_client_from_state_with_optimizer(path).result()
    for client in (trained, resumed):
        for tokens in SEQUENCES[:2]:
            client.forward_backward([datum(tokens)], "cross_entropy")
            client.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
    for one, other in zip(forward(trained, SEQUENCES), forward(resumed, SEQUENCES), strict=True):
        np.testing.assert_array_equal(one, other)
