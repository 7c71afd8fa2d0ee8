"""Puts our clients in the places of Tinker's own, for libraries that import `tinker` themselves.

Only names in modules are exchanged: `tinker.ServiceClient` is ours in whatever asks for it from now on. Types and
exceptions stay Tinker's, its modules stay themselves, and no import hook is needed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType

GENUINE = "tinker"
# Modules that hold clients and that older versions do not load by themselves.
_LAZY = ("lib.public_interfaces.rest_client",)
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Change:
    """One name of one of Tinker's modules; `before` is _ABSENT for a name that it did not have."""

    module: ModuleType
    name: str
    before: object
    after: object

    def apply(self) -> None:
        setattr(self.module, self.name, self.after)

    def revert(self) -> None:
        if self.before is _ABSENT:
            vars(self.module).pop(self.name, None)
        else:
            setattr(self.module, self.name, self.before)


class Substitution:
    """Of `replacements`, by the names that they have in Tinker's modules."""

    def __init__(self, replacements: Mapping[str, object]) -> None:
        self._replacements = replacements
        self._changes: list[_Change] = []

    @property
    def is_made(self) -> bool:
        return bool(self._changes)

    def make(self) -> None:
        """Does nothing the second time.

        Raises:
            RuntimeError: when something outside `tinker` has got hold of Tinker's own already. Nothing is changed.
        """
        if self.is_made:
            return
        changes = list(self._plan())
        replaced = [c.before for c in changes if c.before is not _ABSENT]
        if users := sorted(set(_users_of(replaced))):
            raise RuntimeError(
                f"tinker_compat.install() comes too late: {', '.join(users)} would go on using Tinker's own service. "
                "Call it first in the program, before those are imported or made, or run the program as "
                "`python -m tinker_compat script.py`."
            )
        for change in changes:
            change.apply()
        self._changes = changes

    def undo(self) -> None:
        """What was imported in between keeps our clients."""
        for change in reversed(self._changes):
            change.revert()
        self._changes = []

    def _plan(self) -> Iterator[_Change]:
        top = importlib.import_module(GENUINE)
        for name in _LAZY:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(f"{GENUINE}.{name}")
        for module in _own_modules():
            for name, ours in self._replacements.items():
                value = vars(module).get(name, _ABSENT)
                if isinstance(value, type) and value is not ours:
                    yield _Change(module, name, value, ours)
        for name, ours in self._replacements.items():
            if name not in vars(top):
                yield _Change(top, name, _ABSENT, ours)


def _own_modules() -> list[ModuleType]:
    return [m for name, m in list(sys.modules.items()) if _is_own(name) and m is not None]


def _is_own(module: str) -> bool:
    return module == GENUINE or module.startswith(f"{GENUINE}.")


def _users_of(replaced: list[object]) -> Iterator[str]:
    """Modules, classes and instances outside `tinker` that go on using what is replaced."""
    ids = {id(value) for value in replaced}
    own = {id(module) for module in _own_modules()}
    for module_name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and id(module) not in own:
            for name, value in list(vars(module).items()):
                if id(value) in ids:
                    yield f"{module_name}.{name}"
    classes = tuple(value for value in replaced if isinstance(value, type))
    for base in classes:
        for derived in base.__subclasses__():
            if not _is_own(derived.__module__):
                yield f"{derived.__module__}.{derived.__qualname__}"
    for instance in gc.get_objects():
        if issubclass(type(instance), classes):
            yield f"a {type(instance).__name__} that was made already"
