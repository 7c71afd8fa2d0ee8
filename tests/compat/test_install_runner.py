"""`python -m tinker_compat` runs a program as `python` itself does, with ours under the name `tinker`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
RUNNER = ["-m", "tinker_compat"]
SCRIPT = """
import os, sys
names = ("__name__", "__file__", "__package__", "__cached__", "__doc__")
print(sys.argv, sys.path[0], {name: globals().get(name) for name in names})
print(__spec__ and (__spec__.name, __spec__.origin, __spec__.parent))
print(sys.modules["__main__"].__dict__ is globals(), sorted(globals()))
mode = sys.argv[1] if len(sys.argv) > 1 else ""
if mode == "fail":
    def inner():
        return 1 / 0
    inner()
if mode == "exit":
    sys.exit(3)
if mode == "say":
    sys.exit("said")
if mode == "import":
    import no_such_module
if mode == "hang":
    import time
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "below").mkdir()
    for name in ("script.py", "below/script.py", "module.py"):
        (tmp_path / name).write_text(SCRIPT)
    for package in ("package", "package/inner", "plain"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text("from . import inner\n" + SCRIPT)
    (tmp_path / "package" / "inner" / "module.py").write_text(SCRIPT)
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__main__.py").write_text(SCRIPT)
    (tmp_path / "broken.py").write_text("print('a'\n")
    # Tinker does without it, and it takes a second to import.
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "torch.py").write_text("raise ImportError('without')")
    (tmp_path / "failing").mkdir()
    (tmp_path / "failing" / "__init__.py").write_text("import no_such_module\n")
    return tmp_path


def environment(place: Path) -> dict[str, str]:
    # An older Tinker may go first.
    paths = (os.environ.get("PYTHONPATH"), str(REPOSITORY), str(place / "without"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def python(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(place),
        cwd=place,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("below/script.py", "a", "--b", "-m"),
        ("program", "x"),
        ("-m", "module", "a", "-c"),
        ("-m", "package", "a"),
        ("-c", SCRIPT, "a", "-h"),
    ],
    ids=lambda arguments: " ".join(a for a in arguments if a != SCRIPT),
)
def test_a_program_sees_what_it_sees_under_python(place, arguments):
    native, ours = python(place, *arguments), python(place, *RUNNER, *arguments)
    assert native.returncode == ours.returncode == 0, ours.stderr
    assert ours.stdout == native.stdout
    assert ours.stderr == ""


@pytest.mark.parametrize("mode", ["fail", "exit", "say"])
def test_a_script_ends_as_under_python_with_its_own_traceback(place, mode):
    native, ours = python(place, "script.py", mode), python(place, *RUNNER, "script.py", mode)
    assert ours.returncode == native.returncode != 0
    assert ours.stderr == native.stderr


def test_a_script_that_is_no_python_says_where(place):
    native, ours = python(place, "broken.py"), python(place, *RUNNER, "broken.py")
    assert ours.returncode == native.returncode == 1
    assert ours.stderr == native.stderr


@pytest.mark.parametrize("how", [["script.py"], ["-m", "module"]])
def test_a_script_that_is_interrupted_dies_of_it(place, how):
    process = subprocess.Popen(
        [sys.executable, *RUNNER, *how, "hang"],
        env=environment(place),
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while process.stdout.readline() != "ready\n":
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert errors.endswith("KeyboardInterrupt\n")
    assert "tinker_compat" not in errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.py"], "can't open file 'nowhere.py'"),
        (["plain"], "can't find '__main__' module in 'plain'"),
        (["-m", "no_such_module"], "no module named 'no_such_module'"),
        (["-m", "plain"], "'plain' is a package that cannot be run"),
        (["-m"], "usage:"),
        ([], "usage:"),
    ],
)
def test_what_cannot_be_run_is_named_with_status_2(place, arguments, said):
    done = python(place, *RUNNER, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_package_that_fails_to_import_shows_its_own_failure(place):
    done = python(place, *RUNNER, "-m", "failing")
    assert done.returncode == 1
    assert "failing/__init__.py" in done.stderr
    assert "No module named 'no_such_module'" in done.stderr


def test_safe_path_mode_is_kept(place):
    (place / "script.py").write_text("import sys; print(sys.path)")
    native, ours = python(place, "-P", "script.py"), python(place, "-P", *RUNNER, "script.py")
    assert ours.stdout == native.stdout


def test_help_is_shown(place):
    done = python(place, *RUNNER, "--help")
    assert done.returncode == 0
    assert "python -m tinker_compat -m module" in done.stdout


PROGRAM = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
import tinker
from tinker import SamplingClient
from together.post_training import tinker as swapped

def where():
    return [SamplingClient.__module__, tinker.ServiceClient.__module__, swapped.__name__]

def pool_of(method):
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method))

def grandchild():
    with pool_of("spawn") as pool:
        return pool.submit(where).result()

if __name__ == "__main__":
    ours = ["tinker_compat.sampling_client", "tinker_compat.service_client", "tinker_compat"]
    assert where() == ours
    for method in ("fork", "spawn", "forkserver"):
        with pool_of(method) as pool:
            assert pool.submit(where).result() == ours, method
    with pool_of("spawn") as pool:
        assert pool.submit(grandchild).result() == ours
    sys.argv = ["program of its own"]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(where) == ours
    print("all")
"""


@pytest.mark.parametrize("how", [["program.py"], ["-m", "program"]])
def test_processes_that_a_program_starts_see_ours_too(place, how):
    (place / "program.py").write_text(PROGRAM)
    done = python(place, *RUNNER, *how)
    assert done.stdout == "all\n", done.stderr
    assert done.stderr == ""


INSTALLS = """
import multiprocessing
if __name__ == "__main__":
    import tinker_compat
    tinker_compat.install()
from tinker import ServiceClient

def where():
    return ServiceClient.__module__

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert where() == pool.apply(where) == "tinker_compat.service_client"
    tinker_compat.uninstall()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(where) != "tinker_compat.service_client"
"""


def test_processes_follow_install_and_uninstall(place):
    (place / "installs.py").write_text(INSTALLS)
    done = python(place, "installs.py")
    assert (done.returncode, done.stderr) == (0, "")
