"""Tensors lie on the model's device. Where there is no GPU the source is read, and tensors without values are run."""

from __future__ import annotations

import ast
import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import masking_utils

import backend
from backend.generator.attention import Part
from backend.generator.kv_cache import KVCache
from backend.generator.lora import Span, snapshot_weights
from backend.generator.model_runner import ModelRunner
from backend.trainer.adapter_slot import AdapterSlot
from backend.trainer.base import Adapter, LoraConfig
from backend.trainer.base_model import BaseModel
from backend.trainer.dropout import SampleRows
from backend.trainer.packed_model import PackedModel, pack
from backend.trainer.targets import tensor_shapes
from tests.conformance.data import random_sample

META = torch.device("meta")
LORA = LoraConfig(rank=4, alpha=8, seed=0, dropout=0.1)

# torch puts what these make on the CPU unless they are told otherwise.
FACTORIES = {
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "randperm", "tensor", "tril_indices", "triu_indices", "zeros"),
}
# Files are made and merged on the CPU.
WITHOUT_A_DEVICE = {"builtin_models.py", "export.py"}
# Functions whose callers send on what they return.
RETURNED_FROM_CPU = {"_tensor"}

SOURCES = [
    path
    for engine in ("trainer", "generator")
    for path in sorted((Path(backend.__file__).parent / engine).glob("*.py"))
    if "import torch" in path.read_text() and path.name not in WITHOUT_A_DEVICE
]


def faults(source: str) -> Iterator[str]:
    """Calls that make a tensor without saying where; `torch.from_numpy` must be sent on at once, or copied from."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _torch_function(node)
        if name in FACTORIES and not any(k.arg == "device" for k in node.keywords):
            yield f"line {node.lineno}: torch.{name} without a device"
        if name == "from_numpy" and not _is_sent_on(node, parents):
            yield f"line {node.lineno}: torch.from_numpy that stays on the CPU"


def _torch_function(node: ast.Call) -> str | None:
    if isinstance(node.func, ast.Attribute):
        module = node.func.value
        if isinstance(module, ast.Name) and module.id == "torch":
            return node.func.attr
    return None


def _is_sent_on(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    parent = parents[node]
    if isinstance(parent, ast.Return):
        return getattr(parents[parent], "name", None) in RETURNED_FROM_CPU
    if isinstance(parent, ast.Attribute):
        return parent.attr == "to"
    return (
        isinstance(parent, ast.Call)
        and isinstance(parent.func, ast.Attribute)
        and parent.func.attr == "copy_"
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_tensor_says_where_it_lies(path: Path):
    assert not list(faults(path.read_text()))


def test_forgotten_devices_are_found():
    source = "a = torch.zeros(3)\nb = torch.from_numpy(x) + 1\nc = torch.from_numpy(x).to(d)"
    assert [fault.split(":")[0] for fault in faults(source)] == ["line 1", "line 2"]


# Tensors without values lie on a device of their own, and meet no tensor that was left on the CPU.


@pytest.fixture
def base(base_of, monkeypatch) -> BaseModel:
    """A mixture of experts would have to look at values. Transformers, too, looks at positions for packed sequences,
    to make a mask that these engines do not use."""
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)
    module = copy.deepcopy(base_of("qwen3").module).to(META)
    return dataclasses.replace(base_of("qwen3"), module=module)


def test_trainers_body_runs_on_the_models_device(base, monkeypatch):
    """Forward and backward of an adapter, kept or computed again; the head has to look at values."""
    for name in ("_check_equals", "_measure"):
        monkeypatch.setattr(PackedModel, name, lambda *_: None)
    model = PackedModel(base)
    slot = AdapterSlot(LORA, model.layers(LORA), device=META)
    row = pack([random_sample(i, 128, n) for i, n in enumerate((20, 20, 9))], META)
    rows = [SampleRows(number=i, num_tokens=n) for i, n in enumerate((20, 20, 9))]
    for recompute in (False, True):
        segment = slot.segment(0, rows, for_backward=True)
        forward = model.forward(row, [segment], for_backward=True, recompute=recompute)
        assert forward._hidden.device == META
        forward._body_backward(torch.zeros_like(forward._hidden))


def test_generators_model_runs_on_the_models_device(base):
    """Two prompts at once, under an adapter, then a token of each; and the logits."""
    runner = ModelRunner(base)
    shapes = tensor_shapes(runner.adapted(LORA), LORA.rank)
    adapter = Adapter(lora=LORA, tensors={n: np.zeros(s, np.float32) for n, s in shapes.items()})
    weights = snapshot_weights(adapter, runner.adapted(LORA), META)
    cache, lengths = KVCache(max_tokens=1024), (20, 9)
    rows = [cache.take(n + 1) for n in lengths]
    parts = [Part(row, 0, n) for n, row in zip(lengths, rows, strict=True)]
    tokens = torch.zeros(29, dtype=torch.int64, device=META)
    runner.hidden(tokens, tokens, [Span(0, 20, weights)], runner.prefill_plan(parts))
    for row in rows:
        row.pool.run(row)
    decode = runner.decode_plan(rows, [n + 1 for n in lengths])
    hidden = runner.hidden(tokens[:2], tokens[:2], [Span(1, 2, weights)], decode)
    assert runner.logits(hidden, [Span(0, 1, weights)]).device == META
