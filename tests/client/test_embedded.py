"""The server that a client starts for itself. The real one, with the numpy model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    """A zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(") ")[2][0] != "Z"


def owner(store: Path, part: str = "embedded-1") -> int:
    return int((store / part / "lock").read_text())


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
os.kill(int(open({str(store / "embedded-1" / "lock")!r}).read()), signal.SIGKILL)
try:
    client.forward([tinker.Datum(tinker.ModelInput.from_ints([3]), dict(target_tokens=[4]))], "cross_entropy").result()
except tinker.APIConnectionError as error:
    print(str(error))
"""
    ended = run(then, store)
    assert "The embedded server has ended (exit status -9)" in ended.stdout, ended.stderr
    assert "serving" in ended.stdout, "the end of its log"
    assert "pip install" not in ended.stdout, "it did start"


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


@contextmanager
def running(then: str, store: Path) -> Iterator[subprocess.Popen[str]]:
    """A script that has made its client, and says what `then` prints."""
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(then=then)],
        env=script_environment(store),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        said(child, "True")
        yield child
    finally:
        child.kill()
        child.communicate()


def said(child: subprocess.Popen[str], start: str) -> str:
    """The first line from now on that starts so."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(start):
            return line.strip()
    raise AssertionError(f"the script ended without saying {start!r}")


TRAIN = """
def steps(client, number):
    data = [tinker.Datum(tinker.ModelInput.from_ints([3, 4]), dict(target_tokens=[9, 1]))]
    for _ in range(number):
        result = client.forward_backward(data, "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
    return result.result().metrics["loss:sum"]
"""
FIRST = (
    TRAIN
    + """
steps(client, 2)
print(client.save_state("two").result().path, flush=True)
input()
print("loss", steps(client, 3), flush=True)
input()
"""
)
SECOND = (
    TRAIN
    + """
steps(client, 1)
resumed = service.create_training_client_from_state_with_optimizer({path!r}).result()
print("loss", steps(resumed, 3), flush=True)
input()
"""
)


def test_two_scripts_at_once_train_and_share_their_checkpoints(tmp_path):
    """Both go on from the same checkpoint at the same time, and end with the same loss."""
    store = tmp_path / "store"
    with running(FIRST, store) as first:
        path = said(first, "tinker://")
        with running(SECOND.replace("{path!r}", repr(path)), store) as second:
            assert first.stdin is not None
            print(file=first.stdin, flush=True)
            losses = [said(script, "loss") for script in (first, second)]
            assert is_running(owner(store, "embedded-1"))
            assert is_running(owner(store, "embedded-2"))
    assert losses[0] == losses[1]
    assert (
        store / "checkpoints" / path.removeprefix("tinker://") / "adapter_config.json"
    ).is_file()


def test_part_of_a_killed_server_is_taken_by_the_next_and_its_results_can_be_read(tmp_path):
    store = tmp_path / "store"
    then = "client.save_state('a').result(); print(client.model_id, flush=True); input()"
    with running(then, store) as first:
        assert first.stdout is not None
        session = first.stdout.readline().strip()
        server = owner(store)
        os.kill(server, signal.SIGKILL)
        wait_for_end(server)
        read = f"""
from together_post_training.v1 import operations_pb2
name = "sessions/{session}/operations/1"
request = operations_pb2.GetOperationRequest(name=name)
call = service.holder.connection.call("operations.GetOperation", request)
print(service.holder.start(call).result().save_checkpoint.path)
"""
        ended = run(read, store)
    assert f"tinker://{session}/weights/a" in ended.stdout, ended.stderr
    assert [part.name for part in store.glob("embedded-*")] == ["embedded-1"]


def test_embedded_server_lists_models_before_any_is_loaded(tmp_path):
    listing = """
import tinker_compat as tinker
for model in tinker.ServiceClient().get_server_capabilities().supported_models:
    print(model.model_name, model.max_context_length)
"""
    ended = subprocess.run(
        [sys.executable, "-c", listing],
        env=script_environment(tmp_path / "store"),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert set(ended.stdout.splitlines()) >= {"builtin:tiny 1024", "builtin:bigram16 1024"}


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
