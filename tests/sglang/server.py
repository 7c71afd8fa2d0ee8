"""A real SGLang server as a child process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.sglang.environment import ARGUMENTS, VARIABLES, Installation, end_of

_START_S = 240.0  # It takes 20 s on two idle cores.
_STOP_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """`log`: what the server and its children write."""

    url: str
    model: Path
    log: Path
    process: subprocess.Popen[bytes]

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120)


@contextlib.contextmanager
def running(sglang: Installation, model: Path, log: Path, *arguments: str) -> Iterator[Server]:
    """A server that is ready; ended with all its children, whatever happens.

    Raises:
        RuntimeError: it ended, or was not ready in time; with the end of its log.
    """
    port = _free_port()
    process = _spawn(
        sglang, log, f"--model-path={model}", "--host=127.0.0.1", f"--port={port}", *arguments
    )
    server = Server(url=f"http://127.0.0.1:{port}", model=model, log=log, process=process)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        _end(process)


def _spawn(sglang: Installation, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [str(sglang.python), "-m", "sglang.launch_server", *ARGUMENTS, *arguments],
            env={**os.environ, **VARIABLES, **sglang.variables},
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # A process group of its own, which _end ends.
        )


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        status = server.process.poll()
        if status is not None:
            raise RuntimeError(f"SGLang ended with status {status}:\n{end_of(server.log)}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/ready", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"SGLang was not ready after {_START_S:g} s:\n{end_of(server.log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the parent, which ends its children; what is left of the group is killed."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
