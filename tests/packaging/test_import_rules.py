"""tinker_compat -> together_post_training <- backend, and the heavy libraries only in the engines."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.packaging.environments import REPOSITORY

PACKAGES = ("backend", "tinker_compat", "together_post_training")
MAY_IMPORT = {
    "backend": {"backend", "together_post_training"},
    "tinker_compat": {"tinker_compat", "together_post_training"},
    "together_post_training": {"together_post_training"},
}
ENGINE_LIBRARIES = {"peft", "sglang", "torch", "transformers"}
ENGINES = ("backend/generator/", "backend/trainer/")
FILES = [
    path.relative_to(REPOSITORY).as_posix()
    for package in PACKAGES
    for path in sorted((REPOSITORY / package).rglob("*.py"))
]


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(first name of the module, whether importing the file imports it too)."""

    def walk(node: ast.AST, eager: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name.split(".")[0], eager) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.level == 0 and child.module:
                yield child.module.split(".")[0], eager
            lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            lazy = lazy or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            yield from walk(child, eager and not lazy)

    return walk(ast.parse(path.read_text()), True)


def test_packages_import_each_other_in_one_direction():
    wrong = [
        (name, module)
        for name in FILES
        for module, _ in imports(REPOSITORY / name)
        if module in PACKAGES and module not in MAY_IMPORT[name.split("/")[0]]
    ]
    assert wrong == []


def test_engine_libraries_are_imported_only_in_engines():
    """tinker_compat may do so inside functions: Tinker's own SDK loads tokenizers and runs custom losses."""
    wrong = [
        (name, module)
        for name in FILES
        for module, eager in imports(REPOSITORY / name)
        if module in ENGINE_LIBRARIES
        and not name.startswith(ENGINES)
        and (eager or not name.startswith("tinker_compat/"))
    ]
    assert wrong == []


def test_imports_sees_nested_and_conditional_ones(tmp_path: Path):
    path = tmp_path / "module.py"
    path.write_text(
        "import torch.nn\nfrom peft import x\nif TYPE_CHECKING:\n    import sglang\n"
        "def f():\n    if 1:\n        import transformers\nclass C:\n    import backend\n"
    )
    assert dict(imports(path)) == {
        "torch": True,
        "peft": True,
        "sglang": False,
        "transformers": False,
        "backend": True,
    }
