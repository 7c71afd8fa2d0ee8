"""For losses that read the server's record of what it sampled: inputs from the record, samples checked against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from backend.resources.sequence_records import SequenceRecord, SequenceRecords
from together_post_training import losses
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.samples import Sample
from together_post_training.v1 import data_pb2

Array = np.ndarray

# Log-probabilities sent along count as the recorded ones up to this: what an engine's float32 may differ by.
_SAME_LOGPROB = 1e-4


def with_recorded(
    messages: Sequence[data_pb2.Sample],
    samples: Sequence[Sample],
    loss: str,
    records: SequenceRecords,
) -> list[Sample]:
    """The samples with what the loss reads of the record; those of other losses as they are.

    Added are float32 (N,) "logprobs", those of the sampled targets as they were sampled, and "sampled", 1 at those
    targets; both are 0 elsewhere. Callers may send the same logprobs along.

    All of the model input, and the targets that were sampled, must be the recorded tokens. Targets that were prompt
    are not compared: many callers pad them, and nothing trains there, for advantages other than 0 are refused.

    Args:
        messages: the samples as they came; their spans cover them (`spans.check_spans`).

    Raises:
        PostTrainingError: SEQUENCE_RECORD_NOT_FOUND, MISSING_INPUT, UNKNOWN_INPUT, LENGTH_MISMATCH or
            INVALID_ARGUMENT, naming the sample, the position and the values.
    """
    if not losses.contract(loss).provided:
        return list(samples)
    return [
        _with_recorded(message, sample, _Place(i, loss), records)
        for i, (message, sample) in enumerate(zip(messages, samples, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class _Place:
    """Which sample is looked at, and for which loss."""

    sample: int
    loss: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A span, with the recorded sequence that it is of.

    name: for messages. positions: of what is covered. recorded: of the sequence's prompt or sampled tokens.
    """

    name: str
    sequence_id: str
    record: SequenceRecord
    is_sampled: bool
    positions: slice
    recorded: slice

    @property
    def tokens(self) -> Array:
        return self.record.tokens if self.is_sampled else self.record.prompt

    @property
    def whose(self) -> str:
        return f"{'' if self.is_sampled else 'the prompt of '}sequence {self.sequence_id!r}"


def _with_recorded(
    message: data_pb2.Sample, sample: Sample, place: _Place, records: SequenceRecords
) -> Sample:
    targets = sample.inputs.get("target_tokens")
    if targets is None or not sample.num_tokens:
        return sample  # `samples.check` says what is wrong.
    _check_shapes(sample, targets, place)
    _check_presence(message, place)
    for run in _runs(message, "model_input_spans", place, records):
        _check_tokens(run, sample.tokens, "model_input", place)
    logprobs, sampled = np.zeros((2, len(targets)), np.float32)
    for run in _runs(message, "loss_fn_input_spans", place, records):
        if run.is_sampled:
            _check_tokens(run, targets, "target_tokens", place)
            logprobs[run.positions] = run.record.logprobs[run.recorded]
            sampled[run.positions] = 1
    _check_logprobs(sample, logprobs, sampled, place)
    _check_advantages(sample, sampled, place)
    return replace(sample, inputs={**sample.inputs, "logprobs": logprobs, "sampled": sampled})


def _runs(
    message: data_pb2.Sample, field: str, place: _Place, records: SequenceRecords
) -> Iterator[_Run]:
    start = 0
    for i, provenance in enumerate(getattr(message, field)):
        is_sampled = provenance.HasField("sampled_tokens")
        span = provenance.sampled_tokens if is_sampled else provenance.prompt_tokens
        name = f"Sample {place.sample}: {field}[{i}]"
        record = records.find(span.sequence_id)
        if record is None:
            raise _not_recorded(name, span.sequence_id)
        run = _Run(
            name=name,
            sequence_id=span.sequence_id,
            record=record,
            is_sampled=is_sampled,
            positions=slice(start, start + span.length),
            recorded=slice(span.offset, span.offset + span.length),
        )
        _check_inside(run)
        yield run
        start += span.length


def _check_inside(run: _Run) -> None:
    if run.recorded.stop <= len(run.tokens):
        return
    offset, length = run.recorded.start, run.recorded.stop - run.recorded.start
    raise fail(
        Reason.INVALID_ARGUMENT,
        f"{run.name} has offset {offset} and length {length}, but {run.whose} has {len(run.tokens)} tokens.",
        what=run.name,
        sequence_id=run.sequence_id,
        offset=offset,
        length=length,
        num_tokens=len(run.tokens),
    )


