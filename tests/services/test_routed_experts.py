"""Routing replay over the wire: a key from sampling, a sample that carries it, and what cannot be replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from backend.generator.base import SampleCall, SampledSequence, SampleResult, Stop
from backend.generator.embedded import EmbeddedGenerator
from backend.resources.catalog import ModelSpec
from backend.resources.engines import Engines, open_engines
from backend.resources.expert_records import ExpertRecord, ExpertRecords, expert_records
from backend.trainer import base_model
from backend.trainer.routers import routers_of
from backend.trainer.torch_trainer import TorchTrainer
from tests import models
from tests.services.harness import (
    MODEL,
    Caller,
    Clock,
    Run,
    Running,
    cross_entropy,
    prompt,
    sample,
    serving,
)
from together_post_training import tensors
from together_post_training.v1 import data_pb2, errors_pb2, generator_pb2
from together_post_training.v1 import operations_pb2 as o
from together_post_training.v1 import trainer_pb2 as t

PROMPT = [3, 4, 9, 7, 5]
# float32 on both sides, sums taken in another order.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A Qwen3-MoE whose tokens go through one expert each, of weight 1: the router has no say but in which."""
    where = tmp_path_factory.mktemp("moe") / "model"
    return models.rand(where, "qwen3_moe", num_experts_per_tok=1, norm_topk_prob=True)


@pytest.fixture(scope="module")
def moe(directory: Path, tmp_path_factory) -> Iterator[Running]:
    """A server whose generator has the model's router, and whose trainer another; beside a dense model."""

    def engines(name: str, path: str) -> Engines:
        if name == MODEL:
            return open_engines(name, path)
        generator = EmbeddedGenerator(base_model.load(name, path))
        base = base_model.load(name, path)
        noise = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for router in routers_of(base.module):
                router.get_parameter("weight").normal_(std=0.5, generator=noise)
        return Engines(trainer=TorchTrainer(base), generator=generator, tokenizer_dir=None)

    specs = [ModelSpec(name=name, path=str(directory)) for name in ("moe", "other")]
    specs.append(ModelSpec(name=MODEL, path=MODEL))
    store = tmp_path_factory.mktemp("store")
    with serving(store, engines=engines, models=tuple(specs)) as running:
        yield running


@pytest.fixture
def caller(moe: Running) -> Caller:
    return moe.caller


@pytest.fixture(scope="module")
def sequences(moe: Running) -> Sequence[generator_pb2.SampledSequence]:
    return sampled(moe.caller, num_samples=3).sequences


def sampled(
    caller: Caller, model: str = "moe", *, keep: bool = True, num_samples: int = 1
) -> generator_pb2.SampleResponse:
    request = generator_pb2.SampleRequest(
        snapshot=caller.open(base_model=model),
        prompt=prompt(PROMPT),
        num_samples=num_samples,
        params=generator_pb2.SamplingParams(max_tokens=8, seed=1, stop=generator_pb2.Stop()),
        return_routed_experts=keep,
    )
    return caller.generator.Sample(request)


def tokens_of(sequence: generator_pb2.SampledSequence) -> list[int]:
    return np.frombuffer(sequence.tokens, "<i4").tolist()


def whole(sequence: generator_pb2.SampledSequence) -> list[int]:
    return PROMPT + tokens_of(sequence)


def keyed(tokens: list[int], key: str) -> data_pb2.Sample:
    made = sample(tokens)
    made.routed_experts_key = key
    return made


def logprobs(operation: o.Operation) -> list[np.ndarray]:
    assert operation.state == o.OPERATION_STATE_SUCCEEDED, operation.error
    outputs = operation.forward_backward.loss_fn_outputs
    return [np.frombuffer(output.tensors["logprobs"].raw, "<f4") for output in outputs]


def gap(sequence: generator_pb2.SampledSequence, trained: np.ndarray) -> float:
    own = np.frombuffer(sequence.logprobs, "<f4")
    return float(np.abs(trained[-len(own) :] - own).max())


@pytest.fixture
def run(caller: Caller) -> Run:
    return caller.session(base_model="moe")


@pytest.mark.parametrize("method", ["Forward", "ForwardBackward"])
def test_samples_with_a_key_have_the_samplers_logprobs_though_the_router_is_another(
    run: Run, sequences, method: str
):
    """Beside one without: every second sequence is replayed."""
    messages = [keyed(whole(s), s.routed_experts_key) for s in sequences]
    messages[1].ClearField("routed_experts_key")
    got = logprobs(run.do(method, loss=cross_entropy(), samples=messages))
    gaps = [gap(s, lp) for s, lp in zip(sequences, got, strict=True)]
    assert max(gaps[0], gaps[2]) < TOLERANCE
    assert gaps[1] > 0.5


