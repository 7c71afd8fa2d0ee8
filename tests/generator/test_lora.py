"""Adapters at inference: copied once, each row through its own, and refused where they do not fit."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from backend.generator.adapter_stack import Stacks
from backend.generator.lora import OneByOne, Products, RoutedLinear, Routes, Span, snapshot_weights
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


def routes_of(spans: Sequence[Span], *, is_stacked: bool) -> Routes:
    routes = Routes(Products())
    if is_stacked:
        routes.adapters = Stacks(torch.device("cpu")).adapters(spans, routes.products)
    else:
        routes.adapters = OneByOne(spans=spans, products=routes.products)
    assert isinstance(routes.adapters, OneByOne) != is_stacked
    return routes


def snapshots(*adapted: tuple[str, ...], ranks: Sequence[int]) -> tuple[list[Adapter], list]:
    """Adapters of these layers, and their weights."""
    adapters = [
        adapter(*paths, seed=i, rank=rank)
        for i, (paths, rank) in enumerate(zip(adapted, ranks, strict=True))
    ]
    weights = [
        snapshot_weights(one, layers(*paths)) for one, paths in zip(adapters, adapted, strict=True)
    ]
    return adapters, weights


def assert_each_goes_through_its_own(
    routes: Routes, spans: Sequence[Span], adapters: Sequence[Adapter], num_rows: int
) -> None:
    x = torch.randn(1, num_rows, IN, generator=torch.Generator().manual_seed(0))
    for path, layer in LAYERS.items():
        got = RoutedLinear(layer, path, routes)(x)
        expected = layer(x).detach().clone()
        for span, one in zip(spans, adapters, strict=True):
            a, b = (one.tensors.get(name) for name in tensor_names(path))
            if a is not None and b is not None:
                delta = one.lora.scale * torch.from_numpy(b @ a)
                expected[:, span.start : span.stop] += x[:, span.start : span.stop] @ delta.T
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


# (start, stop) of each adapter's rows, of how many.
SPANS = {
    "one": ([(2, 5)], 9),
    "alike": ([(0, 2), (2, 4), (4, 6)], 6),
    "alike, others around": ([(1, 3), (3, 5)], 8),
    "alike, others between": ([(0, 2), (3, 5)], 5),
    "different": ([(0, 3), (3, 4), (4, 8)], 8),
    "different, others between": ([(1, 3), (4, 5), (9, 11)], 20),
}


@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("name", SPANS)
def test_each_span_goes_through_its_own_adapter(name, is_stacked):
    """Adapters of different ranks, and a layer that one of them lacks."""
    places, num_rows = SPANS[name]
    if is_stacked and len(places) == 1:
        pytest.skip("there is nothing to stack")
    adapted = [tuple(LAYERS), ("lm_head",), tuple(LAYERS)][: len(places)]
    adapters, weights = snapshots(*adapted, ranks=[2, 3, 1][: len(places)])
    spans = [Span(*place, own) for place, own in zip(places, weights, strict=True)]
    routes = routes_of(spans, is_stacked=is_stacked)
    assert_each_goes_through_its_own(routes, spans, adapters, num_rows)


def test_layer_that_no_snapshot_adapts_is_the_base_models():
    _, weights = snapshots(("lm_head",), ("lm_head",), ranks=[2, 2])
    routes = routes_of([Span(i, i + 1, own) for i, own in enumerate(weights)], is_stacked=True)
    (path, layer), *_ = LAYERS.items()
    x = torch.randn(1, 2, IN, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(RoutedLinear(layer, path, routes)(x), layer(x), rtol=0, atol=1e-6)


def test_rows_of_no_snapshot_are_the_base_models_whatever_others_hold():
    """A row that is not finite stays its own sample's trouble."""
    _, weights = snapshots(tuple(LAYERS), tuple(LAYERS), ranks=[2, 2])
    for places in ([(0, 1), (2, 3)], [(0, 1), (2, 4)]):
        spans = [Span(*place, own) for place, own in zip(places, weights, strict=True)]
        routes = routes_of(spans, is_stacked=True)
        x = torch.randn(4, IN, generator=torch.Generator().manual_seed(0))
        x[0] = torch.nan
        y = RoutedLinear(LAYERS["lm_head"], "lm_head", routes)(x)
        assert y[0].isnan().all()
        assert y[1:].isfinite().all()
        torch.testing.assert_close(y[1], LAYERS["lm_head"](x[1]), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("lengths", "ranks"),
    [([4], [2]), ([65, 65], [2, 2]), ([1, 1, 1, 40], [2] * 4), ([3, 3, 3], [1, 1, 64])],
    ids=["one adapter", "long prompts", "lengths too different", "ranks too different"],
)
def test_adapters_are_computed_one_by_one_where_a_stack_does_not_pay(lengths, ranks):
    _, weights = snapshots(*[("lm_head",)] * len(ranks), ranks=ranks)
    stops = list(itertools.accumulate(lengths))
    spans = [
        Span(stop - length, stop, own)
        for stop, length, own in zip(stops, lengths, weights, strict=True)
    ]
    assert isinstance(Stacks(torch.device("cpu")).adapters(spans, Products()), OneByOne)


def test_stack_is_kept_from_step_to_step_and_goes_with_its_snapshots():
    stacks = Stacks(torch.device("cpu"))
    _, weights = snapshots(("lm_head",), ("lm_head",), ranks=[2, 2])

    def stacked(*lengths: int) -> torch.Tensor:
        first, second = lengths
        spans = [Span(0, first, weights[0]), Span(first, first + second, weights[1])]
        adapters = stacks.adapters(spans, Products())
        adapters.add("lm_head", torch.zeros(first + second, OUT), torch.ones(first + second, IN))
        pair = adapters.stack.pair("lm_head")  # pyright: ignore[reportAttributeAccessIssue]
        return pair[0]

    kept = stacked(1, 1)
    assert stacked(2, 1) is kept
    is_there = weakref.ref(kept)
    del kept
    gc.collect()
    assert is_there() is not None
    weights.pop()
    gc.collect()
    assert is_there() is None


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
