"""Runs a program as Python does, in this process."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

USAGE_STATUS = 2


def run_script(path: str, arguments: Sequence[str]) -> None:
    """As `python path arguments...`. A directory or zip file runs its `__main__`."""
    if not os.path.exists(path):
        _stop(f"can't open file {path!r}: no such file")
    _start([path, *arguments])
    spec = PathFinder.find_spec("__main__", [path]) if not _is_source(path) else None
    if spec is not None:
        _set_first_path(os.path.abspath(path))
        _run(_code_of(spec), spec)
        return
    if os.path.isdir(path):
        _stop(f"can't find '__main__' module in {path!r}")
    _set_first_path(str(Path(path).resolve().parent))
    absolute = os.path.abspath(path)
    with io.open_code(absolute) as file:
        code = compile(file.read(), absolute, "exec", dont_inherit=True)
    _run(code, None, file=absolute, loader=SourceFileLoader("__main__", absolute), cached=None)


def run_module(name: str, arguments: Sequence[str]) -> None:
    """As `python -m name arguments...`. A package runs its `__main__`."""
    _start(["-m", *arguments])
    _set_first_path(os.getcwd())
    spec = _find(name)
    if spec is None:
        _stop(f"no module named {name!r}")
    if spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
    if spec is None or spec.loader is None:
        _stop(f"no module named '{name}.__main__': {name!r} is a package that cannot be run")
    sys.argv[0] = spec.origin or name
    _run(_code_of(spec), spec)


def run_command(text: str, arguments: Sequence[str]) -> None:
    """As `python -c text arguments...`."""
    _start(["-c", *arguments])
    _set_first_path("")
    _run(compile(text, "<string>", "exec", dont_inherit=True), None)


def _start(argv: list[str]) -> None:
    sys.argv = argv
    sys.excepthook = _show


def _run(code: CodeType, spec: ModuleSpec | None, **names: object) -> None:
    """In a `__main__` of its own, which stays: threads and exit functions outlive the last line."""
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    if spec is not None:
        vars(main).update(
            __file__=spec.origin,
            __cached__=spec.cached,
            __loader__=spec.loader,
            __package__=spec.parent,
            __spec__=spec,
        )
    vars(main).update({f"__{name}__": value for name, value in names.items()})
    sys.modules["__main__"] = main
    exec(code, vars(main))


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Without the frames of what runs the program."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    ours = [i for i, frame in enumerate(frames) if frame.tb_frame.f_code.co_filename == __file__]
    theirs = frames[ours[-1] + 1 :] if ours else frames
    error.__traceback__ = theirs[0] if theirs else None
    sys.__excepthook__(kind, error, error.__traceback__)


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise
    except ValueError:
        return None


def _code_of(spec: ModuleSpec) -> CodeType:
    code = spec.loader.get_code(spec.name) if isinstance(spec.loader, InspectLoader) else None
    if code is None:
        _stop(f"no code in {spec.name!r}")
    return code


def _is_source(path: str) -> bool:
    return os.path.isfile(path) and path.endswith((".py", ".pyw"))


def _set_first_path(path: str) -> None:
    """In the place of what `python -m` put there; it puts nothing there in its safe-path mode."""
    if not sys.flags.safe_path:
        sys.path[0] = path


def _stop(message: str) -> NoReturn:
    print(f"python -m tinker_compat: {message}", file=sys.stderr)
    sys.exit(USAGE_STATUS)