def test_custom_gradients_are_taken_at_the_replayed_logprobs(run: Run, sequences):
    message = keyed(whole(sequences[0]), sequences[0].routed_experts_key)
    ones = tensors.encode(np.ones(len(whole(sequences[0])) - 1, np.float32))
    done = run.do("CustomForwardBackward", samples=[message], gradients=[ones])
    assert gap(sequences[0], logprobs(done)[0]) < TOLERANCE


def test_beginnings_of_a_sequence_are_replayed_and_its_last_token_is_the_routers(
    run: Run, sequences
):
    """A sample may be cut short, and may hold all tokens; the last was never read, and changes none before it."""
    key, tokens = sequences[0].routed_experts_key, whole(sequences[0])
    messages = [keyed(tokens[:9], key), keyed(tokens, key), keyed([*tokens, 7], key)]
    short, usual, full = logprobs(run.do("Forward", loss=cross_entropy(), samples=messages))
    assert (len(short), len(usual), len(full)) == (8, 12, 13)
    np.testing.assert_allclose(short, usual[:8], atol=TOLERANCE)
    np.testing.assert_allclose(full[:12], usual, atol=TOLERANCE)


def test_every_sequence_has_a_key_of_its_own_only_when_asked_for(caller: Caller, sequences):
    keys = {sequence.routed_experts_key for sequence in sequences}
    assert len(keys) == 3
    assert {len(key) for key in keys} == {32}
    assert keys.isdisjoint(sequence.id for sequence in sequences)
    assert not sampled(caller, keep=False).sequences[0].routed_experts_key


def test_dense_model_gives_no_key_and_takes_none(caller: Caller, sequences):
    response = sampled(caller, MODEL)
    assert not response.sequences[0].routed_experts_key
    assert not response.warnings
    refused = caller.session().submit(
        "Forward",
        loss=cross_entropy(),
        samples=[sample([1, 2]), keyed([1, 2], sequences[0].routed_experts_key)],
    )
    assert refused.error.reason == "INVALID_ARGUMENT"
    assert "Sample 1: routed_experts_key" in refused.error.message
    assert "'builtin:bigram16', which has no experts" in refused.error.message


def forward(run: Run, tokens: list[int], key: str) -> errors_pb2.Error:
    fields = {"loss": cross_entropy(), "samples": [sample([1, 2]), keyed(tokens, key)]}
    return run.submit("Forward", **fields).error


@pytest.mark.parametrize("key", ["", "f" * 32])
def test_key_of_no_record_is_refused(run: Run, sequences, key: str):
    error = forward(run, whole(sequences[0]), key)
    assert (error.reason, error.code) == ("ROUTED_EXPERTS_NOT_FOUND", 5)
    assert f"Sample 1: no experts are kept under routed_experts_key {key!r}" in error.message
    assert "return_routed_experts" in error.message
    assert dict(error.metadata)["routed_experts_key"] == key


Change = Callable[[list[int]], list[int]]

OTHER_TOKENS: list[tuple[Change, str, str]] = [
    (lambda tokens: [*tokens, 1, 2], "LENGTH_MISMATCH", "model input has 14 tokens"),
    (
        lambda tokens: [*tokens[:2], 100, *tokens[3:]],
        "INVALID_ARGUMENT",
        "model_input[2] of 12 is 100, but of the 13 tokens",
    ),
    (lambda tokens: tokens[1:], "INVALID_ARGUMENT", "model_input[0] of 11 is 4, but"),
    (
        lambda tokens: [*tokens[:12], (tokens[12] + 1) % 128, 1],
        "INVALID_ARGUMENT",
        "model_input[12] of 13 is",
    ),
]


@pytest.mark.parametrize(("change", "reason", "says"), OTHER_TOKENS)
def test_samples_of_other_tokens_are_refused_with_place_and_lengths(
    run: Run, sequences, change: Change, reason: str, says: str
):
    error = forward(run, change(whole(sequences[0])), sequences[0].routed_experts_key)
    assert error.reason == reason, error
    assert "Sample 1" in error.message
    assert says in error.message
    assert "5 tokens of the prompt and 8 that were sampled" in error.message


def test_key_of_another_sequence_is_refused(run: Run, sequences):
    one, other = sequences[0], sequences[1]
    assert tokens_of(one) != tokens_of(other)
    assert forward(run, whole(one), other.routed_experts_key).reason == "INVALID_ARGUMENT"


