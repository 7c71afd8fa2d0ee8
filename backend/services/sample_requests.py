"""Requests of GeneratorService as calls of a generator: defaults filled in, everything checked. Pure."""

from __future__ import annotations

import math

from backend.generator.base import SampleCall, Stop
from backend.services import wire
from backend.services.fields import check_count, check_finite, invalid, optional
from backend.services.target_tokens import decode_targets
from backend.trainer.base import ModelInfo
from together_post_training.errors import Reason, fail
from together_post_training.samples import Limits, check_tokens
from together_post_training.v1 import data_pb2
from together_post_training.v1 import generator_pb2 as pb

MAX_NUM_SAMPLES = 1024
MAX_TOPK = 100
MAX_ALT_TOKENS = 100


def sample_call(
    request: pb.SampleRequest, model: ModelInfo, snapshot: str | None, fresh_seed: int
) -> SampleCall:
    """`snapshot`: the generator's name for it. `fresh_seed`: for a request without one."""
    prompt = _prompt(request.prompt, model.limits)
    params = request.params
    return SampleCall(
        snapshot=snapshot,
        prompt=prompt,
        num_samples=check_count(
            "num_samples", optional(request, "num_samples", 1), low=1, high=MAX_NUM_SAMPLES
        ),
        max_tokens=_max_tokens(params, len(prompt), model.limits.max_seq_length),
        seed=optional(params, "seed", fresh_seed),
        temperature=check_finite(
            "temperature",
            optional(params, "temperature", 1.0),
            low=0.0,
            accepted="a finite number, 0 (greedy) or above",
        ),
        top_p=_top_p(params),
        top_k=_top_k(params),
        min_p=_min_p(params),
        stop=_stop(params, model),
        prompt_logprobs=request.prompt_logprobs,
        num_scored=_num_scored(request, "prompt_logprobs_last_n", len(prompt)),
        topk_prompt_logprobs=check_count(
            "topk_prompt_logprobs", request.topk_prompt_logprobs, low=0, high=MAX_TOPK
        ),
        topk_sample_logprobs=check_count(
            "topk_sample_logprobs", request.topk_sample_logprobs, low=0, high=MAX_TOPK
        ),
        target_prompt_tokens=_targets(request, len(prompt), model.limits),
        prompt_alt_tokens=check_count(
            "prompt_alt_tokens_k", request.prompt_alt_tokens_k, low=0, high=MAX_ALT_TOKENS
        ),
        is_seeded=params.HasField("seed"),
        return_routed_experts=request.return_routed_experts,
    )


def score_call(
    request: pb.ComputeLogprobsRequest, model: ModelInfo, snapshot: str | None
) -> SampleCall:
    prompt = _prompt(request.prompt, model.limits)
    if len(prompt) > model.limits.max_seq_length:
        raise _too_long(len(prompt), 0, model.limits.max_seq_length)
    return SampleCall(
        snapshot=snapshot,
        prompt=prompt,
        num_samples=1,
        max_tokens=0,
        seed=0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        stop=Stop(),
        prompt_logprobs=True,
        num_scored=_num_scored(request, "last_n", len(prompt)),
        is_seeded=False,
    )


def _prompt(message: data_pb2.ModelInput, limits: Limits) -> wire.Array:
    prompt = wire.tokens(message, "prompt")
    check_tokens(prompt, limits, what="prompt")
    return prompt


def _max_tokens(params: pb.SamplingParams, num_prompt_tokens: int, window: int) -> int:
    if not params.HasField("max_tokens"):
        if num_prompt_tokens >= window:
            raise _too_long(num_prompt_tokens, 1, window)
        return window - num_prompt_tokens
    if params.max_tokens < 1:
        raise invalid(
            "max_tokens",
            params.max_tokens,
            "1 or more",
            "To score a prompt only, use ComputeLogprobs.",
        )
    if num_prompt_tokens + params.max_tokens > window:
        raise _too_long(num_prompt_tokens, params.max_tokens, window)
    return params.max_tokens


def _too_long(num_prompt_tokens: int, max_tokens: int, window: int):
    return fail(
        Reason.SEQUENCE_TOO_LONG,
        "Prompt length plus max_tokens exceeds the model's context window: "
        f"{num_prompt_tokens} + {max_tokens} > {window}. Shorten the prompt, or ask for fewer tokens.",
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        max_seq_length=window,
    )


def _top_p(params: pb.SamplingParams) -> float:
    top_p = optional(params, "top_p", 1.0)
    if not (math.isfinite(top_p) and 0 < top_p <= 1):
        raise invalid(
            "top_p",
            top_p,
            "above 0 and at most 1",
            "1 keeps every token; 0 would keep none (temperature 0 is greedy).",
        )
    return top_p


def _top_k(params: pb.SamplingParams) -> int:
    """0: all."""
    top_k = optional(params, "top_k", -1)
    if top_k < -1:
        raise invalid("top_k", top_k, "-1 or 0 (all tokens), or 1 or more")
    return max(top_k, 0)


def _min_p(params: pb.SamplingParams) -> float:
    min_p = optional(params, "min_p", 0.0)
    if not 0 <= min_p <= 1:
        raise invalid("min_p", min_p, "0 (all tokens) to 1")
    return min_p


def _num_scored(
    request: pb.SampleRequest | pb.ComputeLogprobsRequest, field: str, num_prompt_tokens: int
) -> int | None:
    if not request.HasField(field):
        return None
    last_n = getattr(request, field)
    if isinstance(request, pb.SampleRequest) and not request.prompt_logprobs:
        raise invalid(field, last_n, "absent without prompt_logprobs", "Set prompt_logprobs too.")
    if not 1 <= last_n < num_prompt_tokens:
        raise invalid(
            field,
            last_n,
            "1 to the prompt's length less 1",
            f"The prompt has {num_prompt_tokens} tokens, the first of which has no log-probability.",
        )
    return last_n


def _targets(
    request: pb.SampleRequest, num_prompt_tokens: int, limits: Limits
) -> wire.Array | None:
    if not request.HasField("target_prompt_logprobs"):
        return None
    return decode_targets(request.target_prompt_logprobs, num_prompt_tokens, limits.vocab_size)


def _stop(params: pb.SamplingParams, model: ModelInfo) -> Stop:
    if not params.HasField("stop"):
        return Stop(tokens=model.eos_tokens)
    if any(not string for string in params.stop.strings):
        raise fail(
            Reason.INVALID_ARGUMENT,
            "stop holds an empty string, which would stop before the first token. Leave it out.",
        )
    for token in params.stop.tokens:
        if not 0 <= token < model.limits.vocab_size:
            raise fail(
                Reason.TOKEN_OUT_OF_RANGE,
                f"stop holds token id {token}: this model's ids are 0 to {model.limits.vocab_size - 1}.",
                token=token,
                vocab_size=model.limits.vocab_size,
            )
    return Stop(strings=tuple(params.stop.strings), tokens=tuple(params.stop.tokens))
