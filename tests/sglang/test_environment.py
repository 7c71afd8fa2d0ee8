"""The server that the other tests here rely on is the real one, and computes what transformers does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.sglang.server import Server

pytestmark = pytest.mark.sglang

PROMPT = list(b"Two numbers that agree")
NUM_TOKENS = 24
# float32 through two layers: differences of 2e-6 are usual. A wrong row or scale moves logprobs by tenths.
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def module(server: Server) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32).eval()


def greedy(server: Server, **more: object) -> dict:
    sampling = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    reply = server.post("/generate", input_ids=PROMPT, sampling_params=sampling, **more)
    assert reply.status_code == 200, reply.text
    return reply.json()


def logprobs_of(module: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits = module(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def test_greedy_tokens_are_those_of_transformers(server: Server, module):
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            logits = module(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    assert greedy(server)["output_ids"] == tokens[len(PROMPT) :]


def test_logprobs_are_those_of_transformers(server: Server, module):
    reply = greedy(server, return_logprob=True, logprob_start_len=0)
    expected = logprobs_of(module, PROMPT + reply["output_ids"])
    meta = reply["meta_info"]
    assert meta["input_token_logprobs"][0][0] is None
    pairs = meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]
    got = np.array([logprob for logprob, *_ in pairs])
    assert expected.std() > 0.5  # else a shift by one could hide in the tolerance
    print(f"max |logprob difference| to transformers: {np.abs(got - expected).max():.1e}")
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)
