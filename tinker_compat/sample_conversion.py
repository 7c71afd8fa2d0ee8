"""Sampling: Tinker's parameters to messages, and messages to its responses. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from tinker import types

from tinker_compat.conversion import fill_model_input, fill_tensor, tensor_from, tensor_of
from tinker_compat.errors import to_tinker
from together_post_training import tensors
from together_post_training.errors import Reason, fail
from together_post_training.v1 import generator_pb2 as pb

_RESPONSE_FIELDS = {f.name for f in dataclasses.fields(types.SampleResponse)}
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


def logprobs_request(prompt: types.ModelInput, last_n: int | None) -> pb.ComputeLogprobsRequest:
    """Raises ValueError as `fill_last_n` does."""
    checked = types.SampleRequest(prompt=prompt, sampling_params=types.SamplingParams())
    message = pb.ComputeLogprobsRequest()
    fill_model_input(message.prompt, checked.prompt, what="prompt")
    if last_n is not None:
        message.last_n = _last_n(last_n)
    return message


def fill_last_n(message: pb.SampleRequest, last_n: int | None) -> None:
    """Raises ValueError without prompt logprobs, or for a number below 1; how long the prompt is, the server knows."""
    if last_n is None:
        return
    message.prompt_logprobs_last_n = _last_n(last_n)
    if not message.prompt_logprobs:
        raise ValueError(
            f"prompt_logprobs_last_n is {last_n}, but no prompt logprobs are asked for: "
            "set include_prompt_logprobs."
        )


def fill_targets(message: pb.SampleRequest, targets: types.TensorData | None) -> None:
    """Dense or CSR, as it is.

    Raises:
        TypeError, ValueError: unless it is a TensorData of int64 with two dimensions.
        BadRequestError: the installed tinker's response has no place for them.
    """
    if targets is None:
        return
    fill_tensor(message.target_prompt_logprobs, targets, what="target_prompt_logprobs")
    if targets.dtype != "int64":
        raise ValueError(f"target_prompt_logprobs is {targets.dtype}: token ids must be int64.")
    if targets.shape is None or len(targets.shape) != 2:
        raise ValueError(
            f"target_prompt_logprobs has shape {targets.shape}: it must be 2-D, [len(prompt) - 1, K]."
        )
    _check_place("target_prompt_logprobs", "target_prompt_logprobs")


def fill_alternatives(message: pb.SampleRequest, k: int) -> None:
    """Raises ValueError below 0; BadRequestError as `fill_targets` does."""
    if k < 0:
        raise ValueError(f"prompt_alt_tokens_k must be 0 or greater, got {k}")
    if k:
        _check_place(f"prompt_alt_tokens_k={k}", "prompt_alt_tokens")
    message.prompt_alt_tokens_k = _int(k, "prompt_alt_tokens_k", bits=32)


def sample_response(message: pb.SampleResponse, request: pb.SampleRequest) -> types.SampleResponse:
    """The answer to that request.

    Raises:
        RuntimeError: an old server passed over something that was asked for.
    """
    _check_answered(message, request)
    fields: dict[str, Any] = {
        "sequences": [_sequence(s) for s in message.sequences],
        "prompt_cache_hit_tokens": message.prompt_cache_hit_tokens,
    }
    if message.HasField("prompt_logprobs"):
        last_n = request.prompt_logprobs_last_n or None
        fields["prompt_logprobs_np"] = prompt_logprobs_from(message.prompt_logprobs, last_n)
    if message.HasField("topk_prompt_logprobs"):
        fields["topk_prompt_logprobs_np"] = _topk(message.topk_prompt_logprobs)
    if message.HasField("target_prompt_logprobs"):
        fields["target_prompt_logprobs"] = tensor_from(message.target_prompt_logprobs)
    if message.HasField("prompt_alt_tokens"):
        fields["prompt_alt_tokens"] = _alternatives(message.prompt_alt_tokens)
    return types.SampleResponse(**fields)


def prompt_logprobs_from(message: Any, last_n: int | None) -> np.ndarray:
    """float32 (num prompt tokens,); NaN where there is none, as at 0.

    Raises:
        RuntimeError: an old server passed over `last_n`.
    """
    logprobs = tensors.decode(message).copy()
    if last_n is not None and not np.isnan(logprobs[:-last_n]).all():
        raise _passed_over(f"prompt_logprobs_last_n={last_n}")
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


def _check_place(what: str, field: str) -> None:
    if field not in _RESPONSE_FIELDS:
        raise to_tinker(
            fail(
                Reason.UNIMPLEMENTED,
                f"{what}: the installed tinker package has no place for them in SampleResponse; install a newer one.",
            )
        )


def _last_n(last_n: int) -> int:
    if last_n < 1:
        raise ValueError(f"prompt_logprobs_last_n must be 1 or greater, got {last_n}")
    return _int(last_n, "prompt_logprobs_last_n", bits=32)


def _check_answered(message: pb.SampleResponse, request: pb.SampleRequest) -> None:
    """A server does not see fields that it does not know."""
    if request.HasField("target_prompt_logprobs") and not message.HasField(
        "target_prompt_logprobs"
    ):
        raise _passed_over("target_prompt_logprobs")
    if request.prompt_alt_tokens_k and not message.HasField("prompt_alt_tokens"):
        raise _passed_over(f"prompt_alt_tokens_k={request.prompt_alt_tokens_k}")


def _passed_over(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} was asked for, and the server answered without it: it is too old to know it. Update the server."
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
        fields["topk_logprobs_np"] = _topk(message.topk_logprobs)
    return types.SampledSequence(**{k: v for k, v in fields.items() if k in _SEQUENCE_FIELDS})


def _alternatives(message: pb.PromptAltTokens) -> Any:
    # Older Tinkers have no such class, and are not asked for one.
    from tinker.types.prompt_alt_tokens import PromptAltTokens

    return PromptAltTokens(
        tokens=tensor_of(tensors.decode(message.tokens).copy()),
        logprobs=tensor_of(tensors.decode(message.logprobs).copy()),
    )


def _topk(message: pb.TopkLogprobs) -> Any:
    shape = (message.num_rows, message.k)
    token_ids = np.frombuffer(message.token_ids, dtype="<i4").reshape(shape).copy()
    logprobs = np.frombuffer(message.logprobs, dtype="<f4").reshape(shape).copy()
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
