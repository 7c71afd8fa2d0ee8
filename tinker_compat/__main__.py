"""`python -m tinker_compat script.py [arguments]`: runs a script against this service.

In it `import together.post_training.tinker` is this package, also where the official SDK is installed.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from types import ModuleType

import tinker_compat
from tinker_compat.aliases import SWAPPED


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(f"usage: python -m tinker_compat script.py [arguments]\n\n{__doc__}")
    swap_in()
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def swap_in() -> None:
    """Puts this package in the place of `together.post_training.tinker`, leaving what is around it."""
    parent, _, name = SWAPPED.rpartition(".")
    try:
        package = importlib.import_module(parent)
    except ModuleNotFoundError:
        package = _make_package(parent)
    sys.modules[SWAPPED] = tinker_compat
    setattr(package, name, tinker_compat)


def _make_package(fullname: str) -> ModuleType:
    if fullname in sys.modules:
        return sys.modules[fullname]
    package = sys.modules[fullname] = ModuleType(fullname)
    package.__path__ = []
    parent, _, name = fullname.rpartition(".")
    if parent:
        setattr(_make_package(parent), name, package)
    return package


if __name__ == "__main__":
    main()
