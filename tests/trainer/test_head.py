"""The head against float64 log_softmax and autograd, and what it keeps in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backend.trainer.head import Head, targets_of
from backend.trainer.lora import AdaptedRows, Adapters, LoraWeights

HIDDEN, VOCAB, RANK = 12, 40, 3
NONE = Adapters()


def linear(*, bias: bool = False, scale: float = 1.0) -> nn.Linear:
    layer = nn.Linear(HIDDEN, VOCAB, bias=bias)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        layer.weight.normal_(std=scale, generator=generator)
        if bias:
            layer.bias.normal_(generator=generator)
    return layer


def adapter() -> LoraWeights:
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(RANK, HIDDEN, generator=generator)
    b = torch.randn(VOCAB, RANK, generator=generator)
    return LoraWeights(a=a, b=b, grad_a=torch.zeros_like(a), grad_b=torch.zeros_like(b), scale=0.7)


def all_rows(num_rows: int, lora: LoraWeights | None) -> Adapters:
    if lora is None:
        return Adapters()
    return Adapters((AdaptedRows(start=0, stop=num_rows, weights=lora),))


def hidden(num_rows: int) -> Tensor:
    return torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(2))


def random_targets(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB, shape) for shape in shapes]


def reference(
    layer: nn.Linear, hidden_TH: Tensor, arrays, lora: LoraWeights | None, gradient: Tensor
) -> tuple[Tensor, ...]:
    """(logprobs, by hidden[, by A, by B]), float64."""
    h = hidden_TH.double().requires_grad_()
    bias = None if layer.bias is None else layer.bias.double()
    logits = nn.functional.linear(h, layer.weight.double(), bias)
    leaves = [h]
    if lora is not None:
        a, b = (t.double().requires_grad_() for t in (lora.a, lora.b))
        logits = logits + lora.scale * (h @ a.T) @ b.T
        leaves += [a, b]
    rows = logits.log_softmax(-1).split([len(array) for array in arrays])
    lp = torch.cat(
        [
            part.gather(1, torch.from_numpy(array).reshape(len(array), -1)).flatten()
            for part, array in zip(rows, arrays, strict=True)
        ]
    )
    return lp.detach(), *torch.autograd.grad((lp * gradient.double()).sum(), leaves)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("with_adapter", [False, True])
@pytest.mark.parametrize("chunk_values", [1, 64 * VOCAB])
def test_head_equals_float64_autograd(bias, with_adapter, chunk_values):
    """(N,) and (N, K) targets in one row, some silent; 1e-5 of the largest value is float32's rounding."""
    layer, lora = linear(bias=bias), adapter() if with_adapter else None
    arrays = random_targets((70,), (30, 4), (1,), (50, 1), (9, 0), (40,))
    targets = targets_of(arrays)
    gradient = torch.randn(len(targets.ids), generator=torch.Generator().manual_seed(4))
    gradient[10:60] = 0
    hidden_TH = hidden(200)
    head = Head(layer, chunk_values)
    logprobs, grad_hidden = head.score_and_backward(
        hidden_TH, targets, gradient, all_rows(200, lora)
    )
    got = [logprobs, grad_hidden] + ([lora.grad_a, lora.grad_b] if lora else [])
    for one, other in zip(got, reference(layer, hidden_TH, arrays, lora, gradient), strict=True):
        tolerance = 1e-5 * float(other.abs().max())
        torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance)


def test_scores_are_the_same_with_and_without_a_gradient():
    head, lora = Head(linear()), adapter()
    targets = targets_of(random_targets((20,), (5, 3)))
    scored = head.logprobs(hidden(25), targets, all_rows(25, lora))
    for gradient in (torch.ones(35), torch.arange(35.0) % 2):
        assert torch.equal(
            head.score_and_backward(hidden(25), targets, gradient, all_rows(25, lora))[0], scored
        )


def test_targets_listed_twice_count_twice():
    """Densified sparse targets repeat token 0."""
    arrays = [np.array([[5, 5, 0, 0]])]
    gradient = torch.tensor([1.0, 0.5, 0.25, 0.0])
    got = Head(linear()).backward(hidden(1), targets_of(arrays), gradient, NONE)
    _, wanted = reference(linear(), hidden(1), arrays, None, gradient)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1e3, 1e6])
def test_logprobs_far_below_underflow_are_exact(scale):
    """exp(lp) is 0 in float32; lp itself is not."""
    arrays = random_targets((30,))
    layer = linear(scale=scale)
    logprobs = Head(layer).logprobs(hidden(30), targets_of(arrays), NONE)
    wanted = reference(layer, hidden(30), arrays, None, torch.zeros(30))[0]
    assert float(wanted.min()) < -100
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-5, atol=1e-6 * scale)


def test_a_certain_target_has_logprob_zero_and_no_gradient():
    layer = linear(scale=1e4)
    best = (hidden(8) @ layer.weight.T).argmax(dim=1).numpy()
    logprobs, grad_hidden = Head(layer).score_and_backward(
        hidden(8), targets_of([best]), torch.ones(8), NONE
    )
    assert torch.equal(logprobs, torch.zeros(8))
    assert torch.equal(grad_hidden, torch.zeros(8, HIDDEN))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of every product with the vocabulary."""
    rows: list[int] = []
    product = torch.mm

    def counted(left, right, **options):
        if VOCAB in (left.shape[1], right.shape[1]):
            rows.append(len(left))
        return product(left, right, **options)

    monkeypatch.setattr(torch, "mm", counted)
    return rows


def test_logits_of_more_than_one_chunk_never_exist(products: list[int]):
    head = Head(linear(), chunk_values=64 * VOCAB)
    targets = targets_of(random_targets((1000,)))
    head.score_and_backward(hidden(1000), targets, torch.ones(1000), all_rows(1000, adapter()))
    assert max(products) == head.chunk_rows == 64
    assert sum(products) == 2 * 1000  # once to the logits, once back: nothing is computed twice
    assert head._buffer.numel() == 64 * VOCAB


def test_rows_without_a_gradient_are_not_differentiated(products: list[int]):
    """Prompts, and tokens that a clipped loss leaves out, cost one product when scored and none after."""
    head = Head(linear())
    targets = targets_of(random_targets((100,)))
    gradient = torch.zeros(100)
    gradient[90:] = 1
    head.score_and_backward(hidden(100), targets, gradient, NONE)
    assert sum(products) == 100 + 10
    products.clear()
    head.backward(hidden(100), targets, gradient, NONE)
    assert sum(products) == 10 + 10
    products.clear()
    assert not head.backward(hidden(100), targets, torch.zeros(100), all_rows(100, adapter())).any()
    assert products == []
