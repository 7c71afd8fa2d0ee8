"""The server that a client starts for itself. The real one, with the numpy model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from together_post_training.client.embedded import command, environment

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import tinker_compat as tinker

service = tinker.ServiceClient()
print("made", flush=True)
client = service.create_lora_training_client("builtin:bigram16", rank=2).result()
other = tinker.ServiceClient()
print(other.get_server_capabilities().supported_models[0].model_name, flush=True)
print(service.holder.connection.address == other.holder.connection.address, flush=True)
{then}
"""


def script_environment(store: Path) -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if not k.endswith(("_BASE_URL", "_ADDRESS"))}
    return ours | {
        "PYTHONPATH": str(REPOSITORY),
        "TOGETHER_POST_TRAINING_STORE": str(store),
        "TMPDIR": str(store.parent),
    }


def run(then: str, store: Path, **settings) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(then=then)],
        env=script_environment(store),
        capture_output=True,
        text=True,
        timeout=90,
        **settings,
    )


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def owner(store: Path) -> int:
    return int((store / "lock").read_text())


def wait_for_end(pid: int, timeout_s: float = 20) -> None:
    end_s = time.monotonic() + timeout_s
    while is_running(pid):
        assert time.monotonic() < end_s, f"process {pid} is still running"
        time.sleep(0.05)


def test_embedded_server_says_in_one_line_where_it_is_and_ends_with_the_script(tmp_path):
    store = tmp_path / "store"
    ended = run("", store)
    assert ended.stdout.split() == ["made", "builtin:bigram16", "True"], ended.stderr
    (line,) = ended.stderr.splitlines()
    assert "no address configured" in line
    assert "grpc://127.0.0.1:" in line
    assert str(store) in line
    assert not is_running(owner(store))
    assert list(tmp_path.glob("*.log")) == [], "the log of a good run is removed"


def test_embedded_server_ends_when_the_script_is_killed(tmp_path):
    store = tmp_path / "store"
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(then="import time; time.sleep(60)")],
        env=script_environment(store),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    while child.stdout.readline().strip() != "True":
        pass
    server = owner(store)
    assert is_running(server)
    child.send_signal(signal.SIGKILL)
    child.wait()
    wait_for_end(server)


def test_embedded_server_that_dies_is_reported_with_the_end_of_its_log(tmp_path):
    store = tmp_path / "store"
    then = f"""
import os, signal
os.kill(int(open({str(store / "lock")!r}).read()), signal.SIGKILL)
try:
    client.forward([tinker.Datum(tinker.ModelInput.from_ints([3]), dict(target_tokens=[4]))], "cross_entropy").result()
except tinker.APIConnectionError as error:
    print(str(error))
"""
    ended = run(then, store)
    assert "The embedded server has ended (exit status -9)" in ended.stdout, ended.stderr
    assert "serving" in ended.stdout, "the end of its log"


def test_embedded_server_that_cannot_start_is_reported_with_its_own_words(tmp_path):
    store = tmp_path / "store"
    store.write_text("a file where the directory should be")
    ended = run("", store)
    assert "made" in ended.stdout, "making a client starts nothing"
    assert "APIConnectionError: The embedded server did not start" in ended.stderr
    assert str(store) in ended.stderr


def test_embedded_server_finishes_what_nobody_waited_for(tmp_path):
    store = tmp_path / "store"
    then = """
data = [tinker.Datum(tinker.ModelInput.from_ints([3, 4]), dict(target_tokens=[4, 5]))]
for _ in range(20):
    client.forward_backward(data, "cross_entropy")
    client.optim_step(tinker.AdamParams())
client.save_state("last")
"""
    ended = run(then, store)
    assert ended.returncode == 0, ended.stderr
    assert list(store.glob("checkpoints/*/weights/last")), ended.stderr


def test_embedded_server_is_not_the_backend_of_the_directory_the_script_is_in(tmp_path):
    (tmp_path / "backend").mkdir()
    (tmp_path / "backend" / "__init__.py").write_text("raise SystemExit('the wrong backend')")
    ended = run("", tmp_path / "store", cwd=tmp_path)
    assert "builtin:bigram16" in ended.stdout, ended.stderr


def test_embedded_server_runs_with_passive_waiting_unless_told_otherwise():
    assert environment({})["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment({"OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"] == "ACTIVE"
    assert environment({"PYTHONPATH": "x"})["PYTHONPATH"].split(os.pathsep)[1] == "x"
    assert command(7, "there")[-2:] == ["--store", "there"]
