"""What the engine must equal: plain transformers in float64, a sequence at a time, without a cache, adapters merged."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Coroutine, Sequence

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from backend.generator.base import SampleCall, SampledSequence, SampleResult
from backend.generator.embedded import EmbeddedGenerator
from backend.generator.sampling import TokenStream
from backend.trainer import targets
from backend.trainer.base import Adapter, LoraConfig
from backend.trainer.base_model import BaseModel
from backend.trainer.targets import Layer

Array = np.ndarray

# The engine's float32 on weights that are large on purpose: up to 5e-5 off, on 16 models by 1,300 tokens. (Plain
# transformers in float32 is up to 1.3e-4 off.)
TOLERANCE = 1e-4

_names = itertools.count()


def random_adapter(base: BaseModel, *, seed: int, rank: int = 4, size: float = 0.15) -> Adapter:
    """On every layer that takes one, A and B both random."""
    rng = np.random.default_rng(seed)
    lora = LoraConfig(rank=rank, alpha=2.0 * rank, seed=seed)
    chosen = targets.select(targets.layers_of(base.module), base.module.config.model_type, lora)
    tensors = {
        name: rng.normal(scale=size, size=shape).astype(np.float32)
        for name, shape in targets.tensor_shapes(chosen, rank).items()
    }
    return Adapter(lora=lora, tensors=tensors, targets=targets.peft_targets(chosen))


def publish(generator: EmbeddedGenerator, adapter: Adapter) -> str:
    snapshot = f"snapshot-{next(_names)}"
    finished(generator.add_snapshot(snapshot, adapter))
    return snapshot


def finished(work: Coroutine[None, None, None]) -> None:
    """Runs what never waits, also where a loop is running already."""
    with pytest.raises(StopIteration):
        work.send(None)


def merged(base: BaseModel, adapter: Adapter | None) -> PreTrainedModel:
    """A copy of the base model with W + scale B A in place of W, in float64 but for what transformers itself computes
    in float32 (norms, rotary angles)."""
    module = copy.deepcopy(base.module).double()
    # Transformers' faster experts know no float64.
    module.set_experts_implementation("eager")
    if adapter is None:
        return module
    for layer in targets.select(targets.layers_of(module), module.config.model_type, adapter.lora):
        name = layer.path if layer.num_experts else f"{layer.path}.weight"
        owner, _, attribute = name.rpartition(".")
        delta = torch.from_numpy(adapter.lora.scale * _product(adapter, layer))
        weight = getattr(module.get_submodule(owner), attribute)
        changed = weight + (delta.mT if layer.is_transposed else delta)
        setattr(module.get_submodule(owner), attribute, nn.Parameter(changed, requires_grad=False))
    return module


def _product(adapter: Adapter, layer: Layer) -> Array:
    """B A, float64: (out, in), or (E, out, in)."""
    a, b = (adapter.tensors[name].astype(np.float64) for name in layer.tensors)
    if not layer.num_experts:
        return b @ a
    of_a = a.reshape(layer.num_experts, adapter.lora.rank, layer.num_in)
    of_b = b.reshape(layer.num_out, adapter.lora.rank, layer.num_experts)
    return np.einsum("ore,eri->eoi", of_b, of_a)


@torch.no_grad()
def distributions(module: PreTrainedModel, tokens: Sequence[int] | Array) -> Array:
    """log p(. | tokens[:i+1]) at row i: float64 (T, V)."""
    logits = module(torch.tensor(np.asarray(tokens))[None], use_cache=False).logits[0]
    return logits.double().log_softmax(dim=1).numpy()


def score(module: PreTrainedModel, tokens: Sequence[int] | Array) -> Array:
    """log p of each token given those before it, NaN at 0: float64 (T,)."""
    rows = distributions(module, tokens)
    following = np.asarray(tokens)[1:]
    return np.concatenate([[np.nan], rows[np.arange(len(following)), following]])


def assert_logprobs_are_of(
    module: PreTrainedModel, call: SampleCall, sequence: SampledSequence
) -> None:
    """The sequence's logprobs are the module's own for its tokens."""
    assert len(sequence.tokens) == len(sequence.logprobs)
    whole = [*call.prompt.tolist(), *sequence.tokens.tolist()]
    expected = score(module, whole)[len(call.prompt) :]
    np.testing.assert_allclose(sequence.logprobs, expected, rtol=0, atol=TOLERANCE)


def assert_same_answer(
    module: PreTrainedModel, call: SampleCall, got: SampleResult, wanted: SampleResult
) -> None:
    """The same tokens, but where the sample's number falls within rounding of the boundary between two of them.

    Batches of different sizes add up in different orders; then one draw in some 100,000 may go either way.
    """
    assert len(got.sequences) == len(wanted.sequences)
    for i, (one, other) in enumerate(zip(got.sequences, wanted.sequences, strict=True)):
        differ = np.flatnonzero(one.tokens[: len(other.tokens)] != other.tokens[: len(one.tokens)])
        num_same = int(differ[0]) if len(differ) else len(other.tokens)
        np.testing.assert_allclose(
            one.logprobs[:num_same], other.logprobs[:num_same], rtol=0, atol=TOLERANCE
        )
        if len(differ):
            prefix = [*call.prompt.tolist(), *one.tokens[:num_same].tolist()]
            masses = np.exp(distributions(module, prefix)[-1])
            low, high = sorted((int(one.tokens[num_same]), int(other.tokens[num_same])))
            number = TokenStream(call.seed + i).uniform(num_same)
            between = masses[: low + 1].sum(), masses[:high].sum()
            np.testing.assert_allclose(between, number, rtol=0, atol=TOLERANCE)
        else:
            assert len(one.tokens) == len(other.tokens)
            assert one.stop_reason == other.stop_reason
