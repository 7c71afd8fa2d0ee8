"""What the tests of compatibility traps share."""

from __future__ import annotations

from tinker import types

import tinker_compat as tinker
from tests.compat.conftest import MODEL
from tests.compat.data import datum, prompt

ADAM = types.AdamParams(learning_rate=0.05)
# No usual step hides the gradient's size: with eps this large AdamW moves by about -0.01 * gradient.
LINEAR = types.AdamParams(learning_rate=100.0, eps=1e4)


def fresh(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """Always the same weights."""
    return service.create_lora_training_client(MODEL, rank=4, seed=1).result()


def logprobs(client: tinker.TrainingClient) -> list[float]:
    """Of `datum()`: hit, hit, miss before any training."""
    result = client.forward([datum()], "cross_entropy").result()
    return result.loss_fn_outputs[0]["logprobs"].tolist()


def train(client: tinker.TrainingClient) -> None:
    """Makes 9 likelier after 3."""
    client.forward_backward([datum([3], target_tokens=[9])], "cross_entropy")
    client.optim_step(ADAM).result()


def step_metrics(client: tinker.TrainingClient, params: types.AdamParams) -> dict[str, float]:
    metrics = client.optim_step(params).result().metrics
    assert metrics is not None
    return metrics


def scored(sampler: tinker.SamplingClient) -> list[float | None]:
    return sampler.compute_logprobs(prompt(3, 4, 9)).result(timeout=60)
