"""Makes `tinker_compat.X` and `together.post_training.tinker.X` the same modules as `tinker.X`.

Without this, `from together.post_training.tinker.types.datum import Datum` would load a second copy of Tinker's
module under another name, and its Datum would not be Tinker's. The finder answers only for names below the two
packages, and only for modules that they do not have themselves.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

OWN = "tinker_compat"
SWAPPED = "together.post_training.tinker"
GENUINE = "tinker"
# Modules that hold Tinker's client classes. They are copied, with ours in their places.
_WITH_CLIENTS = ("lib", "lib.public_interfaces")


def install(replacements: Mapping[str, object]) -> None:
    """Registers the finder, once per process. `replacements`: our classes, by the names of Tinker's."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(replacements))


class _Finder(MetaPathFinder):
    def __init__(self, replacements: Mapping[str, object]) -> None:
        self._replacements = replacements

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        package = next((p for p in (OWN, SWAPPED) if fullname.startswith(p + ".")), None)
        # Where the official SDK has the swapped name, its modules are left alone.
        if package is None or sys.modules.get(package) is not sys.modules.get(OWN):
            return None
        name = fullname.removeprefix(package + ".")
        is_own = PathFinder.find_spec(fullname, path) is not None and "." not in name
        if package == OWN and is_own:
            return None
        if package == SWAPPED:
            loader: Loader = _Alias(f"{OWN}.{name}")
        elif name in _WITH_CLIENTS or name.startswith("lib.public_interfaces."):
            loader = _Copy(f"{GENUINE}.{name}", fullname, self._replacements)
        else:
            loader = _Alias(f"{GENUINE}.{name}")
        return ModuleSpec(fullname, loader)


class _Alias(Loader):
    """Another module, under a further name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just described the module as one of the further name.
        module.__spec__ = self._spec


class _Copy(Loader):
    """Another module's contents, with some names replaced."""

    def __init__(self, name: str, fullname: str, replacements: Mapping[str, object]) -> None:
        self._name = name
        self._fullname = fullname
        self._replacements = replacements

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(self._fullname)
        # A package: what lies below is found by the finder above, not by this path.
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        genuine = importlib.import_module(self._name)
        for name, value in vars(genuine).items():
            is_submodule = isinstance(value, ModuleType) and value.__name__.startswith(
                f"{self._name}."
            )
            if not (name.startswith("__") or is_submodule):
                setattr(module, name, self._replacements.get(name, value))
        module.__getattr__ = lambda name: self._submodule(name)  # pyright: ignore[reportAttributeAccessIssue]

    def _submodule(self, name: str) -> ModuleType:
        if name.startswith("__") or importlib.util.find_spec(f"{self._name}.{name}") is None:
            raise AttributeError(f"module {self._fullname!r} has no attribute {name!r}")
        return importlib.import_module(f"{self._fullname}.{name}")
