"""Servers of our own: started, watched, started again, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from backend.generator.sglang.command import Served
from backend.generator.sglang.options import SglangOptions
from backend.generator.sglang.process import Launch, SupervisedProcess
from backend.generator.sglang.server import OwnServer, _free_port
from together_post_training.errors import PostTrainingError, Reason

# A server with a child of its own that does not listen to SIGTERM, as a scheduler that hangs.
_SERVER = """
import http.server, signal, subprocess, sys, os
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
print("child", child.pid, flush=True)
open({pids!r}, "a").write(f"{{os.getpid()}} {{child.pid}}\\n")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


class Bench:
    """A supervised server; `pids`: of each start, the server's and its child's."""

    def __init__(self, directory: Path, code: str | None = None) -> None:
        self._pids = directory / "pids"
        self._code = code

        self.process = SupervisedProcess(
            "test", self._launch, is_ready, directory, start_timeout_s=30, first_delay_s=0.05
        )

    @property
    def pids(self) -> list[tuple[int, int]]:
        lines = self._pids.read_text().splitlines() if self._pids.exists() else []
        return [(int(a), int(b)) for a, b in (line.split() for line in lines)]

    def _launch(self) -> Launch:
        port = _free_port()
        code = self._code or _SERVER.format(port=port, pids=str(self._pids))
        return Launch(
            url=f"http://127.0.0.1:{port}",
            command=[sys.executable, "-c", code],
            env=dict(os.environ),
        )


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.process.close()


def gone(pids: tuple[int, int]) -> bool:
    """A child whose parent was killed waits as a zombie until the system's first process takes note."""
    return all(
        not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        for pid in pids
    )


def test_a_server_answers_when_start_returns_and_is_gone_with_its_children_after_close(bench):
    state = bench.process.start()
    assert state.url is not None
    assert is_ready(state.url)
    (pids,) = bench.pids
    bench.process.close()
    until(lambda: gone(pids), timeout_s=30)
    assert bench.process.state.url is None
    assert "closed" in bench.process.unavailable().message


def test_a_server_that_is_killed_is_started_again_with_another_number(bench):
    first = bench.process.start()
    os.kill(bench.pids[0][0], signal.SIGKILL)
    until(lambda: bench.process.state.number == 2 and bench.process.state.url is not None)
    # What the first one had started does not live on, beside the second's.
    until(lambda: gone(bench.pids[0]))
    assert bench.process.state.url != first.url


def test_who_waits_for_a_change_is_woken(bench):
    async def wait() -> int:
        state = bench.process.state
        killer = threading.Timer(0.1, os.kill, (bench.pids[0][0], signal.SIGKILL))
        killer.start()
        while state.number == 1 or state.url is None:
            state = await asyncio.wait_for(bench.process.changed(state), 20)
        return state.number

    bench.process.start()
    assert asyncio.run(wait()) == 2


def test_a_server_that_does_not_start_fails_with_its_last_words(tmp_path):
    bench = Bench(tmp_path, "import sys; print('no such model'); sys.exit(3)")
    with pytest.raises(PostTrainingError, match="status 3") as error:
        bench.process.start()
    assert error.value.reason is Reason.UNAVAILABLE
    assert "no such model" in error.value.message
    bench.process.close()


@pytest.mark.parametrize(
    ("python", "says"), [("/no/python", "cannot be run"), (sys.executable, "No module named")]
)
def test_an_environment_without_sglang_is_said_so_with_what_to_do(tmp_path, python, says):
    served = Served(
        directory=tmp_path,
        window=64,
        max_lora_rank=8,
        has_tokenizer=False,
        has_experts=False,
        dtype="float32",
        gpu=None,
    )
    server = OwnServer("sglang-0", served, SglangOptions(python=python), tmp_path)
    with pytest.raises(PostTrainingError, match=says) as error:
        server.start()
    assert "--sglang-python" in error.value.message


def test_a_server_that_never_answers_is_ended(tmp_path):
    bench = Bench(tmp_path, "import time; time.sleep(600)")
    bench.process._start_timeout_s = 0.3
    with pytest.raises(PostTrainingError, match=r"not ready after 0\.3 s"):
        bench.process.start()
    bench.process.close()


def test_nothing_outlives_the_process_that_started_it(tmp_path):
    """SIGKILL, which nobody can prepare for."""
    code = f"""
        import time
        from pathlib import Path
        from tests.generator.sglang.test_process import Bench
        bench = Bench(Path({str(tmp_path)!r}))
        bench.process.start()
        print("started", flush=True)
        time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "started\n"
        (pids,) = Bench(tmp_path).pids
        assert not gone(pids)
        owner.kill()
    until(lambda: gone(pids), timeout_s=30)
