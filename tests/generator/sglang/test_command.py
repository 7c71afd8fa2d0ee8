"""How servers of our own are started, and what the command line makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backend import cli
from backend.generator.sglang.command import (
    Served,
    command,
    environment,
    gpu_of,
    gpus_each,
    memory_fraction,
    split_arguments,
)
from backend.generator.sglang.options import SglangOptions, parse_generator

SERVED = Served(
    directory=Path("/models/tiny"),
    window=1024,
    max_lora_rank=256,
    has_tokenizer=True,
    has_experts=False,
    dtype="bfloat16",
    gpu=1,
)
OPTIONS = SglangOptions(python="/env/bin/python")


def value(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_a_server_is_started_for_adapters_and_the_whole_window():
    arguments = command(SERVED, OPTIONS, 30000)
    assert arguments[:3] == ["/env/bin/python", "-m", "sglang.launch_server"]
    assert value(arguments, "--model-path") == "/models/tiny"
    assert value(arguments, "--max-lora-rank") == "256"
    assert value(arguments, "--lora-target-modules") == "all"
    assert value(arguments, "--context-length") == "1032"  # It keeps some for itself.
    assert value(arguments, "--base-gpu-id") == "1"
    assert "--enable-lora" in arguments
    assert "--mem-fraction-static" not in arguments
    assert "--skip-tokenizer-init" not in arguments


def test_what_the_user_gives_stands_alone():
    options = replace(OPTIONS, arguments=("--max-lora-rank=16", "--dtype", "float32"))
    arguments = command(SERVED, options, 30000)
    assert "256" not in arguments
    assert arguments[-3:] == ["--max-lora-rank=16", "--dtype", "float32"]
    assert arguments.count("--dtype") == 1


def test_a_server_beside_the_trainer_leaves_it_memory():
    arguments = command(replace(SERVED, memory_fraction=0.5), OPTIONS, 30000)
    assert value(arguments, "--mem-fraction-static") == "0.5"


def test_servers_of_models_with_experts_return_them_and_leave_them_without_adapters():
    arguments = command(replace(SERVED, has_experts=True, has_tokenizer=False), OPTIONS, 30000)
    first = arguments.index("--lora-target-modules") + 1
    assert arguments[first : first + 5] == ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]
    assert "--enable-return-routed-experts" in arguments
    assert "--skip-tokenizer-init" in arguments


def test_servers_on_a_cpu_read_one_prompt_at_a_time():
    arguments = command(replace(SERVED, gpu=None), OPTIONS, 30000)
    assert value(arguments, "--device") == "cpu"
    assert value(arguments, "--prefill-max-requests") == "1"
    assert "--base-gpu-id" not in arguments


def test_environments_are_ours_over_the_inherited_and_the_users_over_ours():
    options = replace(OPTIONS, env=(("HF_HUB_OFFLINE", "0"), ("MORE", "x")))
    found = environment(SERVED, options, {"PATH": "/bin", "OMP_WAIT_POLICY": "ACTIVE"})
    assert found["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "1"
    assert (found["PATH"], found["MORE"], found["HF_HUB_OFFLINE"]) == ("/bin", "x", "0")
    assert found["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "SGLANG_USE_CPU_ENGINE" not in found
    assert environment(replace(SERVED, gpu=None), options, {})["SGLANG_USE_CPU_ENGINE"] == "1"


@pytest.mark.parametrize(
    ("num_gpus", "each", "places"),
    [(1, 1, [0, 0, 0]), (2, 1, [1, 0, 1]), (8, 1, [7, 6, 5]), (8, 2, [6, 4, 2]), (1, 2, [0, 0, 0])],
)
def test_replicas_take_the_last_gpus_first(num_gpus, each, places):
    assert [gpu_of(replica, num_gpus, each) for replica in range(3)] == places


@pytest.mark.parametrize(
    ("places", "fractions"),
    [
        ([0], [0.5]),
        ([1], [None]),
        ([1, 0], [None, 0.5]),
        ([1, 1], [0.425] * 2),
        ([0, 0], [0.25] * 2),
    ],
)
def test_servers_share_the_memory_of_a_gpu_with_the_trainer_and_each_other(places, fractions):
    assert [memory_fraction(places, place, 0) for place in places] == fractions


def test_gpus_of_a_server_are_read_from_its_arguments():
    assert gpus_each(()) == 1
    assert gpus_each(split_arguments("--tp-size 4")) == 4
    assert gpus_each(split_arguments("--x 'a b' --tp=2")) == 2


# The command line


def options(*arguments: str):
    parsed = cli._parser().parse_args(["serve", "--model", "builtin:tiny", *arguments])
    cli._check(parsed)
    return cli._config(parsed).engines.sglang


def test_generators_are_chosen_on_the_command_line():
    assert options() is None
    assert options("--generator", "embedded") is None
    assert options("--generator", "sglang") == SglangOptions()
    found = options("--generator", "sglang:http://a:1/,https://b:2", "--sglang-dir", "/shared")
    assert found == SglangOptions(urls=("http://a:1", "https://b:2"), directory=Path("/shared"))
    found = options("--generator=sglang", "--sglang-python=/p", "--sglang-args=--tp 2 --x 'a b'")
    assert found == SglangOptions(python="/p", arguments=("--tp", "2", "--x", "a b"))


@pytest.mark.parametrize("text", ["vllm", "sglang:", "sglang:host:1", "sglang:http://a,b", ""])
def test_generators_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="expected embedded, sglang, or"):
        parse_generator(text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--sglang-args=--tp 2",), "without --generator sglang"),
        (("--sglang-dir=/x",), "without --generator sglang"),
        (("--generator=sglang:http://a:1", "--sglang-args=--tp 2"), "run already"),
    ],
)
def test_options_that_would_say_nothing_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        options(*arguments)
