"""Sampling: Tinker's parameters to messages, and messages to its responses. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from tinker import types

from tinker_compat.conversion import fill_model_input
from tinker_compat.errors import to_tinker
from together_post_training import tensors
from together_post_training.errors import Reason, fail
from together_post_training.v1 import generator_pb2 as pb

_NO_TOKEN, _NO_LOGPROB = 0, -99999.0
_SEQUENCE_FIELDS = {f.name for f in dataclasses.fields(types.SampledSequence)}
_STOP_REASONS: dict[int, types.StopReason] = {
    pb.STOP_REASON_STOP: "stop",
    pb.STOP_REASON_LENGTH: "length",
}


def sample_request(
    prompt: types.ModelInput, num_samples: int, sampling_params: types.SamplingParams
) -> pb.SampleRequest:
    """Raises pydantic's ValidationError, a ValueError, for arguments of the wrong kind or in the wrong order."""
    checked = types.SampleRequest(
        prompt=prompt, num_samples=num_samples, sampling_params=sampling_params
    )
    message = pb.SampleRequest(
        num_samples=_int(checked.num_samples, "num_samples", bits=32),
        params=_params(checked.sampling_params),
    )
    fill_model_input(message.prompt, checked.prompt, what="prompt")
    return message


def logprobs_request(prompt: types.ModelInput) -> pb.ComputeLogprobsRequest:
    checked = types.SampleRequest(prompt=prompt, sampling_params=types.SamplingParams())
    message = pb.ComputeLogprobsRequest()
    fill_model_input(message.prompt, checked.prompt, what="prompt")
    return message


def sample_response(message: pb.SampleResponse, last_n: int | None) -> types.SampleResponse:
    """With `last_n`, prompt logprobs before the last n tokens are left out, as was asked."""
    prompt_logprobs, topk_prompt = None, None
    if message.HasField("prompt_logprobs"):
        prompt_logprobs = prompt_logprobs_from(message.prompt_logprobs, last_n)
    if message.HasField("topk_prompt_logprobs"):
        topk_prompt = _topk(message.topk_prompt_logprobs, last_n)
    return types.SampleResponse(
        sequences=[_sequence(s) for s in message.sequences],
        prompt_logprobs_np=prompt_logprobs,
        topk_prompt_logprobs_np=topk_prompt,
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
    )


def prompt_logprobs_from(message: Any, last_n: int | None) -> np.ndarray:
    """float32 (num prompt tokens,); NaN where there is none, as at 0."""
    logprobs = tensors.decode(message).copy()
    logprobs[: _num_left_out(len(logprobs), last_n)] = np.nan
    return logprobs


def as_list(logprobs: np.ndarray) -> list[float | None]:
    """NaN becomes None."""
    return [None if value != value else value for value in logprobs.tolist()]


def check_topk_sample_logprobs(k: int) -> None:
    if k and "topk_logprobs_np" not in _SEQUENCE_FIELDS:
        raise to_tinker(
            fail(
                Reason.UNIMPLEMENTED,
                f"topk_sample_logprobs={k}: the installed tinker package has no place for them in "
                "SampledSequence; install a newer one.",
            )
        )


def _params(params: types.SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=_int(params.top_k, "top_k", bits=32),
    )
    if params.max_tokens is not None:
        message.max_tokens = _int(params.max_tokens, "max_tokens", bits=32)
    if params.seed is not None:
        message.seed = _int(params.seed, "seed", bits=64)
    if params.stop is not None:
        _fill_stop(message.stop, params.stop)
    return message


def _fill_stop(message: pb.Stop, stop: Any) -> None:
    """A string, strings or token ids; an empty list stops at nothing, not even the model's end."""
    message.SetInParent()
    if isinstance(stop, str):
        message.strings.append(stop)
        return
    for item in stop:
        if isinstance(item, str):
            message.strings.append(item)
        else:
            message.tokens.append(_int(item, "stop", bits=32))


def _int(value: int, what: str, *, bits: int) -> int:
    if -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
        return value
    raise to_tinker(
        fail(
            Reason.INVALID_ARGUMENT,
            f"{what} is {value}: must be an integer of at most {bits} bits.",
            what=what,
            value=value,
        )
    )


def _sequence(message: pb.SampledSequence) -> types.SampledSequence:
    fields = {
        "stop_reason": _STOP_REASONS[message.stop_reason],
        "sequence_id": message.id,
        "tokens_np": np.frombuffer(message.tokens, dtype="<i4").copy(),
        "logprobs_np": np.frombuffer(message.logprobs, dtype="<f4").copy(),
    }
    if message.HasField("topk_logprobs"):
        fields["topk_logprobs_np"] = _topk(message.topk_logprobs, None)
    return types.SampledSequence(**{k: v for k, v in fields.items() if k in _SEQUENCE_FIELDS})


def _topk(message: pb.TopkLogprobs, last_n: int | None) -> Any:
    shape = (message.num_rows, message.k)
    token_ids = np.frombuffer(message.token_ids, dtype="<i4").reshape(shape).copy()
    logprobs = np.frombuffer(message.logprobs, dtype="<f4").reshape(shape).copy()
    left_out = _num_left_out(len(logprobs), last_n)
    token_ids[:left_out], logprobs[:left_out] = _NO_TOKEN, _NO_LOGPROB
    return _topk_class()(token_ids=token_ids, logprobs=logprobs)


def _topk_class() -> Any:
    """Tinker 0.38 renamed the module and the class."""
    try:
        from tinker.types.topk_logprobs import TopkLogprobs
    except ImportError:
        from tinker.types.topk_prompt_logprobs import (  # pyright: ignore[reportMissingImports]
            TopkPromptLogprobs,
        )

        return TopkPromptLogprobs
    return TopkLogprobs


def _num_left_out(num_tokens: int, last_n: int | None) -> int:
    return 0 if last_n is None else max(0, num_tokens - last_n)
