"""Makes `tinker_compat.X` and `together.post_training.tinker.X` the same modules as `tinker.X`.

Without this, `from together.post_training.tinker.types.datum import Datum` would load a second copy of Tinker's
module under another name, and its Datum would not be Tinker's. The finder answers only for names below the two
packages, and only for modules that they do not have themselves. What has our clients, or names that the installed
Tinker lacks, is a module of its own with Tinker's contents.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from tinker_compat.additions import ADDITIONS, REPLACEMENTS, explain_lack, genuine, missing

OWN = "tinker_compat"
SWAPPED = "together.post_training.tinker"
GENUINE = "tinker"
# Packages that lead to Tinker's client classes.
_WITH_CLIENTS = ("lib", "lib.public_interfaces")


def register() -> None:
    """Once per process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def swap_in() -> None:
    """Puts our package in the place of `together.post_training.tinker`, leaving what is around it."""
    parent, _, name = SWAPPED.rpartition(".")
    try:
        package = importlib.import_module(parent)
    except ModuleNotFoundError:
        package = _make_package(parent)
    sys.modules[SWAPPED] = sys.modules[OWN]
    setattr(package, name, sys.modules[OWN])


def _make_package(fullname: str) -> ModuleType:
    if fullname in sys.modules:
        return sys.modules[fullname]
    package = sys.modules[fullname] = ModuleType(fullname)
    package.__path__ = []
    parent, _, name = fullname.rpartition(".")
    if parent:
        setattr(_make_package(parent), name, package)
    return package


class _Finder(MetaPathFinder):
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
        return ModuleSpec(fullname, _loader(package, name, fullname))


def _loader(package: str, name: str, fullname: str) -> Loader:
    if package == SWAPPED:
        return _Alias(f"{OWN}.{name}")
    if lack := explain_lack(name):
        # `from tinker_compat.types import X` comes here for a name that the module does not have.
        raise ImportError(lack, name=fullname)
    has_clients = name in _WITH_CLIENTS or name.startswith("lib.public_interfaces.")
    if has_clients or (name in ADDITIONS and missing(name)):
        return _Copy(name, fullname)
    return _Alias(f"{GENUINE}.{name}")


class _Alias(Loader):
    """Another module, under a further name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        try:
            module = importlib.import_module(self._name)
        except ModuleNotFoundError as error:
            if error.name != self._name:
                raise
            raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name) from None
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just described the module as one of the further name.
        module.__spec__ = self._spec


class _Copy(Loader):
    """The contents of a module of Tinker's, if it has it, with our clients, and the names that it lacks."""

    def __init__(self, name: str, fullname: str) -> None:
        self._name = name
        self._fullname = fullname

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        theirs, additions = genuine(self._name), missing(self._name)
        if theirs is None and not additions:
            raise ModuleNotFoundError(f"No module named {self._fullname!r}", name=self._fullname)
        module = ModuleType(self._fullname, theirs.__doc__ if theirs is not None else None)
        # A package: what lies below is found by the finder above, not by this path.
        module.__path__ = []
        for name, value in vars(theirs).items() if theirs is not None else ():
            is_submodule = isinstance(value, ModuleType) and value.__name__.startswith(
                f"{GENUINE}.{self._name}."
            )
            if not (name.startswith("__") or is_submodule):
                setattr(module, name, REPLACEMENTS.get(name, value))
        vars(module).update(additions)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = self._submodule  # pyright: ignore[reportAttributeAccessIssue]

    def _submodule(self, name: str) -> ModuleType:
        if lack := explain_lack(f"{self._name}.{name}"):
            raise AttributeError(lack)
        lack = f"module {self._fullname!r} has no attribute {name!r}"
        if name.startswith("__"):
            raise AttributeError(lack)
        try:
            return importlib.import_module(f"{self._fullname}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{self._fullname}.{name}":
                raise
            raise AttributeError(lack) from None
