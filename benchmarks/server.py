"""A server in a child process for a benchmark: started, timed, stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

READY_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """ready_s: from the start of the process until every model is loaded and the server answers."""

    address: str
    ready_s: float
    pid: int


@contextmanager
def serve(*models: str, store: Path, arguments: Sequence[str] = ()) -> Iterator[Served]:
    ready, written = os.pipe()
    command = [sys.executable, "-m", "backend", "serve", "--port", "0", "--store", str(store)]
    command += ["--ready-fd", str(written), "--log-level", "warning", *arguments]
    for model in models:
        command += ["--model", model]
    start = time.perf_counter()
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.Popen(command, pass_fds=[written], env=environment)
    os.close(written)
    try:
        with os.fdopen(ready) as pipe:
            address = pipe.readline().strip()
        if not address:
            raise RuntimeError(f"the server ended with status {process.wait()} before it was ready")
        ready_s = time.perf_counter() - start
        yield Served(address=address, ready_s=ready_s, pid=process.pid)
    finally:
        process.terminate()
        process.wait(timeout=READY_TIMEOUT_S)
