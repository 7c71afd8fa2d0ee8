"""What the server wants the caller to know though calls succeed."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class ServerWarnings:
    """The texts that answers brought; each is given out once. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._new: list[str] = []

    def note(self, texts: Iterable[str]) -> None:
        with self._lock:
            for text in texts:
                if text not in self._seen:
                    self._seen.add(text)
                    self._new.append(text)

    def take(self) -> list[str]:
        """Those that came since it was last asked."""
        with self._lock:
            taken, self._new = self._new, []
        return taken