def test_key_of_another_model_is_refused(caller: Caller, sequences):
    run = caller.session(base_model="other")
    error = forward(run, whole(sequences[0]), sequences[0].routed_experts_key)
    assert error.reason == "INVALID_ARGUMENT"
    assert "of model 'moe', this session trains 'other'" in error.message


def test_engine_that_cannot_tell_gives_a_warning_and_no_key(directory: Path, tmp_path: Path):
    class Silent(EmbeddedGenerator):
        async def sample(self, call: SampleCall) -> SampleResult:
            return await super().sample(replace(call, return_routed_experts=False))

    def engines(name: str, path: str) -> Engines:
        base = base_model.load(name, path)
        return Engines(trainer=TorchTrainer(base), generator=Silent(base), tokenizer_dir=None)

    spec = ModelSpec(name="moe", path=str(directory))
    with serving(tmp_path / "store", engines=engines, models=(spec,)) as running:
        response = sampled(running.caller)
    assert not response.sequences[0].routed_experts_key
    (warning,) = response.warnings
    assert warning.startswith("return_routed_experts: this generator cannot tell")
    assert "Qwen3Moe" in warning


def test_records_end_after_a_day_and_what_was_accepted_keeps_its_answer(
    directory: Path, tmp_path: Path
):
    clock = Clock(0.0)
    spec = ModelSpec(name="moe", path=str(directory))
    settings = {"clocks": {"monotonic": clock}, "models": (spec,)}
    with serving(tmp_path / "store", **settings) as running:
        caller = running.caller
        run, sequence = caller.session(base_model="moe"), sampled(caller).sequences[0]
        clock.now = 24 * 3600 - 1.0
        fields = {
            "loss": cross_entropy(),
            "samples": [keyed(whole(sequence), sequence.routed_experts_key)],
        }
        done = run.do("ForwardBackward", **fields)
        assert done.state == o.OPERATION_STATE_SUCCEEDED
        clock.now += 1.0
        expired = run.submit("ForwardBackward", **fields)
        assert expired.error.reason == "ROUTED_EXPERTS_NOT_FOUND"
        again = t.ForwardBackwardRequest(session=run.id, sequence=1, **fields)
        assert caller.trainer.ForwardBackward(again) == done


def result_of(*experts: np.ndarray) -> tuple[SampleCall, SampleResult]:
    """Of a prompt of two tokens; each sequence has one more token than its experts cover."""
    call = SampleCall(
        snapshot=None,
        prompt=np.array([1, 2]),
        num_samples=len(experts),
        max_tokens=9,
        seed=0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        stop=Stop(),
    )
    made = [
        SampledSequence(
            tokens=np.arange(len(some) - 1, dtype=np.int32),
            logprobs=np.zeros(len(some) - 1, np.float32),
            stop_reason="length",
            routed_experts=some,
        )
        for some in experts
    ]
    return call, SampleResult(sequences=made)


def found(experts: list[np.ndarray]) -> list[ExpertRecord]:
    records = expert_records("m", *result_of(*experts))
    return [record for record in records if record is not None]


@pytest.mark.parametrize(("largest", "dtype"), [(255, np.uint8), (256, np.int16)])
def test_records_are_as_small_as_the_number_of_experts_allows(largest: int, dtype: type):
    experts = np.full((5, 3, 2), largest, np.int16)
    (record,) = found([experts])
    assert record.experts.dtype == dtype
    assert record.all_experts.dtype == dtype
    assert np.array_equal(record.all_experts, experts)
    assert record.all_tokens.tolist() == [1, 2, 0, 1, 2, 3]


def test_records_of_one_request_keep_the_prompts_experts_once_where_they_are_the_same():
    same = np.zeros((5, 3, 2), np.int16)
    other = same.copy()
    other[1] = 1  # Rounding may decide otherwise when a prompt is read again.
    first, second, third = found([same, same.copy(), other])
    assert first.prompt_experts is second.prompt_experts
    assert np.array_equal(third.all_experts, other)
    records = ExpertRecords(Clock(0.0))
    records.add({"a": first, "b": second, "c": third})
    assert records.find("b") is second
    # Prompts of 8 bytes and 12 of experts, twice; sequences of 16 and 18; and the objects.
    assert records.num_bytes == 8 + 2 * 12 + 3 * (16 + 18) + 3 * 500


def test_records_beyond_the_room_are_dropped_oldest_first():
    records = ExpertRecords(Clock(0.0), max_bytes=2_000)
    for i in range(6):
        records.add({str(i): found([np.zeros((5, 3, 2), np.int16)])[0]})
        assert records.num_bytes <= 2_000
    assert [i for i in range(6) if records.find(str(i))] == [3, 4, 5]
