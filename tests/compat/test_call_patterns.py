"""The twenty calls that scripts make most often, each as its users write it; most used first.

The address and the key are in the environment, and the model has a tokenizer. Each test makes its own client, as each
script does.
"""

# Users do not ask whether what a type calls optional is there.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tinker import types

import tinker_compat as tinker
from tests.compat.conftest import running_server

BASE_MODEL = "builtin:tiny"


@pytest.fixture(scope="module")
def tiny_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store = tmp_path_factory.mktemp("patterns") / "store"
    with running_server(store, "--model", BASE_MODEL) as address:
        yield address


@pytest.fixture(autouse=True)
def environment(tiny_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", tiny_address)
    monkeypatch.setenv("TINKER_API_KEY", "dummy")


def process_example(example: dict[str, str], tokenizer: Any) -> types.Datum:
    """The supervised data of most tutorials: the prompt has weight 0."""
    prompt_tokens = tokenizer.encode(f"English: {example['input']}\nPig Latin:")
    completion_tokens = tokenizer.encode(f" {example['output']}\n\n")
    tokens = prompt_tokens + completion_tokens
    weights = [0] * len(prompt_tokens) + [1] * len(completion_tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens=tokens[:-1]),
        loss_fn_inputs={"weights": weights[1:], "target_tokens": tokens[1:]},
    )


EXAMPLES = [
    {"input": "banana split", "output": "anana-bay plit-say"},
    {"input": "quantum physics", "output": "uantum-qay ysics-phay"},
]


def test_create_sampling_client():
    service_client = tinker.ServiceClient()
    sampling_client = service_client.create_sampling_client(base_model=BASE_MODEL)
    tokenizer = sampling_client.get_tokenizer()
    prompt = types.ModelInput.from_ints(tokenizer.encode("The weather is"))
    params = types.SamplingParams(max_tokens=8, temperature=0.7)
    result = sampling_client.sample(prompt=prompt, sampling_params=params, num_samples=1).result()
    print(tokenizer.decode(result.sequences[0].tokens))
    assert len(result.sequences[0].tokens) <= 8

    training_client = service_client.create_lora_training_client(base_model=BASE_MODEL, rank=8)
    path = training_client.save_weights_for_sampler(name="0001").result().path
    from_checkpoint = service_client.create_sampling_client(model_path=path)
    assert from_checkpoint.sample(prompt, 1, params).result().sequences[0].tokens


def test_create_lora_training_client():
    service_client = tinker.ServiceClient(base_url=os.environ["TINKER_BASE_URL"])
    training_client = service_client.create_lora_training_client(
        base_model=BASE_MODEL,
        rank=16,
        seed=42,
        train_mlp=True,
        train_attn=True,
        train_unembed=False,
    )
    info = training_client.get_info()
    print(f"Model: {info.model_data.model_name}, rank {info.lora_rank}, id {info.model_id}")
    assert (info.model_data.model_name, info.lora_rank) == (BASE_MODEL, 16)
    assert info.model_id == training_client.model_id


def test_sample():
    sampling_client = tinker.ServiceClient().create_sampling_client(base_model=BASE_MODEL)
    tokenizer = sampling_client.get_tokenizer()
    prompt = types.ModelInput.from_ints(tokenizer.encode("English: coffee break\nPig Latin:"))
    params = types.SamplingParams(max_tokens=20, temperature=0.0, stop=["\n"], top_p=1.0, seed=1)
    future = sampling_client.sample(prompt=prompt, sampling_params=params, num_samples=4)
    result = future.result()
    print("Responses:")
    for i, seq in enumerate(result.sequences):
        print(f"{i}: {tokenizer.decode(seq.tokens)!r}")
        assert seq.stop_reason in ("stop", "length")
        assert len(seq.logprobs) == len(seq.tokens)
    assert len(result.sequences) == 4
    assert result.sequences[0].tokens == result.sequences[3].tokens, "greedy"


