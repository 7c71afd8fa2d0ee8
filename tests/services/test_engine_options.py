"""How `serve` is told what engines compute in, where, and in how much memory."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch

from backend import cli
from backend.generator.embedded import EmbeddedGenerator
from backend.generator.kv_cache import bytes_per_token
from backend.generator.replicas import Replicas
from backend.resources.engines import DEFAULT_OPTIONS, EngineOptions, open_engines
from backend.trainer.torch_trainer import TorchTrainer
from tests.services.harness import serving
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.v1 import model_resources_pb2


def options(*arguments: str) -> EngineOptions:
    parsed = cli._parser().parse_args(["serve", "--model", "builtin:tiny", *arguments])
    return cli._config(parsed).engines


def test_options_are_chosen_by_the_machine_unless_given():
    assert options() == DEFAULT_OPTIONS
    given = options(
        *("--dtype", "bfloat16", "--device", "cpu"),
        *("--token-budget", "200", "--activation-memory", "0.5"),
        *("--generator-replicas", "3", "--batch-invariant"),
        *("--kv-cache-memory", "0.25", "--max-running", "9", "--max-prefill-tokens", "64"),
    )
    assert given == EngineOptions(
        dtype="bfloat16",
        device="cpu",
        token_budget=200,
        activation_bytes=2**29,
        num_generator_replicas=3,
        batch_invariant=True,
        kv_cache_bytes=2**28,
        max_running=9,
        max_prefill_tokens=64,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--token-budget", "0", "a whole number above 0"),
        ("--token-budget", "many", "a whole number above 0"),
        ("--generator-replicas", "0", "a whole number above 0"),
        ("--max-sampling-calls", "0", "a whole number above 0"),
        ("--kv-cache-memory", "0", "a number above 0"),
        ("--max-running", "0", "a whole number above 0"),
        ("--max-prefill-tokens", "1.5", "a whole number above 0"),
        ("--activation-memory", "-1", "a number above 0"),
        ("--activation-memory", "inf", "a number above 0"),
        ("--gap-timeout", "nan", "a number above 0"),
        ("--grace", "-1", "a number of seconds, 0 or above"),
        ("--grace", "nan", "a number of seconds, 0 or above"),
        ("--port", "99999", "0 to 65535"),
    ],
)
def test_numbers_that_are_none_are_refused(arguments, capsys):
    *given, accepted = arguments
    with pytest.raises(SystemExit):
        options(*given)
    says = f"argument {given[0]}: {given[1]!r}: it must be {accepted}"
    assert says in capsys.readouterr().err


def test_engines_are_opened_as_the_options_say(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen = EngineOptions(dtype="bfloat16", device="cpu", token_budget=200, activation_bytes=2**25)
    with caplog.at_level(logging.INFO):
        engines = open_engines("tiny", "builtin:tiny", chosen)
    trainer = engines.trainer
    assert isinstance(trainer, TorchTrainer)
    assert trainer._base.module.get_input_embeddings().weight.dtype == torch.bfloat16
    assert "micro-batches of 200 tokens" in caplog.text
    assert "0.03 GiB for activations" in caplog.text


def test_the_generator_is_opened_as_the_options_say(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen = EngineOptions(kv_cache_bytes=2**28, max_running=9, max_prefill_tokens=64)
    generator = open_engines("tiny", "builtin:tiny", chosen).generator
    assert isinstance(generator, EmbeddedGenerator)
    batch = generator._engine._batch
    per_token = bytes_per_token(generator._full._base.module.config, torch.float32)
    assert batch._cache._max_tokens == 2**28 // per_token
    assert (batch._max_running, batch._max_prefill_tokens) == (9, 64)
    asyncio.run(generator.close())


def test_exact_bigram_says_that_it_has_no_use_for_them(caplog):
    open_engines("b", "builtin:bigram16", DEFAULT_OPTIONS)
    assert not caplog.records
    open_engines("b", "builtin:bigram16", EngineOptions(dtype="bfloat16"))
    assert "no use for the options" in caplog.text


def test_replicas_are_as_many_as_the_options_say(tmp_path, caplog):
    options_ = EngineOptions(num_generator_replicas=2)
    engines = open_engines("b", "builtin:bigram16", options_)
    assert isinstance(engines.generator, Replicas)
    assert not caplog.records
    with serving(tmp_path, engines=lambda name, path: engines) as running:
        request = model_resources_pb2.ListModelResourcesRequest()
        (shown,) = running.caller.resources.ListModelResources(request).model_resources
        assert shown.num_generator_replicas == 2
        running.caller.session().train([3, 4])
        assert running.caller.score(running.caller.open(base_model="builtin:bigram16"), [1, 2])[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(PostTrainingError, match="sees no GPU") as error:
        open_engines("tiny", "builtin:tiny", EngineOptions(device="cuda"))
    assert error.value.reason is Reason.INVALID_ARGUMENT
