"""A script's way to stable_reinforce: sample with a record, say where tokens came from, train."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from tinker import types

import tinker_compat as tinker
from tests.compat.data import datum, prompt
from tinker_compat.sampling_client import SamplingClient

MODEL = "builtin:bigram16"
PROMPT = [3, 4, 9]

pytestmark = [
    pytest.mark.skipif(
        not hasattr(types.Datum, "with_provenance"), reason="this Tinker has no provenance"
    ),
    # What the loss has to say for itself; tests/compat/test_warnings.py looks at it.
    pytest.mark.filterwarnings("ignore:Loss 'stable_reinforce'"),
]


def hot(**params: Any) -> types.SamplingParams:
    """Unlikely tokens are sampled too, and none ends the sample."""
    return types.SamplingParams(max_tokens=6, temperature=4.0, seed=5, stop=[], **params)


def sampled(client: tinker.TrainingClient) -> types.SampledSequence:
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=True)
    return sampler.sample(prompt(*PROMPT), 1, hot()).result().sequences[0]


def traced(sequence: types.SampledSequence, **inputs: list[float]) -> types.Datum:
    """As reinforcement learning loops build it: prompt targets padded with 0."""
    tokens, num_padded = sequence.tokens, len(PROMPT) - 1
    advantages = [0.0] * num_padded + [float(i) for i in range(1, len(tokens) + 1)]
    targets = [0] * num_padded + tokens
    built = datum(PROMPT + tokens[:-1], target_tokens=targets, advantages=advantages, **inputs)
    id_, n = sequence.sequence_id, len(tokens)
    return built.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=id_, length=len(PROMPT)),
            types.SampledProvenanceSpan(sequence_id=id_, length=n - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=id_, offset=1, length=num_padded),
            types.SampledProvenanceSpan(sequence_id=id_, length=n),
        ],
    )


def test_loss_is_the_closed_form_on_and_off_policy(client):
    sequence = sampled(client)
    data = [traced(sequence)]
    q = np.array(sequence.logprobs)
    advantages = np.arange(1, 7)
    on = client.forward_backward(data, "stable_reinforce").result()
    # float32 log-probabilities of six tokens.
    assert on.metrics["loss:sum"] == pytest.approx(-(advantages * q).sum(), rel=1e-5)
    client.optim_step(types.AdamParams(learning_rate=0.5)).result()
    off = client.forward(data, "stable_reinforce", {"kl_coeff": 0.05}).result()
    p = np.array(off.loss_fn_outputs[0]["logprobs"].data[2:])
    ratio = np.exp(p - q)
    assert ratio.max() > 2, "the case has no truncated ratio"
    expected = -(np.minimum(ratio, 2) * advantages * p).sum() + 0.025 * ((p - q) ** 2).sum()
    assert off.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def test_sampled_logprobs_may_be_sent_along_and_others_are_refused(client):
    sequence = sampled(client)
    logprobs = sequence.logprobs or []
    with_logprobs = traced(sequence, logprobs=[0.0, 0.0, *logprobs])
    done = client.forward_backward([with_logprobs], "stable_reinforce").result()
    plain = client.forward_backward([traced(sequence)], "stable_reinforce").result()
    assert done.metrics == plain.metrics
    shifted = traced(sequence, logprobs=[0.0, *logprobs, 0.0])
    with pytest.raises(
        tinker.BadRequestError, match=r"Sample 0: logprobs\[\d\].*leave logprobs out"
    ):
        client.forward_backward([shifted], "stable_reinforce").result()


def test_sequences_without_a_record_are_not_found_with_what_to_do(client):
    sampler = client.save_weights_and_get_sampling_client()
    sequence = sampler.sample(prompt(*PROMPT), 1, hot()).result().sequences[0]
    with pytest.raises(tinker.NotFoundError, match="record_stability_info=True"):
        client.forward_backward([traced(sequence)], "stable_reinforce").result()


def test_data_without_provenance_is_refused_with_what_to_do(client):
    untraced = datum([3, 4], target_tokens=[4, 5], advantages=[1.0, 1.0])
    with pytest.raises(tinker.BadRequestError, match=r"no model_input_spans.*with_provenance"):
        client.forward_backward([untraced], "stable_reinforce").result()


@pytest.mark.parametrize("how", ["service", "service path", "training path", "pickle", "handle"])
def test_every_way_to_a_sampling_client_records_when_asked(service, client, how):
    path = client.save_weights_for_sampler("recorded").result().path if "path" in how else None
    if how == "service":
        sampler = service.create_sampling_client(base_model=MODEL, record_stability_info=True)
    elif how == "service path":
        sampler = service.create_sampling_client(path, record_stability_info=True)
    elif how == "training path":
        sampler = client.create_sampling_client(path, record_stability_info=True)
    else:
        made = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
        if how == "pickle":
            sampler = pickle.loads(pickle.dumps(made))
        else:
            sampler = SamplingClient.from_sampler_handle(made.get_sampler_handle())
    sequence = sampler.sample(prompt(*PROMPT), 1, hot()).result().sequences[0]
    done = client.forward([traced(sequence)], "stable_reinforce").result()
    assert done.metrics["ratio:mean"] == pytest.approx(1.0, abs=1e-5)