def test_optim_step():
    training_client = tinker.ServiceClient().create_lora_training_client(BASE_MODEL, rank=8)
    tokenizer = training_client.get_tokenizer()
    data = [process_example(ex, tokenizer) for ex in EXAMPLES]
    losses = []
    for step in range(4):
        adam_params = types.AdamParams(
            learning_rate=1e-2 * (1 - step / 10), beta1=0.9, beta2=0.95, eps=1e-8
        )
        fwd_bwd_future = training_client.forward_backward(data, "cross_entropy")
        optim_step_future = training_client.optim_step(adam_params)
        fwd_bwd_result = fwd_bwd_future.result()
        optim_step_result = optim_step_future.result()
        metrics = {"loss": fwd_bwd_result.metrics["loss:sum"]}
        if optim_step_result.metrics:
            metrics.update(optim_step_result.metrics)
        losses.append(metrics["loss"])
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore:name=")
def test_forward_backward():
    """Supervised, and with a policy's loss, as reinforcement learning builds it."""
    training_client = tinker.ServiceClient().create_lora_training_client(BASE_MODEL, rank=8)
    tokenizer = training_client.get_tokenizer()
    data = [process_example(ex, tokenizer) for ex in EXAMPLES]
    result = training_client.forward_backward(data, loss_fn="cross_entropy").result()
    logprobs = np.concatenate([out["logprobs"].tolist() for out in result.loss_fn_outputs])
    weights = np.concatenate([d.loss_fn_inputs["weights"].tolist() for d in data])
    loss_per_token = -np.dot(logprobs, weights) / weights.sum()
    print(f"Loss per token: {loss_per_token:.4f}")
    # A sum of a few dozen float32 values.
    assert result.metrics["loss:sum"] == pytest.approx(loss_per_token * weights.sum(), rel=1e-5)

    sampler = training_client.save_weights_and_get_sampling_client(name="rl")
    prompt_tokens = tokenizer.encode("What is 2 + 2?")
    prompt = types.ModelInput.from_ints(prompt_tokens)
    group = sampler.sample(prompt, 4, types.SamplingParams(max_tokens=6, temperature=1.0)).result()
    rewards = [float(len(set(seq.tokens))) for seq in group.sequences]
    mean = sum(rewards) / len(rewards)
    rollouts = []
    for seq, reward in zip(group.sequences, rewards, strict=True):
        tokens = prompt_tokens + seq.tokens
        ob_len = len(prompt_tokens) - 1
        rollouts.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": types.TensorData.from_torch(torch.tensor(tokens[1:])),
                    "logprobs": types.TensorData.from_torch(
                        torch.tensor([0.0] * ob_len + seq.logprobs)
                    ),
                    "advantages": types.TensorData.from_torch(
                        torch.tensor([0.0] * ob_len + [reward - mean] * len(seq.tokens))
                    ),
                },
            )
        )
    result = training_client.forward_backward(rollouts, "importance_sampling").result()
    training_logprobs = result.loss_fn_outputs[0]["logprobs"].to_torch()[ob_len:]
    sampling_logprobs = torch.tensor(group.sequences[0].logprobs)
    # Sampler and trainer compute the same float32 arithmetic in different ways.
    assert (training_logprobs - sampling_logprobs).abs().max() < 1e-3


def test_get_tokenizer():
    training_client = tinker.ServiceClient().create_lora_training_client(base_model=BASE_MODEL)
    tokenizer = training_client.get_tokenizer()
    ids = tokenizer.encode("Hello world")
    print(f"{len(ids)} tokens, vocabulary of {tokenizer.vocab_size}, end: {tokenizer.eos_token_id}")
    assert tokenizer.decode(ids) == "Hello world"
    assert tokenizer.eos_token_id is not None


@pytest.mark.filterwarnings("ignore:name=")
def test_save_weights_and_get_sampling_client():
    """In each step of a loop a new client; its name means nothing, and old ones stay what they are."""
    training_client = tinker.ServiceClient().create_lora_training_client(BASE_MODEL, rank=8)
    tokenizer = training_client.get_tokenizer()
    data = [process_example(ex, tokenizer) for ex in EXAMPLES]
    prompt = types.ModelInput.from_ints(tokenizer.encode("English: banana split"))
    scores = []
    for step in range(3):
        sampling_client = training_client.save_weights_and_get_sampling_client(name=f"step-{step}")
        scores.append(sampling_client.compute_logprobs(prompt).result()[1:])
        training_client.forward_backward(data, "cross_entropy")
        training_client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert scores[0] != scores[1] != scores[2]


def test_save_state():
    training_client = tinker.ServiceClient().create_lora_training_client(BASE_MODEL, rank=8)
    resume_path = training_client.save_state(name="step_000010").result().path
    print(f"Saved checkpoint: {resume_path}")
    assert resume_path.startswith("tinker://")
    run_id, kind, name = resume_path.removeprefix("tinker://").split("/")
    assert (run_id, kind, name) == (training_client.model_id, "weights", "step_000010")
    assert resume_path.rsplit("/", 1)[-1] == "step_000010"


def test_sample_async():
    service_client = tinker.ServiceClient()

    async def evaluate() -> list[str]:
        sampling_client = service_client.create_sampling_client(base_model=BASE_MODEL)
        tokenizer = sampling_client.get_tokenizer()
        params = tinker.SamplingParams(max_tokens=6, temperature=0.8, stop=[tokenizer.eos_token_id])

        async def one(question: str) -> str:
            result = await sampling_client.sample_async(
                prompt=tinker.ModelInput.from_ints(tokenizer.encode(question)),
                num_samples=1,
                sampling_params=params,
            )
            return tokenizer.decode(result.sequences[0].tokens)

        return await asyncio.gather(*(one(f"What is {i} + {i}?") for i in range(32)))

    answers = asyncio.run(evaluate())
    assert len(answers) == 32


