"""Stands in for SGLang's compiled kernels, which exist for GPUs only.

SGLang imports names from this package whatever it runs on. On a CPU, with torch's own attention, sampling and LoRA
backends, it calls none of them; one that it does call says which it is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType


class _Missing:
    """A kernel, or a namespace of some."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> _Missing:
        return _missing(self.__name__, name)

    def __call__(self, *_args, **_kwargs):
        raise NotImplementedError(f"{self.__name__} is a GPU kernel: this environment has none.")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of this package; each has every name."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return ModuleType(spec.name)

    def exec_module(self, module):
        module.__getattr__ = lambda name: _missing(module.__name__, name)


def _missing(owner: str, name: str) -> _Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(f"{owner}.{name}")


def __getattr__(name: str) -> _Missing:
    return _missing(__name__, name)


sys.meta_path.append(_Submodules())
