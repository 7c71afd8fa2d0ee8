"""What the processes that multiprocessing starts afresh do before they import the program."""

from __future__ import annotations

import multiprocessing.spawn
from collections.abc import Callable
from typing import Any

_KEY = "tinker_compat"
_setups: list[Callable[[], object]] = []
_their_preparation_data = multiprocessing.spawn.get_preparation_data


def set_up(setup: Callable[[], object]) -> None:
    """Has children call it: a function that pickle finds by its name.

    A child first unpickles what its parent tells it about the program, then imports that. There is no public place
    to add to it, so the function that gathers it is wrapped. (Forked children have what their parent has.)
    """
    if setup not in _setups:
        _setups.append(setup)
    multiprocessing.spawn.get_preparation_data = _preparation_data


def forget(setup: Callable[[], object]) -> None:
    if setup in _setups:
        _setups.remove(setup)
    if not _setups and multiprocessing.spawn.get_preparation_data is _preparation_data:
        multiprocessing.spawn.get_preparation_data = _their_preparation_data


class _Setup:
    """Unpickling it calls the function."""

    def __init__(self, setup: Callable[[], object]) -> None:
        self._setup = setup

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return self._setup, ()


def _preparation_data(name: str) -> dict[str, Any]:
    # What children do not know they ignore.
    return {_KEY: [_Setup(setup) for setup in _setups], **_their_preparation_data(name)}