def test_get_server_capabilities():
    service_client = tinker.ServiceClient()
    print("Available models:")
    for item in service_client.get_server_capabilities().supported_models:
        print("- " + item.model_name)
    names = [m.model_name for m in service_client.get_server_capabilities().supported_models]
    assert BASE_MODEL in names


def test_create_rest_client():
    service_client = tinker.ServiceClient()
    training_client = service_client.create_lora_training_client(BASE_MODEL, rank=8)
    training_client.save_state("0001").result()
    training_client.save_weights_for_sampler("0001").result()
    rest_client = service_client.create_rest_client()
    future = rest_client.list_checkpoints(training_client.model_id)
    response = future.result()
    for checkpoint in response.checkpoints:
        print(f"{checkpoint.checkpoint_type}: {checkpoint.checkpoint_id} {checkpoint.tinker_path}")
    found = sorted(checkpoint.checkpoint_id for checkpoint in response.checkpoints)
    assert found == ["sampler_weights/0001", "weights/0001"]
    runs = rest_client.list_training_runs(limit=20).result()
    assert training_client.model_id in [run.training_run_id for run in runs.training_runs]
    assert runs.cursor.total_count >= 1
    rest_client.delete_checkpoint(training_client.model_id, "weights/0001").result()
    assert len(rest_client.list_checkpoints(training_client.model_id).result().checkpoints) == 1


def test_create_lora_training_client_async():
    async def main() -> tinker.TrainingClient:
        service_client = tinker.ServiceClient(base_url=os.environ["TINKER_BASE_URL"])
        training_client = await service_client.create_lora_training_client_async(
            base_model=BASE_MODEL, rank=32, user_metadata={"recipe": "sl_basic"}
        )
        print(f"Run: {training_client.model_id}")
        return training_client

    training_client = asyncio.run(main())
    assert type(training_client) is tinker.TrainingClient
    assert training_client.get_info().lora_rank == 32


def test_save_weights_for_sampler():
    service_client = tinker.ServiceClient()
    training_client = service_client.create_lora_training_client(base_model=BASE_MODEL, rank=8)
    sampling_path = training_client.save_weights_for_sampler(name="final").result().path
    print(sampling_path)
    assert sampling_path == f"tinker://{training_client.model_id}/sampler_weights/final"
    # The state of the same name, by hand.
    training_client.save_state("final").result()
    state_path = sampling_path.replace("/sampler_weights/", "/weights/")
    assert service_client.create_training_client_from_state(state_path).result()
    sampling_client = training_client.create_sampling_client(model_path=sampling_path)
    prompt = types.ModelInput.from_ints([72, 105])
    assert sampling_client.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result().sequences


def test_compute_logprobs():
    sampling_client = tinker.ServiceClient().create_sampling_client(base_model=BASE_MODEL)
    tokenizer = sampling_client.get_tokenizer()
    tokens = tokenizer.encode("How many r's are in strawberry?")
    logprobs = sampling_client.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    for token, logprob in zip(tokens, logprobs, strict=True):
        print(f"{tokenizer.decode([token])!r}: {logprob}")
    assert logprobs[0] is None
    perplexity = np.exp(-np.mean(logprobs[1:]))
    assert 1 < perplexity < 10 * tokenizer.vocab_size


def test_forward():
    """The loss on held-out data, which leaves no gradient."""
    training_client = tinker.ServiceClient().create_lora_training_client(BASE_MODEL, rank=8)
    tokenizer = training_client.get_tokenizer()
    held_out = [process_example(ex, tokenizer) for ex in EXAMPLES]
    result = training_client.forward(held_out, "cross_entropy").result()
    total = sum(sum(d.loss_fn_inputs["weights"].tolist()) for d in held_out)
    print(f"Eval loss: {result.metrics['loss:sum'] / total:.3f}")
    for datum, output in zip(held_out, result.loss_fn_outputs, strict=True):
        logprobs = output["logprobs"].data
        assert len(logprobs) == datum.model_input.length
        assert all(logprob < 0 for logprob in logprobs), "also where the weight is 0"


def test_load_state():
    training_client = tinker.ServiceClient().create_lora_training_client(BASE_MODEL, rank=8)
    tokenizer = training_client.get_tokenizer()
    data = [process_example(ex, tokenizer) for ex in EXAMPLES]
    before = training_client.forward(data, "cross_entropy").result().metrics["loss:sum"]
    path = training_client.save_state("best").result().path
    for _ in range(2):
        training_client.forward_backward(data, "cross_entropy")
        training_client.optim_step(types.AdamParams(learning_rate=1e-2))
    # Nobody waits for it.
    training_client.load_state(path)
    after = training_client.forward(data, "cross_entropy").result().metrics["loss:sum"]
    assert after == before


