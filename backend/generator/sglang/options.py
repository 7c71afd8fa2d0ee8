"""What the user chose about SGLang."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

SGLANG = "sglang"
EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions:
    """How samples come from SGLang."""

    urls: tuple[str, ...] = ()
    """Servers that run already. None: this process starts its own."""
    python: str = sys.executable
    """The interpreter that has SGLang, for servers of our own."""
    arguments: tuple[str, ...] = ()
    """More of `sglang.launch_server`'s arguments; they override those that we choose."""
    env: tuple[tuple[str, str], ...] = ()
    """More environment variables for servers of our own."""
    directory: Path | None = None
    """Where snapshots are written for the servers to read, under the same path as here; None: in the store."""
    max_running: int = 1024
    """Requests that are sent to one server at a time; more wait here, and are taken fairly."""
    start_timeout_s: float = 1800.0
    """How long a server of our own may take to load the model."""
    restart_wait_s: float = 180.0
    """How long a call waits for a server that has ended or cannot be reached."""


def parse_generator(text: str) -> tuple[str, ...] | None:
    """`embedded`, `sglang`, or `sglang:URL[,URL...]`: None for the embedded generator, else the URLs.

    Raises:
        ValueError: for anything else.
    """
    kind, _, addresses = text.partition(":")
    if text == EMBEDDED:
        return None
    if text == SGLANG:
        return ()
    urls = tuple(url.strip().rstrip("/") for url in addresses.split(","))
    if kind != SGLANG or not all(url.startswith(("http://", "https://")) for url in urls):
        raise ValueError(
            f"--generator {text!r}: expected embedded, sglang, or sglang:http://HOST:PORT[,http://HOST:PORT...]"
        )
    return urls
