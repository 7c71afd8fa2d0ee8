"""Warnings that came with results, shown where a result is handed to the caller."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable

from together_post_training.client.loop import on_background_loop
from together_post_training.client.server_warnings import ServerWarnings

logger = logging.getLogger(__name__)

# Frames between the caller's line and here.
_OURS = ("tinker_compat", "asyncio", "concurrent")


def show_new(of: ServerWarnings) -> None:
    """In the caller's thread. On the client's own loop, which looks at results too, they wait for the next one."""
    if not on_background_loop():
        show(of.take())


def show(texts: Iterable[str]) -> None:
    """As UserWarnings of the caller's line.

    Where a filter makes errors of them, as `python -W error` does, they are logged instead: the result that they came
    with would be lost.
    """
    for text in texts:
        try:
            warnings.warn(text, UserWarning, stacklevel=_level_of_caller())
        except UserWarning:
            logger.warning("%s", text)


def _level_of_caller() -> int:
    """For a warning that `show` gives."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals) in _OURS:
        level, frame = level + 1, frame.f_back
    return level


def _package(globals_: dict) -> str:
    return globals_.get("__name__", "").partition(".")[0]
