"""Recorded replies as arrays, and replies of the stand-in in the same shape."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import numpy as np
import pytest

from backend.generator.sglang import facts, replies
from backend.generator.sglang.client import AdapterMissing, refusal
from backend.generator.sglang.replies import Experts
from backend.generator.sglang.requests import Reading
from tests.generator.sglang.recorded import VOCAB_SIZE, exchange
from tests.generator.sglang.stand_in_engine import StandInEngine
from together_post_training.errors import PostTrainingError, Reason


def sampled(name: str, *, num_asked: int, num_top: int = 0) -> replies.Sampled:
    return replies.sampled(
        exchange(name).reply,
        num_asked=num_asked,
        vocab_size=VOCAB_SIZE,
        num_top=num_top,
        experts=None,
    )


def test_samples_have_a_logprob_and_likeliest_tokens_for_each_token():
    found = sampled("sampled", num_asked=3, num_top=2)
    assert found.tokens.tolist() == [249, 2, 150]
    np.testing.assert_allclose(found.logprobs, [-4.045619, -3.250906, -2.897192], atol=1e-6)
    assert found.topk is not None
    assert found.topk.token_ids[:2].tolist() == [[133, 214], [133, 214]]
    assert (np.diff(found.topk.logprobs) <= 0).all()
    assert (found.end, found.weight_version) == ("length", "default")


@pytest.mark.parametrize(
    ("name", "end", "num_tokens"),
    [("stopped", "stop", 1), ("stopped by a string", "stop", 2), ("aborted", "abort", 19)],
)
def test_samples_that_end_early_keep_all_their_tokens(name, end, num_tokens):
    found = sampled(name, num_asked=58)
    assert found.end == end
    assert len(found.tokens) == len(found.logprobs) == num_tokens


def test_full_weights_are_named_in_the_reply():
    assert sampled("updated", num_asked=1).weight_version == "v1"


def test_scores_are_those_of_the_positions_asked_for():
    tokens = np.array([72, 101, 108, 108, 111])
    reading = Reading(tokens=tokens, first=2, num_top=2)
    found = replies.read(exchange("scored").reply, reading, vocab_size=VOCAB_SIZE)
    np.testing.assert_allclose(found.logprobs, [-11.914474, -9.858765, -7.041215], atol=1e-6)
    assert found.topk is not None
    assert found.topk.token_ids.tolist() == [[152, 242], [240, 140], [242, 58]]


def test_chosen_tokens_have_a_column_each():
    tokens = np.array([72, 101, 108, 108, 111])
    reading = Reading(tokens=tokens, first=3, chosen=(5, 258))
    found = replies.read(exchange("chosen").reply, reading, vocab_size=VOCAB_SIZE)
    assert found.chosen is not None
    expected = [[-10.743586, -9.098639], [-7.048533, -5.946011]]
    np.testing.assert_allclose(found.chosen, expected, atol=1e-6)


def test_the_last_token_of_the_vocabulary_is_called_0_in_prompts():
    reading = Reading(tokens=np.array([1, 258]), first=1)
    found = replies.read(exchange("last token").reply, reading, vocab_size=VOCAB_SIZE)
    np.testing.assert_allclose(found.logprobs, [-14.062151], atol=1e-6)
    other = Reading(tokens=np.array([1, 257]), first=1)
    with pytest.raises(PostTrainingError, match="other tokens"):
        replies.read(exchange("last token").reply, other, vocab_size=VOCAB_SIZE)


def test_what_was_only_read_tells_how_much_was_known():
    reading = Reading(tokens=np.array([72, 101, 108, 108, 111]))
    found = replies.read(exchange("read").reply, reading, vocab_size=VOCAB_SIZE)
    assert found.cached_tokens == 4
    assert not len(found.logprobs)


def test_experts_are_those_of_layers_that_have_some():
    reply = exchange("updated").reply
    whole = np.arange(5 * 3 * 2, dtype=np.int32).reshape(5, 3, 2)
    reply["meta_info"]["routed_experts"] = base64.b64encode(whole.tobytes()).decode()
    experts = Experts(num_layers=3, layers=(1, 2), per_token=2)
    settings = {"num_asked": 1, "vocab_size": VOCAB_SIZE, "num_top": 0}
    found = replies.sampled(reply, **settings, experts=experts).experts
    assert found is not None
    assert found.dtype == np.int16
    np.testing.assert_array_equal(found, whole[:, 1:])
    with pytest.raises(PostTrainingError, match="routed_experts"):
        replies.sampled(reply, **settings, experts=Experts(num_layers=4, layers=(1,), per_token=2))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("too long", Reason.SEQUENCE_TOO_LONG),
        ("too long together", Reason.SEQUENCE_TOO_LONG),
        ("unknown parameter", Reason.INVALID_ARGUMENT),
        ("empty", Reason.INVALID_ARGUMENT),
    ],
)
def test_refusals_keep_the_servers_words(name, reason):
    found = refusal(exchange(name).status, exchange(name).reply)
    assert isinstance(found, PostTrainingError)
    assert found.reason is reason
    error = exchange(name).reply["error"]
    assert (error if isinstance(error, str) else error["message"]) in found.message


def test_an_adapter_that_is_not_loaded_is_known_by_its_refusal():
    assert isinstance(refusal(400, exchange("unknown adapter").reply), AdapterMissing)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (404, Reason.UNIMPLEMENTED),
        (429, Reason.RESOURCE_EXHAUSTED),
        (500, Reason.INTERNAL),
        (503, Reason.UNAVAILABLE),
    ],
)
def test_other_statuses_have_reasons_of_their_own(status, reason):
    found = refusal(status, {"message": "words"})
    assert isinstance(found, PostTrainingError)
    assert found.reason is reason


def test_facts_are_read_from_the_servers_own_description():
    found = facts.facts(exchange("server info").reply)
    assert (found.version, found.window, found.max_lora_rank) == ("0.5.23", 64, 16)
    assert found.enable_lora
    assert found.has_tokenizer
    assert not found.is_seeded
    assert {"q_proj", "lm_head", "down_proj"} <= found.lora_modules


@pytest.mark.parametrize(
    ("info", "says"),
    [({}, "which version"), ({"version": "0.5.8"}, "0.5.9 or later"), ({"version": 3}, "version")],
)
def test_servers_that_are_too_old_or_none_are_refused(info, says):
    with pytest.raises(ValueError, match=says):
        facts.facts(info)


def test_the_stand_in_answers_in_the_shape_of_a_real_server(base):
    """Every field that is read of a recorded reply is there in the stand-in's, of the same kind."""
    read = {
        "sampled": ("output_token_logprobs", "output_top_logprobs"),
        "scored": ("input_token_logprobs", "input_top_logprobs", "output_token_logprobs"),
        "chosen": ("input_token_logprobs", "input_token_ids_logprobs"),
    }
    always = ("finish_reason", "prompt_tokens", "cached_tokens", "weight_version")
    for name, keys in read.items():
        real = exchange(name)
        body = {**real.body, "input_ids": [t % 16 for t in real.body["input_ids"]]}
        if "token_ids_logprob" in body:
            body["token_ids_logprob"] = [5, 15]
        engine = StandInEngine(Path(base.info.location))
        status, reply = asyncio.run(engine.answer("/generate", body))
        assert status == real.status
        ours, theirs = reply["meta_info"], real.reply["meta_info"]
        for key in (*always, *keys):
            assert _shape(ours[key]) == _shape(theirs[key]), key


def _shape(value):
    """Lists by their length and what they hold; numbers and names are not compared."""
    if isinstance(value, list):
        return [_shape(item) for item in value]
    if isinstance(value, dict):
        return {key: _shape(item) for key, item in value.items()}
    return None if value is None else type(value).__name__
