"""Tensors lie on the model's device: where no GPU is at hand, the source itself is asked."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import backend

# torch puts what these make on the CPU unless they are told otherwise.
FACTORIES = {
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "randperm", "tensor", "tril_indices", "triu_indices", "zeros"),
}
# Files are made and merged on the CPU.
WITHOUT_A_DEVICE = {"builtin_models.py", "export.py"}
# Functions whose callers send on what they return.
RETURNED_FROM_CPU = {"kept", "_tensor"}

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
