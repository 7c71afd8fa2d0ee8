"""stable_reinforce over the wire: samples made of recorded sequences, checked against the record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from backend.resources.sequence_records import SequenceRecord, SequenceRecords
from tests.services.harness import Caller, Clock, Run, Running, prompt, serving
from together_post_training import tensors
from together_post_training.v1 import data_pb2, generator_pb2
from together_post_training.v1 import operations_pb2 as o
from together_post_training.v1 import trainer_pb2 as t

MODEL = "builtin:bigram16"
PROMPT = [3, 4, 9]
KL = 0.05


def stable(**params: float) -> data_pb2.LossConfig:
    return data_pb2.LossConfig(type="stable_reinforce", params=params)


def sampled(
    caller: Caller, snapshot: str, tokens: Sequence[int] = PROMPT, *, record: bool = True
) -> list[generator_pb2.SampledSequence]:
    request = generator_pb2.SampleRequest(
        snapshot=snapshot,
        prompt=prompt(tokens),
        num_samples=2,
        # So hot that unlikely tokens are sampled too.
        params=generator_pb2.SamplingParams(
            max_tokens=6, seed=5, temperature=4.0, stop=generator_pb2.Stop()
        ),
        record_stability_info=record,
    )
    return list(caller.generator.Sample(request).sequences)


def tokens_of(sequence: generator_pb2.SampledSequence) -> list[int]:
    return np.frombuffer(sequence.tokens, "<i4").tolist()


def logprobs_of(sequence: generator_pb2.SampledSequence) -> np.ndarray:
    return np.frombuffer(sequence.logprobs, "<f4")


def of_prompt(id_: str, offset: int, length: int) -> data_pb2.ProvenanceSpan:
    span = data_pb2.TokenSpan(sequence_id=id_, offset=offset, length=length)
    return data_pb2.ProvenanceSpan(prompt_tokens=span)


def of_sampled(id_: str, offset: int, length: int) -> data_pb2.ProvenanceSpan:
    span = data_pb2.TokenSpan(sequence_id=id_, offset=offset, length=length)
    return data_pb2.ProvenanceSpan(sampled_tokens=span)


def ints(values: Sequence[int]) -> data_pb2.Tensor:
    return data_pb2.Tensor(ints=data_pb2.Ints(values=values))


def floats(values: Sequence[float]) -> data_pb2.Tensor:
    return data_pb2.Tensor(floats=data_pb2.Floats(values=values))


def traced(
    sequence: generator_pb2.SampledSequence, advantages: Sequence[float] | None = None
) -> data_pb2.Sample:
    """Of PROMPT and the sampled tokens; advantages 1, 2, ... of these by default."""
    own = tokens_of(sequence)
    whole, p, n = PROMPT + own, len(PROMPT), len(own)
    values = range(1, n + 1) if advantages is None else advantages
    return data_pb2.Sample(
        model_input=prompt(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": ints(whole[1:]),
            "advantages": floats([0.0] * (p - 1) + [float(value) for value in values]),
        },
        model_input_spans=[of_prompt(sequence.id, 0, p), of_sampled(sequence.id, 0, n - 1)],
        loss_fn_input_spans=[of_prompt(sequence.id, 1, p - 1), of_sampled(sequence.id, 0, n)],
    )


def trained(run: Run, *messages: data_pb2.Sample, **params: float) -> o.Operation:
    done = run.do("ForwardBackward", loss=stable(**params), samples=messages)
    assert done.state == o.OPERATION_STATE_SUCCEEDED, done.error
    return done


def closed_form(sequence: generator_pb2.SampledSequence, current: np.ndarray) -> float:
    """For advantages 1, 2, ...: -sum min(p/q, 2) A log p + KL / 2 sum (log p - log q)^2."""
    q = logprobs_of(sequence).astype(np.float64)
    p = current[len(PROMPT) - 1 :].astype(np.float64)
    advantages = np.arange(1, len(q) + 1)
    ratio = np.minimum(np.exp(p - q), 2.0)
    return float(-(ratio * advantages * p).sum() + 0.5 * KL * ((p - q) ** 2).sum())


@pytest.fixture(scope="module")
def snapshot(shared: Running) -> str:
    return shared.caller.open(base_model=MODEL)


@pytest.fixture
def sequence(caller: Caller, snapshot: str) -> generator_pb2.SampledSequence:
    return sampled(caller, snapshot)[0]


def test_loss_is_the_closed_form_on_the_policy_that_sampled(
    caller: Caller, sequence: generator_pb2.SampledSequence
):
    metrics = trained(caller.session(), traced(sequence)).forward_backward.metrics
    # float32 log-probabilities of six tokens.
    expected = -(np.arange(1, 7) * logprobs_of(sequence)).sum()
    assert metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert metrics["ratio:mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["alignment_shifted_logprobs:sum"] == 0


def test_loss_is_the_closed_form_after_the_policy_has_moved(
    caller: Caller, snapshot: str, sequence: generator_pb2.SampledSequence
):
    run = caller.session()
    whole = PROMPT + tokens_of(sequence)
    run.train(whole, learning_rate=0.3)
    current = run.logprobs(whole)
    drift = current[len(PROMPT) - 1 :] - logprobs_of(sequence)
    assert drift.max() > np.log(2), "the case has no truncated ratio"
    metrics = trained(run, traced(sequence), kl_coeff=KL).forward_backward.metrics
    assert metrics["loss:sum"] == pytest.approx(closed_form(sequence, current), rel=1e-5)


def test_turns_of_a_conversation_are_one_sample_of_several_sequences(caller: Caller, snapshot: str):
    """The second turn's prompt holds the first turn and two tokens of a user's."""
    first = sampled(caller, snapshot)[0]
    asked = [*PROMPT, *tokens_of(first), 1, 2]
    second = sampled(caller, snapshot, asked)[1]
    whole = asked + tokens_of(second)
    message = data_pb2.Sample(
        model_input=prompt(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": ints(whole[1:]),
            "advantages": floats([0, 0, *[1.0] * 6, 0, 0, *[-2.0] * 6]),
        },
        model_input_spans=[
            of_prompt(first.id, 0, 3),
            of_sampled(first.id, 0, 6),
            of_prompt(second.id, 9, 2),
            of_sampled(second.id, 0, 5),
        ],
        loss_fn_input_spans=[
            of_prompt(first.id, 1, 2),
            of_sampled(first.id, 0, 4),
            of_sampled(first.id, 4, 2),
            of_prompt(second.id, 9, 2),
            of_sampled(second.id, 0, 6),
        ],
    )
    metrics = trained(caller.session(), message).forward_backward.metrics
    expected = -logprobs_of(first).sum() + 2 * logprobs_of(second).sum()
    assert metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert metrics["tokens_trained:sum"] == 12


def test_padded_targets_of_the_prompt_and_the_sampled_logprobs_may_be_sent(
    caller: Caller, sequence: generator_pb2.SampledSequence
):
    """Scripts write 0 for targets that train nothing, and send logprobs with every loss."""
    plain, padded = traced(sequence), traced(sequence)
    padded.loss_fn_inputs["target_tokens"].CopyFrom(ints([0, 0, *tokens_of(sequence)]))
    padded.loss_fn_inputs["logprobs"].CopyFrom(floats([0, 0, *logprobs_of(sequence)]))
    run = caller.session()
    done = [trained(run, message).forward_backward for message in (plain, padded)]
    assert done[0].metrics == done[1].metrics


Change = Callable[[data_pb2.Sample, generator_pb2.SampledSequence], object]


def replace_target(at: int, token: int) -> Change:
    def change(message: data_pb2.Sample, sequence: generator_pb2.SampledSequence) -> None:
        message.loss_fn_inputs["target_tokens"].ints.values[at] = token

    return change


def shift_span(message: data_pb2.Sample, sequence: generator_pb2.SampledSequence) -> None:
    del message.loss_fn_input_spans[:]
    spans = [of_prompt(sequence.id, 1, 2), of_sampled(sequence.id, 0, 1)]
    message.loss_fn_input_spans.extend([*spans, of_sampled(sequence.id, 0, 5)])


def lengthen(message: data_pb2.Sample, sequence: generator_pb2.SampledSequence) -> None:
    message.model_input_spans[1].sampled_tokens.offset = 2


def rename(message: data_pb2.Sample, sequence: generator_pb2.SampledSequence) -> None:
    message.model_input_spans[0].prompt_tokens.sequence_id = "f" * 32


def with_input(**inputs: Sequence[float]) -> Change:
    def change(message: data_pb2.Sample, sequence: generator_pb2.SampledSequence) -> None:
        for key, values in inputs.items():
            message.loss_fn_inputs[key].CopyFrom(floats(values))

    return change


def two_dimensional(message: data_pb2.Sample, sequence: generator_pb2.SampledSequence) -> None:
    targets = np.zeros((8, 2), np.int64)
    message.loss_fn_inputs["target_tokens"].CopyFrom(tensors.encode(targets))


REFUSED: list[tuple[Change, str, tuple[str, ...]]] = [
    (lambda m, s: m.ClearField("model_input_spans"), "MISSING_INPUT", ("no model_input_spans",)),
    (
        lambda m, s: m.ClearField("loss_fn_input_spans"),
        "MISSING_INPUT",
        ("no loss_fn_input_spans", "Datum.with_provenance"),
    ),
    (rename, "SEQUENCE_RECORD_NOT_FOUND", ("model_input_spans[0]", "'ffff", "about a day")),
    (replace_target(4, 99), "INVALID_ARGUMENT", ("target_tokens[4] is 99, but token 2 of",)),
    (
        lambda m, s: m.model_input.CopyFrom(prompt([3, 5, 9, *tokens_of(s)[:-1]])),
        "INVALID_ARGUMENT",
        ("model_input[1] is 5, but token 1 of the prompt of", "is 4"),
    ),
    (shift_span, "INVALID_ARGUMENT", ("With offset 1 the span would fit",)),
    (lengthen, "INVALID_ARGUMENT", ("offset 2 and length 5", "has 6 tokens")),
    (with_input(sampled=[0.0] * 8), "UNKNOWN_INPUT", ("input 'sampled'",)),
    (with_input(logprobs=[0.0] * 8), "INVALID_ARGUMENT", ("logprobs[2] is 0, but the token",)),
    (
        with_input(logprobs=[float("nan")] * 8),
        "INVALID_ARGUMENT",
        ("logprobs[2] is nan", "leave logprobs out"),
    ),
    (with_input(logprobs=[0.0] * 7), "LENGTH_MISMATCH", ("logprobs has shape [7]",)),
    (
        with_input(advantages=[0.0, 0.5, *[1.0] * 6]),
        "INVALID_ARGUMENT",
        ("advantages[1] is 0.5", "sampled tokens only"),
    ),
    (two_dimensional, "LENGTH_MISMATCH", ("shape [8, 2]",)),
    (
        lambda m, s: m.loss_fn_inputs.pop("advantages"),
        "MISSING_INPUT",
        ("lacks 'advantages'",),
    ),
]


@pytest.mark.parametrize(("change", "reason", "says"), REFUSED)
def test_samples_that_contradict_the_record_are_refused_with_place_and_values(
    caller: Caller,
    sequence: generator_pb2.SampledSequence,
    change: Change,
    reason: str,
    says: tuple[str, ...],
):
    message = traced(sequence)
    change(message, sequence)
    run = caller.session()
    refused = run.submit("ForwardBackward", loss=stable(), samples=[traced(sequence), message])
    assert refused.error.reason == reason, refused
    for words in ("Sample 1", *says):
        assert words in refused.error.message
    assert run.do("Forward", loss=stable(), samples=[traced(sequence)]).state == 4


def test_sequences_are_recorded_only_when_asked_for(caller: Caller, snapshot: str):
    unrecorded = sampled(caller, snapshot, record=False)[0]
    refused = caller.session().submit("Forward", loss=stable(), samples=[traced(unrecorded)])
    assert refused.error.reason == "SEQUENCE_RECORD_NOT_FOUND"
    assert refused.error.code == 5
    assert "record_stability_info=True" in refused.error.message


def test_every_sequence_has_an_id_of_its_own(caller: Caller, snapshot: str):
    ids = {sequence.id for _ in range(3) for sequence in sampled(caller, snapshot)}
    assert len(ids) == 6
    assert {len(id_) for id_ in ids} == {32}


def test_records_end_after_a_day_and_what_was_accepted_keeps_its_answer(tmp_path: Path):
    clock = Clock(0.0)
    with serving(tmp_path / "store", clocks={"monotonic": clock}) as running:
        caller = running.caller
        run, base = caller.session(), caller.open(base_model=MODEL)
        sequence = sampled(caller, base)[0]
        clock.now = 24 * 3600 - 1.0
        fields = {"loss": stable(), "samples": [traced(sequence)]}
        done = run.do("ForwardBackward", **fields)
        assert done.state == o.OPERATION_STATE_SUCCEEDED
        clock.now += 1.0
        expired = run.submit("ForwardBackward", **fields)
        assert expired.error.reason == "SEQUENCE_RECORD_NOT_FOUND"
        again = t.ForwardBackwardRequest(session=run.id, sequence=1, **fields)
        assert caller.trainer.ForwardBackward(again) == done


def record(num_prompt: int, num_tokens: int) -> SequenceRecord:
    return SequenceRecord(
        prompt=np.zeros(num_prompt, np.int32),
        tokens=np.zeros(num_tokens, np.int32),
        logprobs=np.zeros(num_tokens, np.float32),
    )


def test_records_beyond_the_room_are_dropped_oldest_first():
    records = SequenceRecords(Clock(0.0), max_bytes=100_000)
    for i in range(20):
        records.add({f"{i}a": record(1000, 1000), f"{i}b": record(1000, 1000)})
        assert records.num_bytes <= 100_000
    # Each request takes some 21 kB: its prompt once, two sequences, and the objects.
    kept = [i for i in range(20) if records.find(f"{i}a") and records.find(f"{i}b")]
    assert kept == [16, 17, 18, 19]
    assert not records.find("15b")


def test_records_that_have_ended_make_room_when_others_come():
    clock = Clock(0.0)
    records = SequenceRecords(clock, lifetime_s=10.0)
    records.add({"old": record(10, 10)})
    alone = records.num_bytes
    clock.now = 10.0
    assert records.find("old") is None
    records.add({"new": record(10, 10)})
    assert records.num_bytes == alone
    assert records.find("new")


def warned(operation: o.Operation) -> list[str]:
    return list(operation.warnings)


def test_what_a_loss_must_say_is_said_once_per_session_and_kept_with_the_result(
    caller: Caller, sequence: generator_pb2.SampledSequence, caplog: pytest.LogCaptureFixture
):
    run = caller.session()
    first = trained(run, traced(sequence))
    (text,) = warned(first)
    assert "not public" in text
    assert warned(trained(run, traced(sequence))) == []
    assert warned(trained(caller.session(), traced(sequence))) == [text]
    get = o.GetOperationRequest(name=first.name)
    assert warned(caller.operations.GetOperation(get)) == [text]
    listed = caller.operations.ListOperations(o.ListOperationsRequest(session=run.id))
    assert [warned(one) for one in listed.operations] == [[], [text]]
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [line for line in said if run.id in line] == [
        f"session {run.id}: gave its caller a warning about its loss stable_reinforce"
    ]
