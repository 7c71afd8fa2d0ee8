"""Training samples that name the record of a sequence: the experts that their tokens are to go through."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backend.resources.expert_records import ExpertRecord, ExpertRecords
from backend.trainer.base import Experts, ModelInfo
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.samples import Sample
from together_post_training.v1 import data_pb2

Array = np.ndarray


def routed_experts(
    messages: Sequence[data_pb2.Sample],
    samples: Sequence[Sample],
    model: ModelInfo,
    records: ExpertRecords,
) -> list[Array | None] | None:
    """What `Pass.routed_experts` takes; None where no sample has a key.

    A sample's tokens must be the beginning of the recorded prompt and sequence, or all of it.

    Raises:
        PostTrainingError: ROUTED_EXPERTS_NOT_FOUND, UNIMPLEMENTED, LENGTH_MISMATCH or INVALID_ARGUMENT, naming the
            sample.
    """
    if not any(message.HasField("routed_experts_key") for message in messages):
        return None
    return [
        _of_sample(i, message.routed_experts_key, sample, model, records)
        if message.HasField("routed_experts_key")
        else None
        for i, (message, sample) in enumerate(zip(messages, samples, strict=True))
    ]


def _of_sample(
    index: int, key: str, sample: Sample, model: ModelInfo, records: ExpertRecords
) -> Array:
    experts = _check_replayable(index, model)
    record = records.find(key)
    if record is None:
        raise _not_found(index, key)
    _check_model(index, record, model)
    _check_tokens(index, record, sample)
    routed = record.all_experts[: sample.num_tokens]
    assert routed.shape[1:] == (experts.num_layers, experts.per_token), routed.shape
    return routed


def _check_replayable(index: int, model: ModelInfo) -> Experts:
    if isinstance(model.experts, Experts):
        return model.experts
    if model.experts is None:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"Sample {index}: routed_experts_key with model {model.name!r}, which has no experts to route to. Leave it "
            "out.",
            sample=index,
            model=model.name,
        )
    raise fail(
        Reason.UNIMPLEMENTED,
        f"Sample {index}: routed_experts_key: the routers of {model.architecture} are not known to this server, which "
        "cannot replay what they chose. Leave it out.",
        sample=index,
        architecture=model.architecture,
    )


def _check_model(index: int, record: ExpertRecord, model: ModelInfo) -> None:
    if record.model == model.name:
        return
    raise fail(
        Reason.INVALID_ARGUMENT,
        f"Sample {index}: routed_experts_key is of a sequence of model {record.model!r}, this session trains "
        f"{model.name!r}: experts of one are none of the other.",
        sample=index,
        recorded=record.model,
        model=model.name,
    )


def _check_tokens(index: int, record: ExpertRecord, sample: Sample) -> None:
    recorded, given = record.all_tokens, sample.tokens
    what = (
        f"the {len(record.prompt)} tokens of the prompt and {len(record.tokens)} that were sampled"
    )
    if len(given) > len(recorded):
        raise fail(
            Reason.LENGTH_MISMATCH,
            f"Sample {index}: the model input has {len(given)} tokens, but its routed_experts_key covers {what}: "
            "experts are known for no others. Use the key of the last sequence that the sample was made from.",
            sample=index,
            expected=len(recorded),
            got=len(given),
        )
    differ = np.flatnonzero(given != recorded[: len(given)])
    if not len(differ):
        return
    first = int(differ[0])
    raise fail(
        Reason.INVALID_ARGUMENT,
        f"Sample {index}: model_input[{first}] of {len(given)} is {given[first]}, but of the {len(recorded)} tokens of "
        f"its routed_experts_key ({what}) token {first} is {recorded[first]}. Send the tokens as they were sampled, "
        "and with the key of their own sequence.",
        sample=index,
        position=first,
        token=given[first],
        recorded=recorded[first],
        expected=len(recorded),
        got=len(given),
    )


def _not_found(index: int, key: str) -> PostTrainingError:
    return fail(
        Reason.ROUTED_EXPERTS_NOT_FOUND,
        f"Sample {index}: no experts are kept under routed_experts_key {key!r}. Sample with return_routed_experts; "
        "what it keeps lives about a day, less where there is very much, and ends with the server.",
        sample=index,
        routed_experts_key=key,
    )
