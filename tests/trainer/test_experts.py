"""Experts under adapters, against autograd and plain transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backend.trainer import base_model
from backend.trainer.base import AdamParams, LoraConfig
from backend.trainer.experts import LoraExperts, columns_of_b, dispatch, rows_of_a
from backend.trainer.lora import LoraWeights, Routing, Segment
from backend.trainer.torch_trainer import TorchTrainer
from tests import models
from tests.conformance.data import forward, random_sample, run, train
from tests.trainer.sessions import random_adapter, take_gradient

NUM_EXPERTS, TOP_K, HIDDEN, INNER, TOKENS = 5, 2, 6, 4, 14
MOE = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Experts(nn.Module):
    """The names and shapes of transformers' modules."""

    def __init__(self) -> None:
        super().__init__()
        up = normal(NUM_EXPERTS, 2 * INNER, HIDDEN, seed=0)
        down = normal(NUM_EXPERTS, HIDDEN, INNER, seed=1)
        self.gate_up_proj = nn.Parameter(up, requires_grad=False)
        self.down_proj = nn.Parameter(down, requires_grad=False)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


def adapter(seed: int, rank: int) -> dict[str, LoraWeights]:
    made = {}
    for name, num_in, num_out in (
        ("gate_up_proj", HIDDEN, 2 * INNER),
        ("down_proj", INNER, HIDDEN),
    ):
        a = normal(NUM_EXPERTS * rank, num_in, seed=seed)
        b = normal(num_out, rank * NUM_EXPERTS, seed=seed + 1)
        made[f"mlp.{name}"] = LoraWeights(
            a=a, b=b, grad_a=torch.zeros_like(a), grad_b=torch.zeros_like(b), scale=0.5
        )
    return made


def expected(x_TH, choice_TK, weights_TK, lora: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    """One token and one expert at a time; A and B cut up as PEFT does it."""
    module = Experts()
    rows = []
    for x, experts, weights in zip(x_TH, choice_TK.tolist(), weights_TK, strict=True):
        row = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, weight in zip(experts, weights, strict=True):
            w_up, w_down = module.gate_up_proj[expert], module.down_proj[expert]
            if lora:
                w_up = w_up + _delta(*lora["mlp.gate_up_proj"])[expert]
                w_down = w_down + _delta(*lora["mlp.down_proj"])[expert]
            row = row + weight * (w_down @ module._apply_gate(w_up @ x))
        rows.append(row)
    return torch.stack(rows)


def _delta(a: Tensor, b: Tensor) -> Tensor:
    of_a = a.reshape(NUM_EXPERTS, -1, a.shape[1])
    of_b = b.reshape(b.shape[0], -1, NUM_EXPERTS)
    return 0.5 * torch.einsum("ore,eri->eoi", of_b, of_a)


def routed(seed: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and a router's choice, in which expert 3 has no token."""
    scores = normal(TOKENS, NUM_EXPERTS, seed=seed)
    scores[:, 3] = -torch.inf
    weights, choice = scores.softmax(1).topk(TOP_K)
    return normal(TOKENS, HIDDEN, seed=seed + 1), choice, weights


def anchored(start: int, stop: int, weights: dict[str, LoraWeights]) -> Segment:
    anchor = torch.zeros(1).requires_grad_()
    return Segment(start=start, stop=stop, weights=weights, anchor=anchor)


def test_sessions_side_by_side_equal_autograd():
    """Ranks 3 and 1 with the base between them; outputs, gradients by x and by the router's weights, by A and B."""
    first, second = adapter(seed=10, rank=3), adapter(seed=20, rank=1)
    bounds = ((0, 6, first), (6, 9, {}), (9, TOKENS, second))
    routing = Routing()
    layer = LoraExperts(Experts(), "mlp", routing)
    routing.segments = tuple(anchored(*bound) for bound in bounds)
    x, choice, weights = routed()
    grad_y = normal(TOKENS, HIDDEN, seed=3)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    y = layer(x, choice, weights)
    y.backward(grad_y)
    assert x.grad is not None
    assert weights.grad is not None
    for start, stop, lora in bounds:
        rows = slice(start, stop)
        x2, w2 = (t.detach()[rows].clone().requires_grad_() for t in (x, weights))
        pairs = {
            path: (part.a.clone().requires_grad_(), part.b.clone().requires_grad_())
            for path, part in lora.items()
        }
        wanted = expected(x2, choice[rows], w2, pairs)
        wanted.backward(grad_y[rows])
        compared = [(y[rows], wanted), (x.grad[rows], x2.grad), (weights.grad[rows], w2.grad)]
        for path, (a, b) in pairs.items():
            compared += [(lora[path].grad_a, a.grad), (lora[path].grad_b, b.grad)]
        for got, want in compared:
            torch.testing.assert_close(got, want)


def test_experts_without_tokens_get_no_gradient():
    lora = adapter(seed=10, rank=2)
    routing = Routing()
    layer = LoraExperts(Experts(), "mlp", routing)
    routing.segments = (anchored(0, TOKENS, lora),)
    layer(*routed()).sum().backward()
    for part in lora.values():
        idle_a = rows_of_a(part.grad_a, NUM_EXPERTS)[3]
        idle_b = columns_of_b(part.grad_b, NUM_EXPERTS)[3]
        assert not idle_a.any()
        assert not idle_b.any()
        assert part.grad_a.any()


def test_without_adapters_gradients_pass_through():
    layer = LoraExperts(Experts(), "mlp", Routing())
    x, choice, weights = routed()
    x.requires_grad_()
    layer(x, choice, weights).sum().backward()
    x2 = x.detach().clone().requires_grad_()
    expected(x2, choice, weights, {}).sum().backward()
    torch.testing.assert_close(x.grad, x2.grad)


def test_dispatch_sorts_by_expert_then_by_token():
    sent = dispatch(torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]]), num_experts=4)
    assert sent.tokens.tolist() == [0, 1, 3, 1, 2, 0, 2, 3]
    assert sent.bounds == [0, 3, 5, 8, 8]
    assert sent.ranges() == [(0, 0, 3), (1, 3, 5), (2, 5, 8)]
    assert sent.ranges_of(0, 4) == sent.ranges()
    assert sent.ranges_of(1, 3) == [(0, 1, 2), (1, 3, 5), (2, 6, 7)]
    assert sent.ranges_of(2, 2) == []


