"""Which layers an adapter trains: by flags, by words, by names, as PEFT chooses them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import peft
import pytest
from peft.tuners.tuners_utils import BaseTuner
from transformers import AutoModelForCausalLM

from backend.trainer import targets
from backend.trainer.base import LoraConfig
from backend.trainer.families import FAMILIES
from backend.trainer.torch_trainer import TorchTrainer
from tests.conformance.data import forward, random_sample, run
from tests.trainer import oracle
from tests.trainer.sessions import random_adapter, relative_error, take_gradient
from together_post_training.errors import PostTrainingError, Reason

LORA = LoraConfig(rank=2, alpha=4, seed=0)
ATTN = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
EXPERTS = {"experts.gate_up_proj", "experts.down_proj"}
DENSE = sorted(name for name, family in FAMILIES.items() if not family.experts)


def chosen(base, **settings) -> list[targets.Layer]:
    lora = replace(LORA, **settings)
    module = base.module
    return targets.select(targets.layers_of(module), module.config.model_type, lora)


def names(base, **settings) -> set[str]:
    """By which PEFT is told of them."""
    found = targets.peft_targets(chosen(base, **settings))
    return {*found.modules, *found.parameters}


def refusal(base, **settings) -> str:
    with pytest.raises(PostTrainingError) as error:
        chosen(base, **settings)
    assert error.value.reason is Reason.INVALID_ARGUMENT
    return error.value.message


# Flags and words


@pytest.mark.parametrize(
    ("model_type", "attn", "mlp"),
    [
        ("llama", ATTN, MLP),
        ("phi3", {"qkv_proj", "o_proj"}, {"gate_up_proj", "down_proj"}),
        ("phi", {"q_proj", "k_proj", "v_proj", "dense"}, {"fc1", "fc2"}),
        ("mixtral", ATTN, EXPERTS),
        ("qwen3_moe", ATTN, EXPERTS),
    ],
)
def test_each_flag_trains_its_layers_alone(base_of, model_type, attn, mlp):
    base = base_of(model_type)
    only = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    assert names(base, **only | {"train_attn": True}) == attn
    assert names(base, **only | {"train_mlp": True}) == mlp
    assert names(base, **only | {"train_unembed": True}) == {"lm_head"}
    assert names(base) == {*attn, *mlp, "lm_head"}


def test_flags_tell_layers_of_one_name_apart(base_of):
    """GPT-2 calls the output of attention and of the MLP c_proj: their paths are given in full."""
    attn = names(base_of("gpt2"), train_mlp=False, train_unembed=False)
    assert attn == {"c_attn", "transformer.h.0.attn.c_proj", "transformer.h.1.attn.c_proj"}


def test_layers_beside_experts_are_part_of_the_mlp(base_of):
    """A shared expert, and the MLP of a layer that has no experts."""
    found = names(base_of("qwen2_moe"), train_attn=False, train_unembed=False)
    # PEFT takes their last names for experts; by the path of the weight it finds them.
    beside = {f"model.layers.1.mlp.shared_expert.{name}.weight" for name in MLP}
    dense = {f"model.layers.0.mlp.{name}.weight" for name in MLP}
    assert found == EXPERTS | beside | dense


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [("llama", ATTN | MLP), ("mixtral", ATTN), ("qwen3_moe", ATTN), ("qwen2_moe", ATTN)],
)
def test_default_is_the_familys_and_the_head_where_it_is_trained(base_of, model_type, expected):
    base = base_of(model_type)
    assert names(base, target_modules=("default",)) == expected | {"lm_head"}
    assert names(base, target_modules=("default",), train_unembed=False) == expected
    # The other flags say nothing beside it.
    off = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    assert names(base, target_modules=("default",), **off) == expected


@pytest.mark.parametrize("model_type", DENSE)
def test_all_linear_is_what_peft_trains_for_it(base_of, directory_of, model_type):
    base = base_of(model_type)
    plain = AutoModelForCausalLM.from_pretrained(directory_of(model_type))
    config = peft.LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM")
    tuner = peft.get_peft_model(plain, config).base_model
    assert isinstance(tuner, BaseTuner)
    found = chosen(base, target_modules=("all-linear",), train_unembed=False)
    assert [layer.path for layer in found] == tuner.targeted_module_names
    with_head = chosen(base, target_modules=("all-linear",))
    assert [layer.path for layer in with_head] == [*tuner.targeted_module_names, "lm_head"]


def test_all_linear_has_the_experts_and_leaves_the_router(base_of):
    found = {x.path for x in chosen(base_of("qwen2_moe"), target_modules=("all-linear",))}
    assert "model.layers.1.mlp.experts.gate_up_proj" in found
    assert "model.layers.1.mlp.shared_expert_gate" in found
    assert not any(path.endswith(".gate") for path in found)


# Names


@pytest.mark.parametrize(
    "given",
    [
        ("q_proj",),
        ("self_attn.q_proj", "lm_head"),
        ("layers.1.mlp.up_proj", "v_proj"),
        ("model.layers.0.self_attn.k_proj",),
    ],
)
def test_names_choose_what_they_choose_in_peft(base_of, directory_of, given):
    plain = AutoModelForCausalLM.from_pretrained(directory_of("llama"))
    config = peft.LoraConfig(r=1, target_modules=list(given), task_type="CAUSAL_LM")
    tuner = peft.get_peft_model(plain, config).base_model
    assert isinstance(tuner, BaseTuner)
    found = chosen(base_of("llama"), target_modules=given, train_unembed=False)
    assert [layer.path for layer in found] == tuner.targeted_module_names


def test_name_of_no_layer_is_refused_with_those_there_are(base_of):
    message = refusal(base_of("llama"), target_modules=("q_proj", "proj"))
    assert "'proj'" in message
    assert "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj" in message
    assert "'all-linear'" in message
    message = refusal(base_of("qwen3_moe"), target_modules=("gate_proj",))
    assert "experts.down_proj, experts.gate_up_proj" in message


def test_router_norm_and_embedding_are_no_layers(base_of):
    base = base_of("qwen3_moe")
    for name in ("gate", "mlp.gate", "embed_tokens", "input_layernorm", "experts", ""):
        assert repr(name) in refusal(base, target_modules=(name,))


def test_words_among_names_are_names(base_of):
    assert "'default'" in refusal(base_of("llama"), target_modules=("default", "q_proj"))


@pytest.mark.parametrize("given", [("experts.down_proj",), ("model.layers.1.mlp.experts",), ()])
def test_dropout_of_experts_is_refused(base_of, given):
    if given == ("model.layers.1.mlp.experts",):
        given = ("model.layers.1.mlp.experts.gate_up_proj",)
    message = refusal(base_of("qwen3_moe"), target_modules=given, dropout=0.1)
    assert "0.1" in message
    assert "experts" in message
    assert chosen(base_of("qwen3_moe"), target_modules=("default",), dropout=0.1)


def test_readme_lists_the_architectures():
    text = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    (listed,) = re.findall(r"architectures \(`model_type`\) (.*?);", text)
    assert re.split(r", | and ", listed) == sorted(FAMILIES)


# What is chosen, trained and saved


@pytest.mark.parametrize(
    ("model_type", "given"),
    [
        ("llama", ("model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj")),
        ("qwen3_moe", ("model.layers.1.mlp.experts.gate_up_proj",)),
        ("qwen3_moe", ("layers.0.mlp.experts.down_proj", "experts.gate_up_proj", "q_proj")),
        ("mixtral", ("experts.down_proj",)),
        ("qwen2_moe", ("shared_expert.up_proj", "shared_expert_gate", "experts.down_proj")),
        ("gpt2", ("attn.c_proj", "c_fc")),
        ("phi3", ("layers.1.self_attn.qkv_proj",)),
    ],
)
def test_part_of_the_layers_trains_and_loads_like_plain_peft(
    base_of, directory_of, model_type, given
):
    """Logprobs within 5e-5, gradients within 2e-5: float32 on weights that amplify rounding, by up to 1.2e-5 here."""
    trainer = TorchTrainer(base_of(model_type))
    trainer.create_session("s", replace(LORA, target_modules=given))
    adapter = random_adapter(trainer, "s")
    trainer.load("s", adapter, None)
    plain = oracle.load(directory_of(model_type), adapter)
    samples = [random_sample(i, 128, n) for i, n in enumerate((12, 5, 5))]
    result = run(trainer, "s", samples, backward=True)
    for got, wanted in zip(result.logprobs, plain.logprobs(samples), strict=True):
        assert abs(got - wanted).max() < 5e-5
    _, gradient = plain.gradient(samples, "cross_entropy", {})
    assert relative_error(take_gradient(trainer, "s"), gradient) < 2e-5


def test_what_a_layer_starts_from_depends_on_nothing_else_that_is_trained(base_of):
    """Also where PEFT's name for an expert's tensors depends on it."""
    trainer = TorchTrainer(base_of("qwen3_moe"))
    path = "base_model.model.model.layers.0.mlp.experts"
    trainer.create_session("both", LORA)
    trainer.create_session("one", replace(LORA, target_modules=("experts.gate_up_proj",)))
    both, one = (trainer.weights(s).tensors for s in ("both", "one"))
    inner = both[f"{path}.base_layer.lora_A.weight"]
    assert (one[f"{path}.lora_A.weight"] == inner).all()
    assert inner.shape == (4 * 2, 32)


def test_sessions_of_different_targets_share_a_trainer(base_of):
    trainer = TorchTrainer(base_of("mixtral"))
    samples = [random_sample(1, 128, 20)]
    trainer.create_session("base", LORA)
    plain = forward(trainer, "base", samples)[0]
    for number, given in enumerate((("q_proj",), ("experts.down_proj",), ("lm_head",))):
        trainer.create_session(given[0], replace(LORA, target_modules=given))
        trainer.load(given[0], random_adapter(trainer, given[0], seed=number), None)
        assert abs(forward(trainer, given[0], samples)[0] - plain).max() > 0.05
    assert (forward(trainer, "base", samples)[0] == plain).all()
