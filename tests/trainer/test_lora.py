"""The layer against autograd, and sessions side by side in one row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backend.trainer.dropout import Dropout, SampleRows
from backend.trainer.lora import LoraLinear, LoraWeights, Routing, Segment, adapters_at

IN, OUT, TOKENS = 7, 5, 12


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def weights(rank: int, seed: int) -> LoraWeights:
    a, b = normal(rank, IN, seed=seed), normal(OUT, rank, seed=seed + 1)
    return LoraWeights(a=a, b=b, grad_a=torch.zeros_like(a), grad_b=torch.zeros_like(b), scale=0.5)


def segment(start: int, stop: int, lora: LoraWeights | None) -> Segment:
    by_path = {} if lora is None else {"layer": lora}
    return Segment(start=start, stop=stop, weights=by_path, anchor=torch.zeros(1).requires_grad_())


def layer_of(routing: Routing, *, bias: bool = True) -> LoraLinear:
    linear = nn.Linear(IN, OUT, bias=bias).double().requires_grad_(False)
    with torch.no_grad():
        linear.weight.copy_(normal(OUT, IN, seed=0))
        if bias:
            linear.bias.copy_(normal(OUT, seed=1))
    return LoraLinear(linear, "layer", routing)


def output_and_gradients(
    segments: list[Segment], x: Tensor, grad_y: Tensor
) -> tuple[Tensor, Tensor]:
    routing = Routing()
    layer = layer_of(routing)
    routing.segments = tuple(segments)
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad_y)
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("bias", [False, True])
def test_layer_equals_autograd(bias):
    routing = Routing()
    layer = layer_of(routing, bias=bias)
    lora = weights(3, seed=10)
    routing.segments = (segment(0, TOKENS, lora),)
    x, grad_y = normal(1, TOKENS, IN, seed=2).requires_grad_(), normal(1, TOKENS, OUT, seed=3)
    y = layer(x)
    y.backward(grad_y)
    x2, a, b = (t.detach().clone().requires_grad_() for t in (x, lora.a, lora.b))
    expected = F.linear(x2, layer.weight, layer.bias) + 0.5 * (x2 @ a.T) @ b.T
    expected.backward(grad_y)
    for got, wanted in (
        (y, expected),
        (x.grad, x2.grad),
        (lora.grad_a, a.grad),
        (lora.grad_b, b.grad),
    ):
        torch.testing.assert_close(got, wanted)


def test_mixed_sessions_get_what_each_gets_alone():
    """Ranks 3 and 2, the base between them, in one row."""
    x, grad_y = normal(1, TOKENS, IN, seed=2), normal(1, TOKENS, OUT, seed=3)
    first, second = weights(3, seed=10), weights(2, seed=20)
    mixed = [segment(0, 5, first), segment(5, 7, None), segment(7, TOKENS, second)]
    y, grad_x = output_and_gradients(mixed, x, grad_y)
    for start, stop, lora, rank, seed in ((0, 5, first, 3, 10), (7, TOKENS, second, 2, 20)):
        alone = weights(rank, seed=seed)
        rows = slice(start, stop)
        expected, expected_grad = output_and_gradients(
            [segment(0, stop - start, alone)], x[:, rows], grad_y[:, rows]
        )
        torch.testing.assert_close(y[:, rows], expected)
        torch.testing.assert_close(grad_x[:, rows], expected_grad)
        torch.testing.assert_close(lora.grad_a, alone.grad_a)
        torch.testing.assert_close(lora.grad_b, alone.grad_b)
    base, _ = output_and_gradients([segment(0, 2, None)], x[:, 5:7], grad_y[:, 5:7])
    torch.testing.assert_close(y[:, 5:7], base)


def test_gradients_add_to_what_the_buffers_hold():
    x, grad_y = normal(1, TOKENS, IN, seed=2), normal(1, TOKENS, OUT, seed=3)
    once, twice = weights(3, seed=10), weights(3, seed=10)
    output_and_gradients([segment(0, TOKENS, once)], x, grad_y)
    for _ in range(2):
        output_and_gradients([segment(0, TOKENS, twice)], x, grad_y)
    torch.testing.assert_close(twice.grad_a, 2 * once.grad_a)
    torch.testing.assert_close(twice.grad_b, 2 * once.grad_b)


def test_layer_without_an_adapter_is_the_base_layer_and_builds_no_graph():
    routing = Routing()
    layer = layer_of(routing)
    x = normal(1, TOKENS, IN, seed=2)
    for segments in ((), (segment(0, TOKENS, None),)):
        routing.segments = segments
        y = layer(x)
        assert torch.equal(y, F.linear(x, layer.weight, layer.bias))
        assert not y.requires_grad


def test_input_that_needs_no_gradient_gets_none():
    """The first layer's input comes from frozen embeddings: its gradient is not computed."""
    lora = weights(3, seed=10)
    routing = Routing()
    layer = layer_of(routing)
    routing.segments = (segment(0, TOKENS, lora),)
    x = normal(1, TOKENS, IN, seed=2)
    layer(x).sum().backward()
    assert x.grad is None
    assert lora.grad_b.abs().sum() > 0


