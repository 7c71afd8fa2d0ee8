"""Puts our clients in the places of Tinker's own, for libraries that import `tinker` themselves.

Only names in modules are exchanged: `tinker.ServiceClient` is ours in whatever asks for it from now on. Types and
exceptions stay Tinker's, its modules stay themselves, and no import hook is needed.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import tinker_compat
from tinker_compat.additions import ADDITIONS, REPLACEMENTS, explain_lack, genuine, missing

GENUINE = "tinker"
# It holds a client, and 0.23.1 loads it only when it is asked for one.
_LAZY = "lib.public_interfaces.rest_client"
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Change:
    """An entry of a module's namespace, or of sys.modules. `before` is _ABSENT for one that was not there."""

    namespace: dict[str, object]
    name: str
    before: object
    after: object

    def apply(self) -> None:
        self.namespace[self.name] = self.after

    def revert(self) -> None:
        if self.before is not _ABSENT:
            self.namespace[self.name] = self.before
        else:
            self.namespace.pop(self.name, None)


class Substitution:
    """Owned by the package: there is one `tinker` in a process."""

    def __init__(self) -> None:
        self._changes: list[_Change] = []

    def make(self) -> None:
        """Does nothing the second time.

        Raises:
            RuntimeError: when something outside `tinker` has got hold of Tinker's own already. Nothing is changed.
        """
        if self._changes:
            return
        # Loaded first, so that the names that have to change are there.
        genuine(_LAZY)
        replacements = list(_replacements())
        if users := sorted(set(_users_of([change.before for change in replacements]))):
            raise RuntimeError(
                f"tinker_compat.install() comes too late: {', '.join(users)} would go on using Tinker's own service. "
                "Call it before they are imported or made, or run the program as "
                "`python -m tinker_compat script.py`."
            )
        self._changes = [*replacements, *_additions()]
        for change in self._changes:
            change.apply()

    def undo(self) -> None:
        """What was imported in between keeps our clients."""
        for change in reversed(self._changes):
            change.revert()
        self._changes = []


def _replacements() -> Iterator[_Change]:
    for module in _own_modules():
        for name, ours in REPLACEMENTS.items():
            value = vars(module).get(name, _ABSENT)
            if callable(value) and value is not ours:
                yield _Change(vars(module), name, value, ours)


def _additions() -> Iterator[_Change]:
    """Names that the installed version lacks, and modules of such names."""
    for name in ADDITIONS:
        theirs = genuine(name)
        if theirs is not None:
            for added, value in missing(name).items():
                yield _Change(vars(theirs), added, _ABSENT, value)
            continue
        module = importlib.import_module(f"{tinker_compat.__name__}.{name}")
        yield _Change(sys.modules, f"{GENUINE}.{name}", _ABSENT, module)  # pyright: ignore[reportArgumentType]
        parent, _, last = name.rpartition(".")
        yield _Change(vars(genuine(parent)), last, _ABSENT, module)
    top = sys.modules[GENUINE]
    exported = sorted({*vars(top)["__all__"], *tinker_compat.__all__})
    yield _Change(vars(top), "__all__", vars(top)["__all__"], exported)
    for name in ("", "types"):
        yield _Change(vars(genuine(name)), "__getattr__", _ABSENT, _explainer(name))


def _explainer(module: str) -> Callable[[str], object]:
    """A module's `__getattr__`: what is not there says so as always, or which version has it."""

    def explain(name: str) -> object:
        lack = explain_lack(f"{module}.{name}".lstrip("."))
        fullname = f"{GENUINE}.{module}".rstrip(".")
        raise AttributeError(lack or f"module {fullname!r} has no attribute {name!r}")

    return explain


def _own_modules() -> list[ModuleType]:
    return [m for name, m in list(sys.modules.items()) if _is_own(name) and m is not None]


def _is_own(module: str) -> bool:
    return module == GENUINE or module.startswith(f"{GENUINE}.")


def _users_of(replaced: list[object]) -> Iterator[str]:
    """Modules, classes and instances outside `tinker` that would go on using what is replaced."""
    ids = {id(value) for value in replaced}
    own = {id(module) for module in _own_modules()}
    for module_name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and id(module) not in own:
            for name, value in list(vars(module).items()):
                if id(value) in ids:
                    yield f"{module_name}.{name}"
    classes = {kind for value in replaced if isinstance(value, type) for kind in _family(value)}
    for kind in classes:
        if not _is_own(kind.__module__):
            yield f"{kind.__module__}.{kind.__qualname__}"
    for instance in gc.get_objects():
        if type(instance) in classes:
            yield f"a {type(instance).__name__} that was made already"


def _family(kind: type) -> Iterator[type]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _family(derived)
