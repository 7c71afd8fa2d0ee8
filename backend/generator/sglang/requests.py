"""Calls as SGLang's requests: what is sent, what is refused, what is warned about. Pure.

Two kinds: one that only reads tokens, to score them or so that several samples find them in the prefix cache, and one
that samples. Token ids were checked: SGLang takes too large ones for 0, and ends when it meets negative ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backend.generator.base import SampleCall
from backend.generator.sglang.facts import Facts
from backend.trainer.base import ModelInfo
from together_post_training.errors import PostTrainingError, Reason, fail

Array = np.ndarray
Body = dict[str, object]

# Numbers in one reply to a request for tokens of the caller's choice.
_MAX_CELLS = 16_384
_ALL_TOKENS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Reads tokens and samples none.

    first: the first position that is scored; None: nothing is. num_top: how many of the likeliest tokens are named at
    each of those. chosen: tokens that are scored at each of those, too.
    """

    tokens: Array
    first: int | None = None
    num_top: int = 0
    chosen: tuple[int, ...] = ()


def reading_body(reading: Reading, lora: str | None) -> Body:
    """At temperature 0: a token is drawn and thrown away, which must not fail for what is not finite."""
    body: Body = {
        "input_ids": reading.tokens.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0, "ignore_eos": True},
    }
    if lora is not None:
        body["lora_path"] = lora
    if reading.first is not None:
        # The row of the position where it starts has no numbers.
        body |= {"return_logprob": True, "logprob_start_len": reading.first - 1}
        body |= {"top_logprobs_num": reading.num_top} if reading.num_top else {}
        body |= {"token_ids_logprob": list(reading.chosen)} if reading.chosen else {}
    return body


def sampling_body(
    call: SampleCall,
    tokens: Sequence[int],
    max_new_tokens: int,
    *,
    lora: str | None,
    seed: int | None,
    vocab_size: int,
    has_experts: bool,
) -> Body:
    """Goes on from these tokens. `seed` None: the server has no use for one."""
    params: Body = {
        "max_new_tokens": max_new_tokens,
        "temperature": call.temperature,
        "top_p": call.top_p,
        "top_k": call.top_k or _ALL_TOKENS,
        "min_p": call.min_p,
    }
    strings = [string for string in call.stop.strings if string]
    if strings:
        params["stop"] = strings
    if call.stop.tokens:
        # The model's own EOS tokens end a sample then, too; where they should not, it is gone on with.
        params["stop_token_ids"] = list(call.stop.tokens)
    else:
        params["ignore_eos"] = True
    if seed is not None:
        params["sampling_seed"] = seed
    body: Body = {
        "input_ids": list(tokens),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    if call.topk_sample_logprobs:
        # More than there are would end the server.
        body["top_logprobs_num"] = min(call.topk_sample_logprobs, vocab_size)
    if call.return_routed_experts and has_experts:
        body["return_routed_experts"] = True
    if lora is not None:
        body["lora_path"] = lora
    return body


def readings(call: SampleCall, vocab_size: int) -> list[Reading]:
    """What has to be read of a call's prompt before it is sampled from: nothing, where that reads it by itself."""
    found = []
    if _is_ranked(call):
        num_top = min(call.topk_prompt_logprobs, vocab_size)
        found.append(Reading(tokens=call.prompt, first=first_ranked(call), num_top=num_top))
    found += _target_readings(call)
    if not found and call.num_samples > 1 and call.max_tokens:
        found.append(Reading(tokens=call.prompt))
    return found


def first_ranked(call: SampleCall) -> int:
    """The first position whose own and likeliest tokens are scored."""
    if call.num_scored is None:
        return 1
    return max(len(call.prompt) - call.num_scored, 1)


def seed_of(call: SampleCall, index: int, facts: Facts) -> int | None:
    return (call.seed + index) % 2**63 if facts.is_seeded else None


def warnings(call: SampleCall, facts: Facts) -> tuple[str, ...]:
    """What SGLang does otherwise than asked, and nobody would notice."""
    found = []
    if call.is_seeded and call.temperature > 0 and call.max_tokens and not facts.is_seeded:
        found.append(
            f"seed={call.seed} has no effect: this SGLang server draws by its own numbers. Start it with "
            "--enable-deterministic-inference (GPUs only), or use --generator embedded."
        )
    if call.max_tokens and call.temperature > 0 and call.top_k and call.top_p < 1:
        found.append(
            f"top_p={call.top_p:g} is taken of the whole distribution, not of what top_k={call.top_k} leaves of it: "
            "SGLang applies both at once, and may keep more tokens."
        )
    return tuple(found)


def check_supported(call: SampleCall, facts: Facts, model: ModelInfo, *, has_experts: bool) -> None:
    """Raises UNIMPLEMENTED for what SGLang cannot do, INVALID_ARGUMENT for what this server was not started for."""
    if call.prompt_alt_tokens:
        raise _unsupported(
            "prompt_alt_tokens", call.prompt_alt_tokens, "it draws no tokens at prompt positions"
        )
    if call.return_routed_experts and has_experts and not facts.returns_experts:
        raise _unsupported(
            "return_routed_experts",
            True,
            "this server was started without --enable-return-routed-experts",
        )
    if call.stop.strings and not facts.has_tokenizer:
        raise _unsupported("stop strings", list(call.stop.strings), "this server has no tokenizer")
    needed = len(call.prompt) + call.max_tokens
    window = min(model.limits.max_seq_length, facts.window or model.limits.max_seq_length)
    if needed > window:
        raise fail(
            Reason.SEQUENCE_TOO_LONG,
            f"The prompt has {len(call.prompt)} tokens and max_tokens is {call.max_tokens}: together more than "
            f"the window of {window}"
            + ("." if facts.window != window else ", for which this SGLang server was started."),
            num_tokens=len(call.prompt),
            max_tokens=call.max_tokens,
            max_seq_length=window,
        )


def _is_ranked(call: SampleCall) -> bool:
    is_asked = call.prompt_logprobs or call.topk_prompt_logprobs
    return bool(is_asked) and first_ranked(call) < len(call.prompt)


def _target_readings(call: SampleCall) -> list[Reading]:
    """SGLang scores the same tokens at every position: so positions are scored a few at a time, as many as keep the
    reply small."""
    targets = call.target_prompt_tokens
    if targets is None:
        return []
    found, start, num_rows = [], 0, len(targets)
    while start < num_rows:
        stop, chosen = start, set[int]()
        while stop < num_rows:
            wider = chosen | {token for token in targets[stop].tolist() if token >= 0}
            if stop > start and len(wider) * (stop + 1 - start) > _MAX_CELLS:
                break
            stop, chosen = stop + 1, wider
        if chosen:
            # Row i is about position i + 1.
            found.append(
                Reading(
                    tokens=call.prompt[: stop + 1], first=start + 1, chosen=tuple(sorted(chosen))
                )
            )
        start = stop
    return found


def _unsupported(name: str, value: object, why: str) -> PostTrainingError:
    return fail(
        Reason.UNIMPLEMENTED,
        f"{name}={value} cannot be served by SGLang: {why}. Leave it out, or use --generator embedded.",
        parameter=name,
    )