def test_dropout_equals_autograd_with_the_same_mask():
    """Two sessions, one of which drops; their scales differ from the factor of dropout."""
    dropout = Dropout(seed=1, step=2, probability=0.4, samples=[SampleRows(number=0, num_tokens=7)])
    kept = torch.from_numpy(dropout.kept("layer", IN))
    assert 0 < int(kept.sum()) < kept.numel()
    dropping, plain = weights(3, seed=10), weights(2, seed=20)
    segments = [
        Segment(
            start=0,
            stop=7,
            weights={"layer": dropping},
            dropout=dropout,
            anchor=torch.zeros(1).requires_grad_(),
        ),
        segment(7, TOKENS, plain),
    ]
    x, grad_y = normal(1, TOKENS, IN, seed=2), normal(1, TOKENS, OUT, seed=3)
    y, grad_x = output_and_gradients(segments, x, grad_y)
    leaves = [t.clone().requires_grad_() for t in (x, dropping.a, dropping.b, plain.a, plain.b)]
    x2, a, b, a2, b2 = leaves
    base = layer_of(Routing())
    read = x2[:, :7] * kept * dropout.factor
    added = torch.cat([read @ a.T @ b.T, x2[:, 7:] @ a2.T @ b2.T], dim=1)
    expected = F.linear(x2, base.weight, base.bias) + 0.5 * added
    torch.testing.assert_close(y, expected.detach())
    wanted = torch.autograd.grad(expected, leaves, grad_y)
    got = (grad_x, dropping.grad_a, dropping.grad_b, plain.grad_a, plain.grad_b)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_bfloat16_inputs_meet_adapters_in_float32():
    """Input, output and their gradients rounded once each; the adapter's own gradients not at all."""
    lora = LoraWeights(
        **{
            name: getattr(weights(3, seed=10), name).float()
            for name in ("a", "b", "grad_a", "grad_b")
        },
        scale=0.5,
    )
    x = normal(TOKENS, IN, seed=2).bfloat16()
    y, grad_y = normal(TOKENS, OUT, seed=4).bfloat16(), normal(TOKENS, OUT, seed=3).bfloat16()
    grad_x = normal(TOKENS, IN, seed=5).bfloat16()
    wide = x.float() @ lora.a.T
    expected_y = (y.float() + 0.5 * wide @ lora.b.T).bfloat16()
    grad_down = grad_y.float() @ lora.b
    expected_x = (grad_x.float() + 0.5 * grad_down @ lora.a).bfloat16()
    down = lora.add_to(y, x)
    lora.add_gradients(grad_y, x, down, grad_x)
    assert down.dtype == torch.float32
    # One unit in the last place of bfloat16, where sums are taken in another order.
    for got, wanted in ((y, expected_y), (grad_x, expected_x)):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=0)
    torch.testing.assert_close(lora.grad_b, 0.5 * grad_y.float().T @ wide)
    torch.testing.assert_close(lora.grad_a, 0.5 * grad_down.T @ x.float())


@pytest.mark.parametrize("rows", [range(12), [0, 4, 5, 6, 9, 11], [5, 6], []])
def test_selected_rows_keep_their_adapters_and_masks(rows):
    """And a range of rows is a selection."""
    dropout = Dropout(seed=1, step=0, probability=0.4, samples=[SampleRows(number=0, num_tokens=5)])
    later = replace(dropout, seed=2, samples=[SampleRows(number=0, num_tokens=TOKENS - 7)])
    segments = [
        Segment(start=0, stop=5, weights={"layer": weights(3, seed=10)}, dropout=dropout),
        segment(5, 7, None),
        Segment(start=7, stop=TOKENS, weights={"layer": weights(2, seed=20)}, dropout=later),
    ]
    adapters = adapters_at("layer", segments)
    x = normal(TOKENS, IN, seed=2)
    whole = torch.zeros(TOKENS, OUT, dtype=torch.float64)
    adapters.add_to(whole, x)
    chosen = torch.tensor(list(rows), dtype=torch.int64)
    part = torch.zeros(len(chosen), OUT, dtype=torch.float64)
    adapters.select(chosen).add_to(part, x[chosen])
    torch.testing.assert_close(part, whole[chosen])
    between = torch.zeros(6, OUT, dtype=torch.float64)
    adapters.between(3, 9).add_to(between, x[3:9])
    torch.testing.assert_close(between, whole[3:9])
