"""Adapters at inference: copied once, each row through its own, and refused where they do not fit."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from backend.generator.lora import RoutedLinear, Routes, Span, snapshot_weights
from backend.trainer.base import Adapter, LoraConfig
from backend.trainer.targets import Layer, tensor_names
from together_post_training.errors import PostTrainingError, Reason

IN, OUT = 5, 7
LAYERS = {"layers.0.q_proj": nn.Linear(IN, OUT), "lm_head": nn.Linear(IN, OUT, bias=False)}


def layers(*paths: str) -> list[Layer]:
    return [
        Layer(path=path, num_in=IN, num_out=OUT, tensors=tensor_names(path), peft_name=path)
        for path in paths
    ]


def adapter(*paths: str, seed: int = 0, rank: int = 2, alpha: float = 3.0) -> Adapter:
    rng = np.random.default_rng(seed)
    tensors = {}
    for path in paths:
        a, b = tensor_names(path)
        tensors[a] = rng.normal(size=(rank, IN)).astype(np.float32)
        tensors[b] = rng.normal(size=(OUT, rank)).astype(np.float32)
    return Adapter(lora=LoraConfig(rank=rank, alpha=alpha, seed=0), tensors=tensors)


@pytest.mark.parametrize("num_rows", [4, 20])
def test_each_span_goes_through_its_own_adapter(num_rows):
    """Two adapters of different ranks, rows without any before, between and after, and a layer that one lacks."""
    routes = Routes()
    adapters = [adapter(*LAYERS), adapter("lm_head", seed=1, rank=3)]
    weights = [
        snapshot_weights(adapters[0], layers(*LAYERS)),
        snapshot_weights(adapters[1], layers("lm_head")),
    ]
    x = torch.randn(1, num_rows, IN, generator=torch.Generator().manual_seed(0))
    routes.spans = [Span(1, 2, weights[0]), Span(3, num_rows - 1, weights[1])]
    for path, layer in LAYERS.items():
        got = RoutedLinear(layer, path, routes)(x)
        expected = layer(x).detach().clone()
        for span, one in zip(routes.spans, adapters, strict=True):
            a, b = (one.tensors.get(name) for name in tensor_names(path))
            if a is not None and b is not None:
                delta = one.lora.scale * torch.from_numpy(b @ a)
                expected[:, span.start : span.stop] += x[:, span.start : span.stop] @ delta.T
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_weights_are_a_copy():
    one = adapter("lm_head", rank=1)
    weights = snapshot_weights(one, layers("lm_head"))
    before = [t.clone() for t in weights.pairs["lm_head"]]
    for array in one.tensors.values():
        array[:] = 0
    assert all(torch.equal(t, b) for t, b in zip(weights.pairs["lm_head"], before, strict=True))


def test_tensors_that_do_not_fit_are_named():
    fitting = adapter("lm_head")
    a, b = tensor_names("lm_head")
    elsewhere = tensor_names("layers.9.q_proj")[0]
    unfit = {
        f"missing: {b}": {a: fitting.tensors[a]},
        f"unexpected: {elsewhere}": {**fitting.tensors, elsewhere: fitting.tensors[a]},
        f"misshapen: {a} is [2, 4], must be [2, 5]": {
            **fitting.tensors,
            a: fitting.tensors[a][:, 1:],
        },
    }
    for message, tensors in unfit.items():
        with pytest.raises(PostTrainingError, match=re.escape(message)) as error:
            snapshot_weights(replace(fitting, tensors=tensors), layers("lm_head"))
        assert error.value.reason is Reason.INCOMPATIBLE_CHECKPOINT
