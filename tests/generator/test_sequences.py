"""Samples end where they should: at a stop, kept whole, or at their last token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from backend.generator.sequences import Job
from backend.generator.stopping import Decode
from backend.generator.text import load_decoder
from backend.trainer import base_model
from tests.generator.calls import call

DNA = "\U0001f9ec"  # four bytes


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a byte-level tokenizer: a token for each byte, 256 to 258 special."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        directory = base_model.load("builtin:tiny").tokenizer_dir
    assert directory is not None
    return directory


@pytest.fixture(scope="module")
def decode(tokenizer_dir: Path) -> Decode:
    decoder = load_decoder(tokenizer_dir)
    assert decoder is not None
    return decoder


def ids(tokenizer_dir: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_dir).encode(text)


def num_taken(tokens: Sequence[int], decode: Decode, *stop: str) -> int | None:
    job = Job(call([1], max_tokens=len(tokens) + 1, stop_strings=stop), None, decode)
    (sample,) = job.samples
    for i, token in enumerate(tokens):
        sample.push(token, -1.0, None)
        if sample.is_finished:
            assert sample.result().stop_reason == "stop"
            return i + 1
    return None


def test_text_is_decoded_as_it_is(tokenizer_dir, decode):
    for text in ("plain", f"a{DNA}b", " spaces  kept ", "<|im_end|>"):
        assert decode(ids(tokenizer_dir, text)) == text
    assert decode(ids(tokenizer_dir, DNA)[:2]).endswith("\ufffd")
    assert decode([*ids(tokenizer_dir, "ab"), 100_000]) == "ab"


def test_a_stop_string_of_several_tokens_ends_with_the_last_of_them(tokenizer_dir, decode):
    tokens = ids(tokenizer_dir, f"xy{DNA}z<|im_end|>!")
    assert len(tokens) == 9
    assert num_taken(tokens, decode, DNA) == 6
    assert num_taken(tokens, decode, f"y{DNA}z") == 7
    assert num_taken(tokens, decode, "<|im_end|>") == 8
    assert num_taken(tokens, decode, "absent") is None


def test_the_last_token_allowed_ends_a_sample():
    job = Job(call([1, 2], max_tokens=2, stop_tokens=[9]), None, None)
    (sample,) = job.samples
    sample.push(5, -0.5, None)
    assert not sample.is_finished
    sample.push(6, -1.5, None)
    assert sample.is_finished
    result = sample.result()
    assert (result.stop_reason, result.tokens.tolist()) == ("length", [5, 6])
    np.testing.assert_array_equal(result.logprobs, np.array([-0.5, -1.5], np.float32))
    assert (result.tokens.dtype, result.logprobs.dtype) == (np.int32, np.float32)


def test_a_stop_on_the_last_token_is_a_stop():
    job = Job(call([1], max_tokens=1, stop_tokens=[9]), None, None)
    job.samples[0].push(9, -0.5, None)
    assert job.samples[0].result().stop_reason == "stop"
