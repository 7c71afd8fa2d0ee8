"""Base models in bfloat16: the numbers of the rounded weights, and float32 log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from backend.trainer import base_model
from backend.trainer.base import FullConfig, LoraConfig, Pass
from backend.trainer.base_model import BaseModel
from backend.trainer.families import FAMILIES
from backend.trainer.storage import StoredLinear, back_product, product
from backend.trainer.torch_trainer import TorchTrainer
from tests.conformance.data import forward, random_sample
from tests.trainer.sessions import joined, random_adapter, relative_error, take_gradient
from together_post_training.errors import PostTrainingError, Reason

LORA = LoraConfig(rank=4, alpha=8, seed=0)
# The head of a random model times this: logits of about 20.
SHARPER = 2.0


@pytest.fixture(scope="module")
def sharp(directory_of, tmp_path_factory) -> Callable[[str], Path]:
    """A random model with logits of about 20, saved in bfloat16."""

    @cache
    def make(model_type: str) -> Path:
        directory = tmp_path_factory.mktemp("sharp") / model_type
        module = AutoModelForCausalLM.from_pretrained(directory_of(model_type))
        with torch.no_grad():
            module.get_parameter("lm_head.weight").mul_(SHARPER)
        module.bfloat16().save_pretrained(directory)
        return directory

    return make


def oracle(directory: Path, samples) -> list[np.ndarray]:
    """Plain transformers in float32 on the same rounded weights."""
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).float()
    results = []
    for sample in samples:
        tokens = torch.from_numpy(np.array(sample.tokens))[None]
        with torch.no_grad():
            logits = module(tokens, use_cache=False).logits[0]
        assert 15 < float(logits.abs().max()) < 50
        targets = torch.from_numpy(np.array(sample.inputs["target_tokens"]))
        results.append(logits.log_softmax(1).gather(1, targets[:, None])[:, 0].numpy())
    return results


def load(directory: Path, **options) -> BaseModel:
    return base_model.load("half", str(directory), dtype="bfloat16", **options)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "qwen3_moe", "gpt2"])
def test_forward_is_that_of_float32_on_the_same_rounded_weights(sharp, model_type):
    """200 tokens, logits of about 20. A log-softmax in bfloat16 would be off by 0.06; what is allowed is a mean of
    0.005 and at most 0.05. On a CPU everything is computed in float32, so that 1e-4 is enough."""
    samples = [random_sample(i, 128, 50) for i in range(4)]
    trainer = TorchTrainer(load(sharp(model_type)))
    trainer.create_session("s", LORA)
    gaps = np.concatenate(forward(trainer, "s", samples))
    gaps -= np.concatenate(oracle(sharp(model_type), samples))
    assert np.abs(gaps).max() < 1e-4


def test_head_is_float32_where_hidden_states_are_bfloat16(sharp):
    """As on a GPU: hidden states carry bfloat16's error (measured here: mean 0.05), but the log-probabilities of the
    whole vocabulary add up to 1 to float32's precision, which those of a bfloat16 log-softmax do not."""
    trainer = TorchTrainer(load(sharp("qwen3"), compute="bfloat16"))
    trainer.create_session("s", LORA)
    (plain,) = samples = [random_sample(1, 128, 40)]
    every = np.broadcast_to(np.arange(128), (40, 128))
    whole = type(plain)(tokens=plain.tokens, inputs={"target_tokens": every})
    (logprobs,) = trainer.run(Pass(session="s", samples=[whole])).logprobs
    np.testing.assert_allclose(np.exp(logprobs.astype(np.float64)).sum(1), 1, atol=2e-6)
    gaps = np.abs(forward(trainer, "s", samples)[0] - oracle(sharp("qwen3"), samples)[0])
    assert gaps.mean() < 0.15


@pytest.mark.parametrize(("compute", "tolerance"), [("auto", 1e-5), ("bfloat16", 0.1)])
def test_gradients_are_float32_and_those_of_the_rounded_model(sharp, tmp_path, compute, tolerance):
    """Against a float32 base with the same rounded weights; relative, all tensors together. bfloat16 keeps 8 bits."""
    directory = sharp("qwen3")
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).float()
    module.save_pretrained(tmp_path)
    wide = TorchTrainer(base_model.load("wide", str(tmp_path), dtype="float32"))
    half = TorchTrainer(load(directory, compute=compute))
    samples = [random_sample(i, 128, n) for i, n in enumerate((9, 30, 30))]
    gradients = []
    for trainer in (wide, half):
        trainer.create_session("s", LORA)
        trainer.load("s", random_adapter(trainer, "s", size=0.1), None)
        trainer.run(Pass(session="s", samples=samples, backward=True))
        gradients.append(take_gradient(trainer, "s"))
    assert all(g.dtype == np.float32 for g in gradients[1].values())
    assert relative_error(gradients[1], gradients[0]) < tolerance


