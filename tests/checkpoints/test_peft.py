"""A checkpoint's directory is what plain PEFT loads: the same numbers, nothing missing, nothing to set by hand."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM

from backend.checkpoints import peft_files
from backend.checkpoints.store import CheckpointStore
from backend.trainer import base_model
from backend.trainer.base import AdamParams, Adapter, LoraConfig, Pass
from backend.trainer.torch_trainer import TorchTrainer
from tests import models
from tests.checkpoints.data import Clock, adapter, manifest
from together_post_training import samples

# Two implementations of the same float32 arithmetic.
TOLERANCE = 1e-4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("modules", ["all", "attention", "head"])
def test_checkpoint_gives_plain_peft_the_trainers_logprobs(
    tmp_path: Path, tied: bool, modules: str
):
    base = models.rand(tmp_path / "base", tied=tied)
    trainer = TorchTrainer(base_model.load("rand", str(base)))
    lora = LoraConfig(
        rank=4,
        alpha=12.0,
        seed=3,
        train_attn=modules != "head",
        train_mlp=modules == "all",
        train_unembed=modules != "attention",
    )
    trainer.create_session("s", lora)
    sample = samples.build(np.random.default_rng(0).integers(0, 128, 40))
    for _ in range(3):
        trainer.run(Pass(session="s", samples=[sample], backward=True))
        trainer.optim_step("s", AdamParams(learning_rate=0.02))
    (expected,) = trainer.run(Pass(session="s", samples=[sample])).logprobs
    store = CheckpointStore(tmp_path / "store", Clock())
    made = manifest(kind="inference", session="run", weights=lora, base_model=str(base))
    store.save(made, trainer.weights("s"), None, overwrite=False)

    model = _load_without_complaint(base, tmp_path / "store" / "run" / "sampler_weights" / "a")
    np.testing.assert_allclose(_logprobs(model, sample), expected, atol=TOLERANCE)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert np.abs(_logprobs(plain, sample) - expected).max() > 100 * TOLERANCE


def _load_without_complaint(base: Path, directory: Path) -> PeftModel:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing.*|.*unexpected.*")
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        return PeftModel.from_pretrained(plain, directory)


def _logprobs(model, sample: samples.Sample) -> np.ndarray:
    tokens = torch.from_numpy(np.array(sample.tokens))[None]
    targets = torch.from_numpy(np.array(sample.inputs["target_tokens"]))[:, None]
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0]
    return logits.log_softmax(-1).gather(1, targets)[:, 0].numpy()


def test_checkpoint_names_its_base_model_so_that_peft_finds_both(tmp_path: Path):
    base = models.rand(tmp_path / "base")
    trainer = TorchTrainer(base_model.load("rand", str(base)))
    lora = LoraConfig(rank=2, alpha=4.0, seed=3)
    trainer.create_session("s", lora)
    store = CheckpointStore(tmp_path / "store", Clock())
    made = manifest(session="run", weights=lora, base_model=str(base))
    store.save(made, trainer.weights("s"), trainer.optimizer_state("s"), overwrite=False)
    folder = tmp_path / "store" / "run" / "weights" / "a"
    model = AutoPeftModelForCausalLM.from_pretrained(str(folder))
    assert isinstance(model, PeftModel)


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        (
            "llama",
            {"train_mlp": False, "dropout": 0.25},
            {
                "target_modules": ["k_proj", "lm_head", "o_proj", "q_proj", "v_proj"],
                "lora_dropout": 0.25,
            },
        ),
        (
            "qwen3_moe",
            {"train_attn": False, "train_unembed": False},
            {
                "target_modules": [],
                "target_parameters": ["experts.down_proj", "experts.gate_up_proj"],
            },
        ),
        (
            "gpt2",
            {"target_modules": ("h.0.mlp.c_fc", "c_attn")},
            {"target_modules": ["c_attn", "transformer.h.0.mlp.c_fc"], "fan_in_fan_out": True},
        ),
    ],
)
def test_config_says_what_is_trained(tmp_path: Path, model_type, settings, expected):
    trainer = TorchTrainer(base_model.load("m", str(models.rand(tmp_path / "m", model_type))))
    trainer.create_session("s", LoraConfig(rank=2, alpha=4.0, seed=0, **settings))
    weights = trainer.weights("s")
    assert isinstance(weights, Adapter)
    config = json.loads(peft_files.peft_config(weights, "base"))
    usual = {"target_parameters": None, "lora_dropout": 0.0, "fan_in_fan_out": False}
    assert {**usual, **expected}.items() <= config.items()


def test_config_of_unnamed_targets_lists_paths():
    config = json.loads(peft_files.peft_config(adapter(), "base"))
    assert config["target_modules"] == ["model.layers.0.mlp.up_proj", "lm_head"]
