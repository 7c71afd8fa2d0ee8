"""Calls as requests. That SGLang takes them is shown in tests/sglang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.generator.base import Stop
from backend.generator.sglang import requests
from backend.generator.sglang.facts import facts
from tests.generator.sglang.recorded import exchange
from tests.generator.sglang.test_generator import call

FACTS = facts(exchange("server info").reply)


def body(asked, **settings) -> dict[str, Any]:
    chosen = {"lora": None, "seed": None, "vocab_size": 16, "has_experts": False, **settings}
    return requests.sampling_body(asked, asked.prompt.tolist(), asked.max_tokens, **chosen)


def test_every_control_is_passed_on():
    asked = call([1, 2], temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_tokens=9)
    params = body(asked, seed=3)["sampling_params"]
    assert params == {
        "max_new_tokens": 9,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "ignore_eos": True,
        "sampling_seed": 3,
    }
    assert body(replace(asked, top_k=0))["sampling_params"]["top_k"] == -1


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (Stop(), {"ignore_eos": True}),
        (Stop(strings=("x", "")), {"stop": ["x"], "ignore_eos": True}),
        (Stop(tokens=(3,)), {"stop_token_ids": [3]}),
        (Stop(strings=("x",), tokens=(3,)), {"stop": ["x"], "stop_token_ids": [3]}),
    ],
)
def test_stops_are_passed_on_and_the_models_own_are_ignored_where_that_is_possible(stop, expected):
    params = body(call([1], stop=stop))["sampling_params"]
    found = {k: params[k] for k in ("stop", "stop_token_ids", "ignore_eos") if k in params}
    assert found == expected


def test_optional_parts_are_sent_only_if_they_are_asked_for():
    plain = body(call([1]))
    assert {"lora_path", "top_logprobs_num", "return_routed_experts"}.isdisjoint(plain)
    asked = call([1], topk_sample_logprobs=100, return_routed_experts=True)
    full = body(asked, lora="a", has_experts=True)
    assert (full["lora_path"], full["top_logprobs_num"]) == ("a", 16)
    assert full["return_routed_experts"] is True


@pytest.mark.parametrize(
    ("asked", "firsts"),
    [
        (call([1, 2, 3]), []),
        (call([1, 2, 3], num_samples=2), [None]),
        (call([1, 2, 3], max_tokens=0), []),
        (call([1, 2, 3], prompt_logprobs=True), [1]),
        (call([1, 2, 3], topk_prompt_logprobs=1, num_scored=1), [2]),
        (call([1, 2, 3], prompt_logprobs=True, num_scored=3), [1]),
        (call([1, 2, 3], prompt_logprobs=True, num_scored=0), []),
        (call([1], prompt_logprobs=True), []),
        (call([1, 2, 3], target_prompt_tokens=np.array([[-1], [4]])), [1]),
        (call([1, 2, 3], target_prompt_tokens=np.array([[-1], [-1]])), []),
    ],
)
def test_prompts_are_read_apart_only_where_somebody_asks(asked, firsts):
    assert [reading.first for reading in requests.readings(asked, 16)] == firsts


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 60).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(-1, 15), min_size=2, max_size=2), min_size=n - 1, max_size=n - 1
        )
    ),
    st.integers(1, 40),
)
def test_targets_are_each_scored_once_in_replies_of_bounded_size(rows, max_cells):
    targets = np.array(rows)
    asked = call(list(range(len(targets) + 1)), target_prompt_tokens=targets, max_tokens=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "_MAX_CELLS", max_cells)
        readings = requests.readings(asked, 64)
    scored = np.zeros(len(targets) + 1, int)
    for reading in readings:
        assert reading.first is not None
        positions = range(reading.first, len(reading.tokens))
        for position in positions:
            scored[position] += 1
            assert set(targets[position - 1]) - {-1} <= set(reading.chosen)
        assert len(positions) == 1 or len(positions) * len(reading.chosen) <= max_cells
    named = (targets >= 0).any(axis=1)
    assert (scored[1:][named] == 1).all()


def test_a_warning_for_each_thing_that_is_done_otherwise():
    asked = call([1], is_seeded=True, temperature=1.0)
    assert len(requests.warnings(asked, FACTS)) == 1
    assert not requests.warnings(replace(asked, temperature=0.0), FACTS)
    assert not requests.warnings(replace(asked, is_seeded=False), FACTS)
    assert not requests.warnings(replace(asked, max_tokens=0), FACTS)
    seeded = replace(FACTS, is_seeded=True)
    assert not requests.warnings(asked, seeded)
    assert len(requests.warnings(replace(asked, top_k=2, top_p=0.5), seeded)) == 1
