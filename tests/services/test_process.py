"""The command line: started, ready, stopped, killed, as a child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backend.cli import main
from tests.services.harness import MODEL, Caller, cross_entropy, sample
from together_post_training.v1 import checkpoints_pb2, sessions_pb2
from together_post_training.v1 import operations_pb2 as o

ROOT = Path(__file__).parents[2]

# A trainer that takes its time, in a process of its own.
_SLOW_SERVER = """
import sys, time
from backend import cli
from backend.resources import engines
from backend.trainer import bigram, bigram_trainer
seconds = float(sys.argv.pop(1))
class Slow(bigram_trainer.BigramTrainer):
    def run(self, work):
        time.sleep(seconds)
        return super().run(work)
bigram_trainer.BigramTrainer = Slow
sys.exit(cli.main())
"""


@contextmanager
def started(
    store: Path, *options: str, program: tuple[str, ...] = ("-m", "backend"), **popen: object
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and the address that it wrote when it was ready."""
    ready, written = os.pipe()
    command = [sys.executable, *program, "serve", "--port", "0", "--store", str(store)]
    command += ["--model", MODEL, "--ready-fd", str(written), *options]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        pass_fds=[written],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    os.close(written)
    try:
        with os.fdopen(ready) as pipe:
            address = pipe.readline().strip()
        assert address, process.communicate()
        yield process, address
    finally:
        process.kill()
        process.communicate()


def slow(seconds: float) -> tuple[str, ...]:
    return ("-c", _SLOW_SERVER, str(seconds))


def test_server_of_a_numpy_model_is_ready_fast_and_prints_one_line(tmp_path: Path):
    """Without torch; the goal is 2 s, and this machine may be busy."""
    start = time.monotonic()
    with started(tmp_path) as (process, address):
        assert time.monotonic() - start < 10
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == f"serving {MODEL} on grpc://{address}, store {tmp_path}\n"
        Caller(address).session().train([3, 4])
        maps = Path(f"/proc/{process.pid}/maps")
        if maps.exists():
            assert "libtorch" not in maps.read_text()


def test_sigterm_lets_the_running_operation_end_and_exits_with_0(tmp_path: Path):
    """TR-05."""
    with started(tmp_path, "--grace", "10", program=slow(1.0)) as (process, address):
        caller = Caller(address)
        run = caller.session()
        run.save("whole")
        running = run.submit("Forward", loss=cross_entropy(), samples=[sample([1, 2])])
        queued = run.submit("Forward", loss=cross_entropy(), samples=[sample([1, 2])])
        polls = [
            caller.operations.WaitOperation.future(o.WaitOperationRequest(name=op.name))  # pyright: ignore
            for op in (running, running, queued)
        ]
        time.sleep(0.3)
        start = time.monotonic()
        process.terminate()
        assert polls[0].result(5).state == o.OPERATION_STATE_SUCCEEDED
        assert polls[1].result(5).state == o.OPERATION_STATE_SUCCEEDED
        error = polls[2].exception(5)
        assert error.code().name == "UNAVAILABLE"
        assert process.wait(10) == 0
        assert time.monotonic() - start < 5
    with started(tmp_path) as (_, address):
        caller = Caller(address)
        assert caller.wait(running).state == o.OPERATION_STATE_SUCCEEDED
        assert caller.wait(queued).error.reason == "SESSION_LOST"
        listed = caller.checkpoints.ListCheckpoints(checkpoints_pb2.ListCheckpointsRequest())
        assert [c.path for c in listed.checkpoints] == [run.path("whole")]


def test_sigterm_exits_with_0_after_the_grace_though_an_engine_computes_on(tmp_path: Path):
    with started(tmp_path, "--grace", "0.5", program=slow(60)) as (process, address):
        run = Caller(address).session()
        run.submit("Forward", loss=cross_entropy(), samples=[sample([1, 2])])
        time.sleep(0.3)
        start = time.monotonic()
        process.terminate()
        assert process.wait(10) == 0
        assert time.monotonic() - start < 5


def test_second_sigterm_exits_at_once(tmp_path: Path):
    with started(tmp_path, "--grace", "60", program=slow(60)) as (process, address):
        run = Caller(address).session()
        run.submit("Forward", loss=cross_entropy(), samples=[sample([1, 2])])
        time.sleep(0.3)
        process.terminate()
        time.sleep(0.3)
        assert process.poll() is None
        process.terminate()
        assert process.wait(5) == 128 + signal.SIGTERM


def test_killed_server_leaves_a_store_that_the_next_one_reads(tmp_path: Path):
    """kill -9 while an operation runs."""
    with started(tmp_path, program=slow(60)) as (process, address):
        run = Caller(address).session(id="mine")
        run.save("a")
        unfinished = run.submit("Forward", loss=cross_entropy(), samples=[sample([1, 2])])
        process.kill()
        process.wait()
    with started(tmp_path) as (_, address):
        caller = Caller(address)
        assert caller.wait(unfinished).error.reason == "SESSION_LOST"
        shown = caller.sessions.GetSession(sessions_pb2.GetSessionRequest(id="mine"))
        assert shown.state == sessions_pb2.SESSION_STATE_LOST
        caller.session(resume_from=run.path("a"), load_optimizer=True).train([3, 4])


def test_child_server_ends_when_its_parent_closes_the_pipe(tmp_path: Path):
    with started(tmp_path, "--parent-pipe") as (process, address):
        Caller(address).session().train([3, 4])
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0
        process.stdin = None


def test_child_server_ends_when_its_parent_is_killed(tmp_path: Path):
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time\n"
            "command = [sys.executable, '-m', 'backend', 'serve', '--port', '0', '--parent-pipe']\n"
            f"command += ['--model', '{MODEL}', '--store', sys.argv[1]]\n"
            "child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
            "child.stdout.readline()\n"
            "print(child.pid, flush=True)\n"
            "time.sleep(60)\n",
            str(tmp_path),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while _is_alive(child):
        assert time.monotonic() < deadline, "the child goes on without its parent"
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(") ")[2][0] != "Z"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "--load-on-demand"),
        (["--model", MODEL, "--host", "0.0.0.0"], "--allow-anonymous"),
        (["--model", MODEL, "--host", "example.org"], "does not check API keys yet"),
        (["--model", MODEL, "--model", f"{MODEL}=elsewhere"], "is given twice"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], says: str
):
    assert main(["serve", "--store", str(tmp_path), *options]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_store_that_cannot_be_made_ends_the_start_with_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    (tmp_path / "file").touch()
    for store in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["serve", "--model", MODEL, "--port", "0", "--store", str(store)]) == 1
        assert f"error: The store {store} cannot be made" in capsys.readouterr().err


def test_unknown_model_ends_the_start_with_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    options = ["serve", "--store", str(tmp_path), "--port", "0", "--model"]
    with pytest.raises(SystemExit):
        main([*options, "name="])
    assert "NAME or NAME=PATH" in capsys.readouterr().err
    run = subprocess.run(
        [sys.executable, "-m", "backend", *options, "no/such-model"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1
    assert "error: Model 'no/such-model' was not found" in run.stderr
    assert "Traceback" not in run.stderr


def test_doctor_says_what_is_installed_and_what_an_import_gives(
    capsys: pytest.CaptureFixture[str],
):
    status = main(["doctor"])
    out = capsys.readouterr().out
    assert "torch" in out
    assert "import together.post_training.tinker:" in out
    assert status in (0, 1)