# Whole models


@pytest.mark.parametrize("model_type", MOE)
def test_neighbours_change_neither_logprobs_nor_gradient(base_of, model_type):
    """Law 4. Experts compute other numbers of rows at once then: 5e-5, and 1e-4 of a gradient's largest entry, are
    float32 on weights that amplify rounding."""
    trainer = TorchTrainer(base_of(model_type))
    for session in ("alone", "together"):
        trainer.create_session(session, LoraConfig(rank=2, alpha=4, seed=0))
        trainer.load(session, random_adapter(trainer, session), None)
    samples = [random_sample(i, 128, n) for i, n in enumerate((9, 14, 9, 1))]
    alone = [run(trainer, "alone", [s], backward=True).logprobs[0] for s in samples]
    together = run(trainer, "together", samples, backward=True).logprobs
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-5)
    gradients = [take_gradient(trainer, session) for session in ("alone", "together")]
    for name, one in gradients[0].items():
        np.testing.assert_allclose(one, gradients[1][name], atol=1e-4 * np.abs(one).max())


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_losses_of_the_router_play_no_part(tmp_path, base_of, model_type):
    """A config that asks transformers for them trains as one that does not."""
    directory = models.rand(
        tmp_path / "model", model_type, output_router_logits=True, router_aux_loss_coef=10.0
    )
    results = []
    for base in (base_model.load("m", str(directory)), base_of(model_type)):
        trainer = TorchTrainer(base)
        trainer.create_session("s", LoraConfig(rank=2, alpha=4, seed=0))
        metrics = train(trainer, "s", [random_sample(1, 128, 20)], adam=AdamParams())
        results.append((metrics, trainer.weights("s").tensors))
    assert results[0][0] == results[1][0]
    for name, tensor in results[0][1].items():
        assert np.array_equal(tensor, results[1][1][name])


@pytest.mark.parametrize("model_type", MOE)
def test_training_moves_the_experts_adapters_and_nothing_of_the_base(base_of, model_type):
    base = base_of(model_type)
    before = {name: p.clone() for name, p in base.module.named_parameters()}
    trainer = TorchTrainer(base)
    lora = LoraConfig(rank=2, alpha=8, seed=0, train_attn=False, train_unembed=False)
    trainer.create_session("s", lora)
    samples = [random_sample(i, 128, 30) for i in range(3)]
    fresh = forward(trainer, "s", samples)
    start = trainer.weights("s").tensors
    for _ in range(8):
        train(trainer, "s", samples, adam=AdamParams(learning_rate=0.02))
    trained = forward(trainer, "s", samples)
    assert sum(lp.sum() for lp in trained) > sum(lp.sum() for lp in fresh) + 10
    for name, tensor in trainer.weights("s").tensors.items():
        assert not np.array_equal(tensor, start[name]), name
    for name, parameter in base.module.named_parameters():
        assert torch.equal(parameter, before[name])