def test_create_training_client_from_state_with_optimizer():
    """Resuming: the second run goes on exactly where the first one is."""
    service_client = tinker.ServiceClient()
    training_client = service_client.create_lora_training_client(BASE_MODEL, rank=8)
    tokenizer = training_client.get_tokenizer()
    data = [process_example(ex, tokenizer) for ex in EXAMPLES]

    def train_step(client: tinker.TrainingClient) -> float:
        result = client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        return result.result().metrics["loss:sum"]

    train_step(training_client)
    path = training_client.save_state("000001").result().path
    resumed = tinker.ServiceClient().create_training_client_from_state_with_optimizer(path)
    assert [train_step(resumed) for _ in range(2)] == [
        train_step(training_client) for _ in range(2)
    ]


async def batch_step(
    training_client: tinker.TrainingClient, data: list[types.Datum]
) -> dict[str, float]:
    fwd_bwd_future = await training_client.forward_backward_async(data, loss_fn="cross_entropy")
    optim_step_future = await training_client.optim_step_async(
        tinker.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8)
    )
    fwd_bwd_result = await fwd_bwd_future.result_async()
    optim_step_result = await optim_step_future
    return {**fwd_bwd_result.metrics, **(optim_step_result.metrics or {})}


def test_forward_backward_async():
    """Two batches under way at once: the next is submitted before the last one is collected."""

    async def main() -> list[float]:
        service_client = tinker.ServiceClient()
        training_client = await service_client.create_lora_training_client_async(BASE_MODEL, 8)
        tokenizer = training_client.get_tokenizer()
        data = [process_example(ex, tokenizer) for ex in EXAMPLES]
        pending, losses = [], []
        for _ in range(4):
            pending.append(await training_client.forward_backward_async(data, "cross_entropy"))
            await training_client.optim_step_async(types.AdamParams(learning_rate=1e-2))
            if len(pending) > 1:
                losses.append((await pending.pop(0)).metrics["loss:sum"])
        return [*losses, (await pending.pop()).metrics["loss:sum"]]

    losses = asyncio.run(main())
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_optim_step_async():
    async def main() -> list[dict[str, float]]:
        service_client = tinker.ServiceClient()
        training_client = await service_client.create_lora_training_client_async(BASE_MODEL, 8)
        tokenizer = training_client.get_tokenizer()
        data = [process_example(ex, tokenizer) for ex in EXAMPLES]
        return [await batch_step(training_client, data) for _ in range(3)]

    metrics = asyncio.run(main())
    assert metrics[-1]["loss:sum"] < metrics[0]["loss:sum"]
    assert all(step["unclipped_grad_l2:mean"] > 0 for step in metrics)


def test_save_weights_and_get_sampling_client_async():
    """A loop of reinforcement learning in the asynchronous style."""

    async def main() -> list[int]:
        service_client = tinker.ServiceClient()
        training_client = await service_client.create_lora_training_client_async(BASE_MODEL, 8)
        tokenizer = training_client.get_tokenizer()
        data = [process_example(ex, tokenizer) for ex in EXAMPLES]
        prompt = tinker.ModelInput.from_ints(tokenizer.encode("English: banana"))
        lengths = []
        for _ in range(2):
            sampling_client = await training_client.save_weights_and_get_sampling_client_async()
            params = tinker.SamplingParams(max_tokens=4, temperature=1.0)
            samples = await asyncio.gather(
                *(sampling_client.sample_async(prompt, 2, params) for _ in range(4))
            )
            lengths += [len(seq.tokens) for sample in samples for seq in sample.sequences]
            await batch_step(training_client, data)
        return lengths

    lengths = asyncio.run(main())
    assert len(lengths) == 16
    assert set(lengths) <= {1, 2, 3, 4}


def test_the_holder_gives_the_sessions_id_and_closes_it():
    """At the end of many scripts."""
    service_client = tinker.ServiceClient()
    training_client = service_client.create_lora_training_client(BASE_MODEL, rank=8)
    session_id = service_client.holder.get_session_id()
    assert training_client.model_id == f"{session_id}:train:0"
    assert training_client.holder.get_session_id() == session_id
    rest_client = tinker.RestClient()
    assert training_client.model_id in rest_client.get_session(session_id).result().training_run_ids
    path = training_client.save_state("last").result().path
    training_client.holder.close()
    with pytest.raises(RuntimeError, match="closed"):
        training_client.optim_step(types.AdamParams())
    assert tinker.ServiceClient().create_training_client_from_state(path).result()