@pytest.mark.parametrize("compute", ["auto", "bfloat16"])
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_family_trains_in_bfloat16(directory_of, model_type, compute):
    """Its own check against transformers passes, and an adapter gets a gradient everywhere."""
    trainer = TorchTrainer(load(directory_of(model_type), compute=compute))
    trainer.create_session("s", LORA)
    trainer.load("s", random_adapter(trainer, "s"), None)
    trainer.run(Pass(session="s", samples=[random_sample(0, 128, 40)], backward=True))
    assert all(np.abs(g).max() > 0 for g in take_gradient(trainer, "s").values())


def test_recomputing_changes_nothing_in_bfloat16(directory_of):
    base = load(directory_of("llama"), compute="bfloat16")
    results = []
    for activation_bytes in (2**30, 1):
        trainer = TorchTrainer(base, token_budget=64, activation_bytes=activation_bytes)
        trainer.create_session("s", LORA)
        trainer.load("s", random_adapter(trainer, "s"), None)
        trainer.run(Pass(session="s", samples=[random_sample(0, 128, 40)], backward=True))
        gradient = take_gradient(trainer, "s")
        results.append(joined(gradient, sorted(gradient)))
    assert np.array_equal(*results)


def test_full_weights_of_a_bfloat16_base_are_float32(directory_of):
    base = load(directory_of("llama"))
    trainer = TorchTrainer(base)
    trainer.create_session("s", FullConfig())
    tensors = trainer.weights("s").tensors
    assert all(t.dtype == np.float32 for t in tensors.values())
    got = forward(trainer, "s", [random_sample(0, 128, 40)])[0]
    trainer.create_session("adapter", LORA)
    wanted = forward(trainer, "adapter", [random_sample(0, 128, 40)])[0]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)


# How weights are kept


def test_matrices_are_kept_in_half_the_memory_and_the_rest_in_float32(directory_of):
    module = load(directory_of("qwen3")).module
    for name, parameter in module.named_parameters():
        is_matrix = name.endswith("_proj.weight") or name.startswith(("lm_head", "model.embed"))
        assert parameter.dtype == (torch.bfloat16 if is_matrix else torch.float32), name


def test_embeddings_that_scale_what_they_give_stay_float32(directory_of):
    """Gemma's: its factor, rounded to bfloat16, would no longer be that of the float32 model."""
    module = load(directory_of("gemma3_text")).module
    assert module.get_input_embeddings().weight.dtype == torch.float32


@pytest.mark.parametrize("num_rows", [1, 3, 200])
@pytest.mark.parametrize("shape", [(5, 7), (3000, 700)])
def test_products_with_stored_weights_are_exact(num_rows, shape):
    """Blocks of weights and all at once; to the rounding of sums of up to 3,000 numbers."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).bfloat16()
    x = torch.randn(num_rows, shape[1], generator=generator)
    grad = torch.randn(num_rows, shape[0], generator=generator)
    wide = weight.double()
    torch.testing.assert_close(product(x, weight).double(), x.double() @ wide.T, rtol=0, atol=1e-3)
    torch.testing.assert_close(
        back_product(grad, weight).double(), grad.double() @ wide, rtol=0, atol=1e-3
    )


def test_stored_linear_layers_pass_gradients_through():
    layer = torch.nn.Linear(6, 4).bfloat16()
    layer.bias.data = layer.bias.data.float()
    wanted_layer = torch.nn.Linear(6, 4)
    wanted_layer.load_state_dict(layer.state_dict())
    layer.__class__ = StoredLinear
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [each(i) for each, i in zip((layer, wanted_layer), inputs, strict=True)]
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)


# Where, and in what


def test_cpu_computes_in_float32_unless_told_otherwise(directory_of):
    assert base_model.load("m", str(directory_of("llama"))).dtype == torch.float32
    assert load(directory_of("llama")).dtype == torch.float32
    assert load(directory_of("llama"), compute="bfloat16").dtype == torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there_is_refused_with_what_to_do(directory_of):
    with pytest.raises(PostTrainingError, match="--device cpu") as error:
        base_model.load("m", str(directory_of("llama")), device="cuda")
    assert error.value.reason is Reason.INVALID_ARGUMENT
