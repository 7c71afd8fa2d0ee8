"""A server in a child process for a benchmark: started, timed, stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

READY_TIMEOUT_S = 120.0


@contextmanager
def serve(*models: str, store: Path) -> Iterator[tuple[str, float]]:
    """(address, seconds from the start of the process until every model is loaded and the server answers)."""
    ready, written = os.pipe()
    command = [sys.executable, "-m", "backend", "serve", "--port", "0", "--store", str(store)]
    command += ["--ready-fd", str(written), "--log-level", "warning"]
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
        yield address, time.perf_counter() - start
    finally:
        process.terminate()
        process.wait(timeout=READY_TIMEOUT_S)
