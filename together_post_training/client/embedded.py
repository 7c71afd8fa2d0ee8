"""A server of one's own: started in a child process on first use, ended with this process."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from together_post_training.client.address import OWN_VARIABLE, Address
from together_post_training.errors import ConnectionLostError

STORE_VARIABLE = "TOGETHER_POST_TRAINING_STORE"
_PACKAGES = Path(__file__).resolve().parents[2]
# The child gives its running work a few seconds when it loses its parent.
_STOP_TIMEOUT_S = 15.0
_LOG_TAIL_LINES = 15
_NEEDS = (
    "It needs the server's packages (pip install 'together-post-training[server]') and a directory to keep its work "
    f"in: for another one, set {STORE_VARIABLE}; to use a server that runs already, {OWN_VARIABLE}."
)
_GO_ON = "Its checkpoints are kept: run the script again and go on from the last one."


class EmbeddedServer:
    """One server for all clients of this process that were given no address.

    Loads whichever model it is asked for. The child holds the other end of a pipe of ours, and ends when this
    process does, however that comes. Its output goes to a file, which is removed when it ended well.
    """

    def __init__(self) -> None:
        self._starting = asyncio.Lock()
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._address: Address | None = None
        self._log: Path | None = None
        atexit.register(self.stop)

    async def locate(self) -> Address:
        """Starts it if it is not running yet.

        Raises:
            ConnectionLostError: with the end of its log, when it does not start.
        """
        async with self._starting:
            if self._address is None:
                self._address = await asyncio.to_thread(self._start)
            return self._address

    def check(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise ConnectionLostError(self._ended("The embedded server has ended", _GO_ON))

    def stop(self) -> None:
        """Ends the child and waits for it. Called at exit."""
        process = self._process
        # A forked child of this process has the object, but not the server.
        if process is None or os.getpid() != self._owner:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode == 0 and self._log is not None:
            self._log.unlink(missing_ok=True)

    def _start(self) -> Address:
        handle, name = tempfile.mkstemp(prefix="together-post-training-", suffix=".log")
        self._log = Path(name)
        ready, child_end = os.pipe()
        try:
            with os.fdopen(handle, "wb") as log:
                self._process = subprocess.Popen(
                    command(child_end, os.environ.get(STORE_VARIABLE)),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment(os.environ),
                    pass_fds=[child_end],
                    # Ctrl-C is for this process, which may still want to save.
                    start_new_session=True,
                )
        finally:
            os.close(child_end)
        with os.fdopen(ready) as announced:
            target = announced.readline().strip()
        if not target:
            self._process.wait()
            raise ConnectionLostError(self._ended("The embedded server did not start", _NEEDS))
        print(
            f"together-post-training: no address configured; embedded server {self._announcement(target)}, "
            f"log {self._log} (kept if it fails)",
            file=sys.stderr,
            flush=True,
        )
        return Address(target=target)

    def _announcement(self, target: str) -> str:
        """Its own line about itself: models, address, store."""
        lines = self._read_log()
        return next((line for line in lines if line.startswith("serving ")), f"on {target}")

    def _ended(self, what: str, advice: str) -> str:
        assert self._process is not None
        tail = "\n".join(self._read_log()[-_LOG_TAIL_LINES:])
        return (
            f"{what} (exit status {self._process.returncode}). {advice} "
            f"The end of its log, {self._log}:\n{tail}"
        )

    def _read_log(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines() if self._log is not None else []


def command(ready_fd: int, store: str | None) -> list[str]:
    """-P: a directory that happens to be called `backend` where the script runs is not the server."""
    serve = [sys.executable, "-P", "-m", "backend", "serve", "--embedded", "--load-on-demand"]
    serve += ["--port", "0", "--parent-pipe", "--ready-fd", str(ready_fd)]
    return serve + (["--store", store] if store else [])


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The child imports the server that this client was installed with."""
    path = [os.fspath(_PACKAGES), *filter(None, [environ.get("PYTHONPATH")])]
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        **environ,
        "PYTHONPATH": os.pathsep.join(path),
    }


@functools.cache
def embedded_server() -> EmbeddedServer:
    """This process's. A forked child shares its parent's, which it cannot reach (see loop.py)."""
    return EmbeddedServer()
