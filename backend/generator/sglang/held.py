"""What stays for as long as somebody holds it, also when it was dropped meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Held:
    """Owned by the event loop. `remove` is called once: when it was dropped and nobody holds it."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove = remove
        self._num_holders = 0
        self._is_dropped = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        self._num_holders += 1
        try:
            yield
        finally:
            self._num_holders -= 1
            self._remove_unheld()

    def drop(self) -> None:
        self._is_dropped = True
        self._remove_unheld()

    def _remove_unheld(self) -> None:
        if self._is_dropped and not self._num_holders:
            self._remove()
