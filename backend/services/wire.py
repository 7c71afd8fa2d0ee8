"""Between messages and values. Pure."""

from __future__ import annotations

import numpy as np

from backend.generator.base import SampledSequence, SampleResult, Topk
from backend.services.spans import check_spans
from backend.services.target_tokens import encode_answer
from together_post_training import tensors
from together_post_training.errors import Reason, fail
from together_post_training.samples import Sample
from together_post_training.v1 import data_pb2, generator_pb2

Array = np.ndarray

_TOKEN = np.dtype("<i4")


def tokens(model_input: data_pb2.ModelInput, what: str) -> Array:
    """int64 (N,). Raises UNSUPPORTED_INPUT for images, INVALID_ARGUMENT for what is not tokens."""
    chunks = [
        _chunk_tokens(chunk, f"{what}, chunk {i}") for i, chunk in enumerate(model_input.chunks)
    ]
    if len(chunks) == 1:
        return chunks[0].astype(np.int64)
    return np.concatenate(chunks or [np.zeros(0)]).astype(np.int64)


def _chunk_tokens(chunk: data_pb2.Chunk, what: str) -> Array:
    kind = chunk.WhichOneof("chunk")
    if kind == "image":
        raise fail(
            Reason.UNSUPPORTED_INPUT,
            f"{what} is an image: this model reads text only. Send tokens (encoded_text).",
            what=what,
        )
    if kind != "encoded_text":
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"{what} is empty or of a kind that this server does not know: set encoded_text.",
            what=what,
        )
    text = chunk.encoded_text
    raw = text.raw  # Once: each look at it is a copy.
    if raw and text.tokens:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"{what} has both raw and tokens: set one of them.",
            what=what,
        )
    if len(raw) % _TOKEN.itemsize:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"{what}: {len(raw)} raw bytes are not whole int32 tokens.",
            what=what,
        )
    return np.frombuffer(raw, _TOKEN) if raw else np.asarray(text.tokens, _TOKEN)


def sample(message: data_pb2.Sample, index: int) -> Sample:
    """As it was sent; `samples.check` decides whether it can be used."""
    fields = message.loss_fn_inputs
    decoded = Sample(
        tokens=tokens(message.model_input, f"Sample {index}: model_input"),
        # Not items(): protobuf's is written in Python.
        inputs={key: tensors.decode(fields[key], what=f"Sample {index}: {key}") for key in fields},
    )
    if message.model_input_spans or message.loss_fn_input_spans:
        _check_spans(message, decoded, index)
    return decoded


def _check_spans(message: data_pb2.Sample, decoded: Sample, index: int) -> None:
    check_spans(
        message.model_input_spans,
        decoded.num_tokens,
        what=f"Sample {index}: model_input_spans",
        of="the model input",
    )
    targets = decoded.inputs.get("target_tokens")
    if targets is not None and targets.ndim:  # Otherwise `samples.check` says what is wrong.
        check_spans(
            message.loss_fn_input_spans,
            len(targets),
            what=f"Sample {index}: loss_fn_input_spans",
            of="target_tokens",
        )


def sample_response(
    request: generator_pb2.SampleRequest, result: SampleResult, ids: list[str]
) -> generator_pb2.SampleResponse:
    """`ids`: one for each sequence."""
    response = generator_pb2.SampleResponse(
        sequences=[_sequence(s, i) for s, i in zip(result.sequences, ids, strict=True)],
        prompt_cache_hit_tokens=result.cache_hit_tokens,
        warnings=result.warnings,
    )
    if result.prompt_logprobs is not None:
        response.prompt_logprobs.CopyFrom(tensors.encode(result.prompt_logprobs))
    if result.topk_prompt is not None:
        response.topk_prompt_logprobs.CopyFrom(_topk(result.topk_prompt))
    if result.target_prompt_logprobs is not None:
        response.target_prompt_logprobs.CopyFrom(
            encode_answer(request.target_prompt_logprobs, result.target_prompt_logprobs)
        )
    if result.prompt_alt is not None:
        tensors.encode_into(response.prompt_alt_tokens.tokens, result.prompt_alt.tokens)
        tensors.encode_into(response.prompt_alt_tokens.logprobs, result.prompt_alt.logprobs)
    return response


def _sequence(sequence: SampledSequence, id_: str) -> generator_pb2.SampledSequence:
    reason = (
        generator_pb2.STOP_REASON_STOP
        if sequence.stop_reason == "stop"
        else generator_pb2.STOP_REASON_LENGTH
    )
    return generator_pb2.SampledSequence(
        id=id_,
        stop_reason=reason,
        tokens=sequence.tokens.astype(_TOKEN, copy=False).tobytes(),
        logprobs=sequence.logprobs.astype("<f4", copy=False).tobytes(),
        topk_logprobs=None if sequence.topk is None else _topk(sequence.topk),
    )


def _topk(topk: Topk) -> generator_pb2.TopkLogprobs:
    num_rows, k = topk.token_ids.shape
    return generator_pb2.TopkLogprobs(
        token_ids=topk.token_ids.astype(_TOKEN, copy=False).tobytes(),
        logprobs=topk.logprobs.astype("<f4", copy=False).tobytes(),
        k=k,
        num_rows=num_rows,
    )
