"""Adapters of plain PEFT become checkpoints with the same numbers, or are refused by name."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from backend.checkpoints.import_peft import read_adapter
from backend.checkpoints.store import CheckpointStore
from backend.checkpoints.tensor_file import TensorFile, find_base_tensor
from backend.cli import main
from backend.trainer import base_model
from backend.trainer.base import Adapter, LoraConfig
from backend.trainer.torch_trainer import TorchTrainer
from tests import models
from tests.checkpoints.data import Clock, manifest
from tests.conformance.data import forward, random_sample
from tests.trainer.sessions import random_adapter
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.names import parse_checkpoint_path

# Two implementations of the same float32 arithmetic, on weights that amplify rounding.
TOLERANCE = 1e-4
SAMPLE = random_sample(1, 128, 40)


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def get(model_type: str) -> Path:
        name, _, tied = model_type.partition("-")
        if model_type not in made:
            directory = tmp_path_factory.mktemp(model_type) / "base"
            made[model_type] = models.rand(directory, name, tied=bool(tied))
        return made[model_type]

    return get


def save(base: Path, directory: Path, *, dtype=torch.float32, **settings) -> PeftModel:
    """An adapter that PEFT made and saved, A and B both random."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(plain, _config(**settings))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                values = torch.randn(parameter.shape, generator=generator) * 0.2
                parameter.copy_(values.to(dtype).float())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(str(directory))
    if dtype != torch.float32:
        path = directory / "adapter_model.safetensors"
        tensors = {name: t.to(dtype) for name, t in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
    return model.eval()


def _config(**settings) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | settings)


def logprobs(model) -> np.ndarray:
    tokens = torch.from_numpy(np.array(SAMPLE.tokens))[None]
    wanted = torch.from_numpy(np.array(SAMPLE.inputs["target_tokens"]))[:, None]
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0]
    return logits.log_softmax(-1).gather(1, wanted)[:, 0].numpy()


def loaded(base: Path, adapter: Adapter) -> np.ndarray:
    """The trainer's logprobs under an adapter."""
    trainer = TorchTrainer(base_model.load("m", str(base)))
    trainer.create_session("s", adapter.lora)
    trainer.load("s", adapter, None)
    return forward(trainer, "s", [SAMPLE])[0]


def refusal(directory: Path, base: Path | None = None) -> str:
    with pytest.raises(PostTrainingError) as error:
        read_adapter(directory, base)
    assert error.value.reason is Reason.INCOMPATIBLE_CHECKPOINT
    return error.value.message


def edit(directory: Path, **settings) -> Path:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return directory