def _check_tokens(run: _Run, tokens: Array, key: str, place: _Place) -> None:
    given, recorded = tokens[run.positions], run.tokens[run.recorded]
    if np.array_equal(given, recorded):
        return
    first = int(np.flatnonzero(given != recorded)[0])
    position, at = run.positions.start + first, run.recorded.start + first
    raise fail(
        Reason.INVALID_ARGUMENT,
        f"Sample {place.sample}: {key}[{position}] is {given[first]}, but token {at} of {run.whose} is "
        f"{recorded[first]}. {_advice(run, given)}",
        sample=place.sample,
        position=position,
        token=given[first],
        recorded=recorded[first],
        sequence_id=run.sequence_id,
    )


def _advice(run: _Run, given: Array) -> str:
    for offset in (run.recorded.start - 1, run.recorded.start + 1):
        if offset >= 0 and np.array_equal(given, run.tokens[offset : offset + len(given)]):
            return f"With offset {offset} the span would fit: something is shifted by one."
    return f"{run.name} must name the tokens that are there, as they were sampled."


def _check_shapes(sample: Sample, targets: Array, place: _Place) -> None:
    """Of what is compared here; `samples.check` looks at the rest."""
    if targets.ndim != 1:
        raise fail(
            Reason.LENGTH_MISMATCH,
            f"Sample {place.sample}: target_tokens have shape {list(targets.shape)}; loss {place.loss!r} takes (N,).",
            sample=place.sample,
            key="target_tokens",
        )
    for key in ("advantages", "logprobs"):
        values = sample.inputs.get(key)
        if values is not None and values.shape != targets.shape:
            raise fail(
                Reason.LENGTH_MISMATCH,
                f"Sample {place.sample}: {key} has shape {list(values.shape)}, target_tokens {list(targets.shape)}; "
                "they must be equal.",
                sample=place.sample,
                key=key,
            )


def _check_presence(message: data_pb2.Sample, place: _Place) -> None:
    for field in ("model_input_spans", "loss_fn_input_spans"):
        if not getattr(message, field):
            raise fail(
                Reason.MISSING_INPUT,
                f"Sample {place.sample} has no {field}: loss {place.loss!r} reads the record of the sequences that a "
                "sample is made of. Sample them with record_stability_info, and say where each token came from "
                "(in Tinker's SDK with Datum.with_provenance).",
                sample=place.sample,
                key=field,
                loss=place.loss,
            )


def _check_logprobs(sample: Sample, recorded: Array, sampled: Array, place: _Place) -> None:
    if "sampled" in sample.inputs:
        raise fail(
            Reason.UNKNOWN_INPUT,
            f"Sample {place.sample} has an input 'sampled': loss {place.loss!r} takes it from the sample's spans. "
            "Remove it.",
            sample=place.sample,
            key="sampled",
            loss=place.loss,
        )
    given = sample.inputs.get("logprobs")
    if given is None:
        return
    is_same = np.abs(given - recorded) <= _SAME_LOGPROB  # NaN is not.
    at = _first((sampled != 0) & ~is_same)
    if at is not None:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"Sample {place.sample}: logprobs[{at}] is {given[at]:g}, but the token there was sampled with "
            f"{recorded[at]:g}. Loss {place.loss!r} reads the server's record: leave logprobs out, or send what "
            "sampling returned.",
            sample=place.sample,
            key="logprobs",
            position=at,
            value=given[at],
            recorded=recorded[at],
        )


def _check_advantages(sample: Sample, sampled: Array, place: _Place) -> None:
    advantages = sample.inputs.get("advantages")
    if advantages is None:
        return
    at = _first((sampled == 0) & (advantages != 0))
    if at is not None:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"Sample {place.sample}: advantages[{at}] is {advantages[at]:g}, but the target there is prompt. Loss "
            f"{place.loss!r} trains sampled tokens only: set it to 0.",
            sample=place.sample,
            key="advantages",
            position=at,
            value=advantages[at],
        )


def _first(is_so: Array) -> int | None:
    return int(np.argmax(is_so)) if is_so.any() else None


def _not_recorded(what: str, sequence_id: str) -> PostTrainingError:
    return fail(
        Reason.SEQUENCE_RECORD_NOT_FOUND,
        f"{what} names sequence {sequence_id!r}, of which there is no record. Sample with "
        "record_stability_info=True; records live about a day, less where there are very many, and end with the "
        "server.",
        what=what,
        sequence_id=sequence_id,
    )
