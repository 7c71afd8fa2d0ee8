"""What can be imported from a package of Tinker's names, and how each of it is called.

python -m tools.compatibility.surface      prints the surface of the `tinker` that is installed, as JSON
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import inspect
import pkgutil
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pydantic

MODULES = ("", "types", "auth", "lib.public_interfaces", "lib.retry_handler")
# Modules whose submodules are imported by name, too.
_WITH_SUBMODULES = ("types", "lib.public_interfaces")
_NO_SURFACE = (object, pydantic.BaseModel, BaseException, enum.Enum, str, tuple)
_PROTOCOLS = ("__aenter__", "__aexit__", "__await__", "__enter__", "__exit__")


@dataclass(frozen=True, slots=True)
class Parameter:
    """default: its repr; None where a value must be given."""

    name: str
    kind: str
    default: str | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """kind: method, coroutine, property or attribute. parameters: without `self`."""

    kind: str
    parameters: tuple[Parameter, ...] = ()


@dataclass(frozen=True, slots=True)
class Name:
    """What a path such as "types.Datum" leads to.

    kind: module, class, function or value.
    first: the first path to the same class or function.
    is_genuine: it is the very object that the installed `tinker` has there.
    parameters: of the constructor, or of the function.
    value: of a constant, its repr.
    """

    kind: str
    first: str = ""
    is_genuine: bool = False
    parameters: tuple[Parameter, ...] = ()
    members: dict[str, Member] = field(default_factory=dict)
    value: str = ""


@dataclass(frozen=True, slots=True)
class Surface:
    """names: by path below the package. version: of the `tinker` package."""

    version: str
    names: dict[str, Name]


def own_surface() -> Surface:
    """Of the genuine package that is installed."""
    tinker = importlib.import_module("tinker")
    return surface("tinker", list(_paths()), str(tinker.__version__))


def surface(package: str, paths: list[str], version: str) -> Surface:
    """What these paths lead to in the package; those that lead nowhere are left out."""
    firsts: dict[int, str] = {}
    names: dict[str, Name] = {}
    for path in paths:
        found = resolve(package, path)
        if found is not MISSING:
            first = firsts.setdefault(id(found), path) if _has_identity(found) else path
            names[path] = _name(found, first, is_genuine=found is resolve("tinker", path))
    return Surface(version, names)


MISSING: Any = object()


def resolve(package: str, path: str) -> Any:
    """The object, or MISSING."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(f"{package}.{path}")
    module, _, name = path.rpartition(".")
    with contextlib.suppress(AttributeError, ImportError):
        return getattr(importlib.import_module(f"{package}.{module}" if module else package), name)
    return MISSING


def _paths() -> Iterator[str]:
    for module in _modules():
        if module:
            yield module
        found = importlib.import_module(f"tinker.{module}" if module else "tinker")
        exported = getattr(found, "__all__", ())
        # What the package itself and its types have beside what they export is imported from them, too.
        is_closed = exported and module.split(".")[0] not in ("", "types")
        others = [] if is_closed else [n for n in list(vars(found)) if _is_own(n, found)]
        for name in sorted({*exported, *others}):
            yield f"{module}.{name}" if module else name


def _modules() -> Iterator[str]:
    """Those that the installed version has, the package itself first."""
    for module in MODULES:
        try:
            found = importlib.import_module(f"tinker.{module}" if module else "tinker")
        except ModuleNotFoundError:
            continue
        yield module
        if module in _WITH_SUBMODULES:
            for submodule in pkgutil.iter_modules(found.__path__):
                if not submodule.name.startswith("_"):
                    yield f"{module}.{submodule.name}"


def _is_own(name: str, module: types.ModuleType) -> bool:
    """Not something that the module merely imported for itself."""
    value = vars(module)[name]
    if name.startswith("_"):
        return False
    if isinstance(value, types.ModuleType):
        return module.__name__ == "tinker" and value.__name__.startswith("tinker.")
    if isinstance(value, type | types.FunctionType):
        # Classes that the package exports say that they are of "tinker", wherever they are defined.
        return value.__module__ in (module.__name__, "tinker")
    if isinstance(value, bool | typing.TypeVar) or hasattr(typing, name):
        return False
    return typing.get_origin(value) is not None or isinstance(value, str | int | float | tuple)


def _has_identity(value: Any) -> bool:
    return isinstance(value, type | types.FunctionType | types.ModuleType)


def _name(value: Any, first: str, *, is_genuine: bool) -> Name:
    if isinstance(value, types.ModuleType):
        return Name("module", first, is_genuine)
    if isinstance(value, type):
        return Name("class", first, is_genuine, _parameters(value), dict(_members(value)))
    if callable(value) and not typing.get_origin(value):
        return Name("function", first, is_genuine, _parameters(value))
    is_constant = isinstance(value, str | int | float | tuple)
    return Name("value", first, is_genuine, value=repr(value) if is_constant else "")


def _members(cls: type) -> Iterator[tuple[str, Member]]:
    inherited = {name for base in _NO_SURFACE if issubclass(cls, base) for name in dir(base)}
    for name in sorted(dir(cls)):
        is_public = name in _PROTOCOLS or not name.startswith("_")
        if is_public and name not in inherited:
            yield name, _member(cls, name)


def _member(cls: type, name: str) -> Member:
    static = inspect.getattr_static(cls, name)
    if isinstance(static, property) or type(static).__name__ in (
        "cached_property",
        "member_descriptor",
    ):
        return Member("property")
    value = getattr(cls, name)
    if not callable(value):
        return Member("attribute")
    is_coroutine = inspect.iscoroutinefunction(inspect.unwrap(value))
    is_bound = isinstance(static, classmethod | staticmethod)
    return Member(
        "coroutine" if is_coroutine else "method", _parameters(value)[0 if is_bound else 1 :]
    )


def _parameters(value: Any) -> tuple[Parameter, ...]:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ()
    return tuple(
        Parameter(p.name, p.kind.name, None if p.default is p.empty else repr(p.default))
        for p in signature.parameters.values()
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(pydantic.TypeAdapter(Surface).dump_json(own_surface()))