# What is taken over


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {"target_modules": ["q_proj", "v_proj"]}),
        ("llama", {"target_modules": "all-linear", "use_rslora": True}),
        ("llama", {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]}),
        ("llama", {"target_modules": r".*layers\.0\..*(k_proj|down_proj)"}),
        ("llama", {"target_modules": "all-linear", "exclude_modules": ["o_proj"]}),
        ("llama", {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"}),
        ("llama", {"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 4}}),
        ("llama", {"target_modules": ["q_proj", "lm_head"]}),
        ("llama-tied", {"target_modules": ["q_proj", "lm_head"]}),
        ("gpt2", {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}),
        ("phi3", {"target_modules": "all-linear"}),
        (
            "qwen3_moe",
            {
                "target_modules": ["q_proj"],
                "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
            },
        ),
        ("qwen3_moe", {"target_modules": [], "target_parameters": ["down_proj"]}),
        (
            "qwen2_moe",
            {
                "target_modules": ["shared_expert_gate"],
                "target_parameters": [
                    "model.layers.1.mlp.shared_expert.up_proj.weight",
                    "layers.1.mlp.experts.gate_up_proj",
                ],
            },
        ),
    ],
)
def test_adapter_of_peft_gives_the_same_logprobs_here(tmp_path, base_of, model_type, settings):
    base = base_of(model_type)
    model = save(base, tmp_path, **settings)
    adapter = read_adapter(tmp_path, base).adapter
    got = loaded(base, adapter)
    np.testing.assert_allclose(got, logprobs(model), rtol=0, atol=TOLERANCE)
    with model.disable_adapter():
        assert np.abs(got - logprobs(model)).max() > 100 * TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_the_same_numbers_in_float32(tmp_path, base_of, dtype):
    model = save(base_of("llama"), tmp_path, dtype=dtype, target_modules=["q_proj", "down_proj"])
    adapter = read_adapter(tmp_path).adapter
    assert all(t.dtype == np.float32 for t in adapter.tensors.values())
    got = loaded(base_of("llama"), adapter)
    np.testing.assert_allclose(got, logprobs(model), rtol=0, atol=TOLERANCE)


def test_settings_become_the_sessions(tmp_path, base_of):
    save(base_of("llama"), tmp_path, target_modules=["v_proj", "q_proj"], lora_dropout=0.25)
    lora = read_adapter(tmp_path).adapter.lora
    assert (lora.rank, lora.alpha, lora.dropout) == (4, 6.0, 0.25)
    assert lora.target_modules == ("q_proj", "v_proj")
    edit(tmp_path, use_rslora=True)
    assert read_adapter(tmp_path).adapter.lora.scale == pytest.approx(6 / math.sqrt(4))


def test_adapter_of_some_layers_names_their_paths(tmp_path, base_of):
    save(base_of("llama"), tmp_path, target_modules=["q_proj"], layers_to_transform=[1])
    lora = read_adapter(tmp_path).adapter.lora
    assert lora.target_modules == ("model.layers.1.self_attn.q_proj",)


@pytest.mark.parametrize("model_type", ["llama-tied", "gpt2", "mixtral", "qwen2_moe"])
def test_saved_here_loaded_and_saved_by_peft_comes_back_the_same(tmp_path, base_of, model_type):
    base = base_of(model_type)
    trainer = TorchTrainer(base_model.load("m", str(base)))
    trainer.create_session("s", LoraConfig(rank=3, alpha=5, seed=0))
    adapter = random_adapter(trainer, "s")
    trainer.load("s", adapter, None)
    store = CheckpointStore(tmp_path / "store", Clock())
    made = manifest(kind="inference", session="run", weights=adapter.lora, base_model=str(base))
    store.save(made, adapter, None, overwrite=False)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(plain, tmp_path / "store/run/sampler_weights/a")
        model.save_pretrained(tmp_path / "again")
    back = read_adapter(tmp_path / "again", base).adapter
    assert back.tensors.keys() == adapter.tensors.keys()
    for name, tensor in adapter.tensors.items():
        assert np.array_equal(back.tensors[name], tensor)
    got = loaded(base, back)
    np.testing.assert_array_equal(got, forward(trainer, "s", [SAMPLE])[0])


# What is refused


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS'"),
        ({"bias": "all"}, "bias='all'"),
        ({"use_dora": True}, "use_dora=True"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern={'q_proj': 8}"),
        ({"alpha_pattern": {"q_proj": 1}}, "alpha_pattern={'q_proj': 1}"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save=['embed_tokens']"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"loftq_config": {"loftq_bits": 4}}, "loftq_config"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"something_new": "on"}, "something_new='on'"),
        ({"r": 0}, "r=0"),
        ({"lora_alpha": 0}, "lora_alpha=0"),
        ({"r": 8}, "rank 8"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(tmp_path, base_of, settings, named):
    save(base_of("llama"), tmp_path, target_modules=["q_proj"])
    assert named in refusal(edit(tmp_path, **settings))


def test_new_settings_that_are_off_are_no_reason_to_refuse(tmp_path, base_of):
    save(base_of("llama"), tmp_path, target_modules=["q_proj"])
    read_adapter(edit(tmp_path, something_new=None, another={}, third=False))


def test_pickles_and_missing_files_are_refused(tmp_path, base_of):
    assert "adapter_config.json" in refusal(tmp_path)
    save(base_of("llama"), tmp_path, target_modules=["q_proj"])
    weights = tmp_path / "adapter_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-10])
    assert "not a whole safetensors file" in refusal(tmp_path)
    weights.rename(tmp_path / "adapter_model.bin")
    assert "pickle" in refusal(tmp_path)


def test_tensors_that_do_not_belong_are_refused_by_name(tmp_path, base_of):
    """LP-09: a key renamed, one left out, one of something else."""
    save(base_of("llama"), tmp_path, target_modules=["q_proj"])
    path = tmp_path / "adapter_model.safetensors"
    whole = load_file(path)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    without = {n: t for n, t in whole.items() if n != name}
    for tensors, named in (
        (without, name),
        ({**without, f"model.{name}": whole[name]}, f"model.{name}"),
        ({**whole, name.replace("lora_A.weight", "lora_magnitude_vector"): whole[name]}, "vector"),
        ({**whole, name.replace("lora_A.weight", "lora_embedding_A"): whole[name]}, "embedding_A"),
        ({}, "no tensors"),
    ):
        save_file({n: t.clone() for n, t in tensors.items()}, path, {"format": "pt"})
        assert named in refusal(tmp_path, base_of("llama"))


def test_layers_that_the_base_lacks_are_refused_when_loaded(tmp_path, base_of):
    save(base_of("llama"), tmp_path, target_modules=["q_proj"])
    adapter = read_adapter(tmp_path).adapter
    with pytest.raises(PostTrainingError, match="q_proj"):
        loaded(base_of("phi3"), adapter)
    wide = {n: np.pad(t, ((0, 0), (0, 1))) for n, t in adapter.tensors.items() if "_A" in n}
    with pytest.raises(PostTrainingError, match="misshapen") as error:
        loaded(base_of("llama"), replace(adapter, tensors={**adapter.tensors, **wide}))
    assert error.value.reason is Reason.INCOMPATIBLE_CHECKPOINT


@pytest.mark.parametrize("model_type", ["llama", "llama-tied"])
def test_trained_heads_and_embeddings_are_refused(tmp_path, base_of, model_type):
    """PEFT saves the head with an adapter of it: an unchanged one is left out, any other is not."""
    base = base_of(model_type)
    save(base, tmp_path, target_modules=["lm_head"])
    assert "lm_head.base_layer.weight" in refusal(tmp_path)
    assert len(read_adapter(tmp_path, base).adapter.tensors) == 2
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors["base_model.model.lm_head.base_layer.weight"][3, 4] += 0.1
    save_file(tensors, path, {"format": "pt"})
    assert "lm_head.base_layer.weight" in refusal(tmp_path, base)


# The command


def test_command_makes_a_checkpoint_that_sessions_load(tmp_path, base_of, capsys):
    base = base_of("llama")
    model = save(base, tmp_path / "my adapter!", target_modules=["q_proj", "lm_head"])
    arguments = ["--model", f"mine={base}", "--store", str(tmp_path / "store")]
    assert main(["import-adapter", str(tmp_path / "my adapter!"), *arguments]) == 0
    path = capsys.readouterr().out.strip()
    assert path == "tinker://imported/sampler_weights/my-adapter"
    store = CheckpointStore(tmp_path / "store" / "checkpoints", Clock())
    checkpoint = store.load(parse_checkpoint_path(path), optimizer=False)
    assert checkpoint.manifest.base_model == "mine"
    assert isinstance(checkpoint.weights, Adapter)
    assert checkpoint.weights.lora == checkpoint.manifest.weights
    got = loaded(base, checkpoint.weights)
    np.testing.assert_allclose(got, logprobs(model), rtol=0, atol=TOLERANCE)
    assert main(["import-adapter", str(tmp_path / "my adapter!"), *arguments]) == 1
    assert "already exists" in capsys.readouterr().err
    more = ["--session", "run:1", "--name", "b"]
    assert main(["import-adapter", str(tmp_path / "my adapter!"), *arguments, *more]) == 0
    assert capsys.readouterr().out.strip() == "tinker://run:1/sampler_weights/b"


@pytest.mark.parametrize("option", [["--name", "a/b"], ["--session", "a b"]])
def test_command_refuses_names_that_are_no_names(tmp_path, base_of, capsys, option):
    save(base_of("llama"), tmp_path / "adapter", target_modules=["q_proj"])
    arguments = ["--model", "absent", "--store", str(tmp_path / "store"), *option]
    assert main(["import-adapter", str(tmp_path / "adapter"), *arguments]) == 1
    assert option[1] in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


# Files


def test_tensor_files_are_read_as_torch_reads_them(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        str(dtype): torch.randn(3, 5, generator=generator).to(dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    }
    tensors["special"] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0]).bfloat16()
    tensors["empty"] = torch.zeros(0, 4)
    save_file({**tensors, "integers": torch.arange(3)}, tmp_path / "t.safetensors")
    file = TensorFile(tmp_path / "t.safetensors")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(file.read(name), tensor.float().numpy())
    with pytest.raises(ValueError, match="integers is I64"):
        file.read("integers")


def test_base_tensor_is_found_in_any_file_of_the_model(tmp_path):
    one, two = torch.randn(2, 3), torch.randn(2, 3)
    save_file({"wte.weight": one}, tmp_path / "model-1.safetensors")
    save_file({"h.0.weight": two}, tmp_path / "model-2.safetensors")
    for name, tensor in (
        ("transformer.h.0.weight", two),
        ("transformer.wte.weight", one),
        ("lm_head.weight", one),
    ):
        np.testing.assert_array_equal(find_base_tensor(tmp_path, name), tensor.numpy())
    assert find_base_tensor(tmp_path, "transformer.h.1.weight") is None
