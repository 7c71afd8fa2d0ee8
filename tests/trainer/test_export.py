"""Merged exports: plain Hugging Face directories with the numbers of base and adapter."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from backend.checkpoints.store import CheckpointStore
from backend.cli import main
from backend.trainer import base_model, export
from backend.trainer.base import AdamParams, Adapter, FullConfig, LoraConfig, Trainer, Weights
from backend.trainer.torch_trainer import TorchTrainer
from tests.checkpoints.data import Clock, manifest
from tests.conformance.data import forward, random_sample, train
from tests.trainer.sessions import random_adapter
from together_post_training.errors import PostTrainingError, Reason

# float32 on weights that amplify rounding, added up in another order.
TOLERANCE = 1e-4
SAMPLE = random_sample(1, 128, 40)
LORA = LoraConfig(rank=3, alpha=5, seed=0)


def plain_logprobs(directory: Path) -> np.ndarray:
    """Of the model that transformers loads from a directory, and of nothing else."""
    # The option's return type is not in the signature.
    model, report = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.from_numpy(np.array(SAMPLE.tokens))[None]
    wanted = torch.from_numpy(np.array(SAMPLE.inputs["target_tokens"]))[:, None]
    with torch.no_grad():
        logprobs = model(tokens, use_cache=False).logits[0].log_softmax(-1)
    return logprobs.gather(1, wanted)[:, 0].numpy()


def adapted(trainer: Trainer, lora: LoraConfig = LORA) -> tuple[Weights, np.ndarray]:
    """Random weights and their logprobs here."""
    trainer.create_session("s", lora)
    adapter = random_adapter(trainer, "s")
    trainer.load("s", adapter, None)
    return adapter, forward(trainer, "s", [SAMPLE])[0]


def saved(store: Path, weights: Weights, base: str, location: str = "", **fields) -> str:
    """The path of a checkpoint with these weights."""
    checkpoints = CheckpointStore(store / "checkpoints", Clock())
    config = weights.lora if isinstance(weights, Adapter) else FullConfig()
    made = manifest(kind="inference", session="run", weights=config, base_model=base, **fields)
    checkpoints.save(made, weights, None, overwrite=False, base_location=location)
    return str(made.path)


@pytest.mark.parametrize(
    ("model_type", "tied"),
    [
        ("llama", False),
        ("llama", True),
        ("gpt2", True),
        ("phi3", False),
        ("gemma3_text", True),
        ("mixtral", False),
        ("qwen3_moe", True),
        ("qwen2_moe", False),
        ("olmoe", False),
    ],
)
def test_merged_model_gives_plain_transformers_the_trainers_logprobs(
    base_of, directory_of, tmp_path, model_type, tied
):
    adapter, expected = adapted(TorchTrainer(base_of(model_type, tied=tied)))
    base = directory_of(model_type, tied=tied)
    export.export_merged(adapter, tmp_path / "out", base=str(base))
    np.testing.assert_allclose(plain_logprobs(tmp_path / "out"), expected, atol=TOLERANCE)
    assert np.abs(plain_logprobs(base) - expected).max() > 100 * TOLERANCE
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    # With an adapter of its own, a head is the embedding no longer.
    assert config["tie_word_embeddings"] is False
    assert config["model_type"] == model_type
    assert config["dtype"] == "float32"


def test_head_without_an_adapter_stays_the_embedding(base_of, directory_of, tmp_path):
    lora = LoraConfig(rank=3, alpha=5, seed=0, train_unembed=False)
    adapter, expected = adapted(TorchTrainer(base_of("llama", tied=True)), lora)
    base = directory_of("llama", tied=True)
    export.export_merged(adapter, tmp_path / "out", base=str(base))
    np.testing.assert_allclose(plain_logprobs(tmp_path / "out"), expected, atol=TOLERANCE)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_half_precision_is_the_merged_weights_rounded_once(base_of, directory_of, tmp_path):
    adapter, _ = adapted(TorchTrainer(base_of("llama")))
    base = str(directory_of("llama"))
    for dtype in ("float32", "bfloat16"):
        export.export_merged(adapter, tmp_path / dtype, base=base, dtype=dtype)
    exact, rounded = (
        load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "bfloat16")
    )
    assert exact.keys() == rounded.keys()
    for name, tensor in exact.items():
        assert torch.equal(rounded[name], tensor.bfloat16())
    config = json.loads((tmp_path / "bfloat16" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


def test_adapter_of_another_model_is_refused_and_writes_nothing(base_of, directory_of, tmp_path):
    adapter, _ = adapted(TorchTrainer(base_of("phi3")))
    with pytest.raises(PostTrainingError, match="missing") as error:
        export.export_merged(adapter, tmp_path / "out", base=str(directory_of("llama")))
    assert error.value.reason is Reason.INCOMPATIBLE_CHECKPOINT
    assert list(tmp_path.iterdir()) == []


def test_what_fails_in_the_middle_leaves_nothing(base_of, directory_of, tmp_path, monkeypatch):
    adapter, _ = adapted(TorchTrainer(base_of("llama")))

    def fails(directory: Path, base: Path) -> list[str]:
        (directory / "half").touch()
        raise RuntimeError("interrupted")

    monkeypatch.setattr(export.model_files, "write_companions", fails)
    with pytest.raises(RuntimeError):
        export.export_merged(adapter, tmp_path / "out", base=str(directory_of("llama")))
    assert list(tmp_path.iterdir()) == []


# The command


def run_export(*arguments: object) -> int:
    return main(["export", *(str(a) for a in arguments)])


def test_command_exports_a_model_with_its_tokenizer(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trainer = TorchTrainer(base_model.load("builtin:tiny"))
    adapter, expected = adapted(trainer)
    store, out = tmp_path / "store", tmp_path / "parent" / "out"
    path = saved(store, adapter, "builtin:tiny")
    assert run_export(path, out, "--store", store) == 0
    assert capsys.readouterr().out.strip() == str(out)
    np.testing.assert_allclose(plain_logprobs(out), expected, atol=TOLERANCE)
    tokenizer = AutoTokenizer.from_pretrained(out)
    original = AutoTokenizer.from_pretrained(base_model.find("builtin:tiny"))
    messages = [{"role": "user", "content": "hé"}]
    assert tokenizer.apply_chat_template(messages) == original.apply_chat_template(messages)
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    assert out.stat().st_mode & 0o777 == 0o755


def test_command_exports_an_adapter_that_peft_loads(base_of, directory_of, tmp_path):
    adapter, expected = adapted(TorchTrainer(base_of("llama")))
    location = str(directory_of("llama"))
    path = saved(tmp_path / "store", adapter, "mine", location)
    assert run_export(path, tmp_path / "out", "--adapter", "--store", tmp_path / "store") == 0
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.from_numpy(np.array(SAMPLE.tokens))[None]
    wanted = torch.from_numpy(np.array(SAMPLE.inputs["target_tokens"]))[:, None]
    with torch.no_grad():
        logprobs = model(input_ids=tokens).logits[0].log_softmax(-1).gather(1, wanted)[:, 0]
    np.testing.assert_allclose(logprobs.numpy(), expected, atol=TOLERANCE)


def test_command_exports_full_weights(base_of, directory_of, tmp_path):
    trainer = TorchTrainer(base_of("llama", tied=True))
    trainer.create_session("s", FullConfig())
    train(trainer, "s", [SAMPLE], adam=AdamParams(learning_rate=0.01))
    location = directory_of("llama", tied=True)
    path = saved(tmp_path / "store", trainer.weights("s"), "mine", str(location))
    options = ("--store", tmp_path / "store", "--model", f"mine={location}")
    assert run_export(path, tmp_path / "out", *options) == 0
    expected = forward(trainer, "s", [SAMPLE])[0]
    np.testing.assert_allclose(plain_logprobs(tmp_path / "out"), expected, atol=TOLERANCE)
    assert run_export(path, tmp_path / "adapter", "--adapter", *options[:2]) == 1


def test_command_refuses_what_it_would_overwrite(base_of, directory_of, tmp_path, capsys):
    adapter, _ = adapted(TorchTrainer(base_of("llama")))
    store = tmp_path / "store"
    path = saved(store, adapter, str(directory_of("llama")))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    for how in ("--merged", "--adapter"):
        assert run_export(path, tmp_path / "out", how, "--store", store) == 1
        assert "not an empty directory" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]
    (tmp_path / "out" / "mine").unlink()
    assert run_export(path, tmp_path / "out", "--store", store) == 0
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "out").iterdir()} == {0o644}


def test_command_says_what_is_missing(base_of, tmp_path, capsys):
    adapter, _ = adapted(TorchTrainer(base_of("llama")))
    path = saved(tmp_path / "store", adapter, "mine")
    options = ("--store", tmp_path / "store")
    for arguments, named in (
        (("tinker://run/sampler_weights/other", *options), "Unknown checkpoint"),
        ((path, "--store", tmp_path / "nowhere"), "no store"),
        ((path, *options), "'mine' was not found"),
        ((path, *options, "--model", "yours=/there"), "Say --model mine=PATH"),
        (("not a path", *options), "Invalid checkpoint path"),
        ((path, *options, "--adapter", "--dtype", "float16"), "--dtype says nothing"),
    ):
        assert run_export(arguments[0], tmp_path / "out", *arguments[1:]) == 1
        assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "nowhere").exists()
