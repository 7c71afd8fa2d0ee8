"""How many of a machine's cores a pass takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def leaving_a_core() -> Iterator[None]:
    """Meanwhile torch computes with one thread less, if it would else take every core.

    Passes of several sessions at once mean several clients at work, and the server's own loop between them. Threads
    of a pass wait for each other after every operation, so one core that is taken away stops all: 8 clients of one
    sample of 16 tokens each got twice as many tokens a second on 2 cores with one thread as with two.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or num_threads < num_cores():
        yield
        return
    torch.set_num_threads(num_threads - 1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def num_cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
