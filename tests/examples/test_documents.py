"""What the documents tell people to type, typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ADDRESS = "127.0.0.1:50051"
SERVE = ".venv/bin/together-post-training serve"


def blocks(document: str, language: str) -> list[str]:
    text = (REPOSITORY / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@contextmanager
def serving(arguments: list[str], store: Path) -> Iterator[str]:
    """The address of a server with these arguments, on a free port instead of the documents'."""
    arguments[arguments.index("--port") + 1] = "0"
    with open(store.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "backend", "serve", *arguments, "--store", str(store)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        announced = process.stdout.readline()
        found = re.search(r"grpc://(\S+?),", announced)
        assert found, announced + store.with_suffix(".log").read_text()
        yield found[1]
    finally:
        process.terminate()
        process.wait(60)


def bash(script: str, address: str) -> str:
    """Runs it as people would, in the repository, but with this environment's programs and this address."""
    bin_directory = Path(sys.executable).parent
    script = script.replace(".venv/bin/", f"{bin_directory}/").replace(ADDRESS, address)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def split_serve(document: str) -> tuple[list[str], list[str]]:
    """The arguments of the document's `serve` command, and its other commands."""
    scripts = blocks(document, "sh")
    (serve,) = [script for script in scripts if script.startswith(SERVE)]
    others = [script for script in scripts if script != serve and not script.startswith("make ")]
    arguments = serve.removeprefix(SERVE).replace('--store "$(mktemp -d)"', "")
    return arguments.split(), others


def test_recipes_of_the_wire_work_as_written(tmp_path: Path):
    arguments, scripts = split_serve("proto/README.md")
    with serving(arguments, tmp_path / "store") as address:
        output = bash("\n".join(scripts), address)
    # 2 x 0.2427 + 4.2427, and the four log-probabilities as od prints them.
    assert re.search(r'"loss:sum": 4\.728', output)
    assert re.search(r"-0\.2427\d* +-0\.2427\d* +-4\.2427\d* +-0\.2427", output)
    assert '"reason": "UNKNOWN_LOSS"' in output
    assert '"path": "tinker://on-paper/weights/first"' in output


def test_commands_of_the_readme_work_as_written(tmp_path: Path):
    arguments, scripts = split_serve("README.md")
    script = "\n".join(scripts).replace("dpo.py", f"dpo.py --steps 2 --output {tmp_path}")
    with serving(arguments, tmp_path / "store") as address:
        output = bash(script, address)
    assert "together_post_training.v1.TrainerService" in output
    assert "tinker://" in output
    assert '"state": "OPERATION_STATE_SUCCEEDED"' in output


def test_script_of_the_readme_learns_its_sentence(tmp_path: Path):
    (script,) = blocks("README.md", "python")
    environment = {**os.environ, "TOGETHER_POST_TRAINING_STORE": str(tmp_path / "store")}
    environment.pop("TOGETHER_POST_TRAINING_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    *losses, sentence = done.stdout.strip().splitlines()
    assert float(losses[-1].split()[1]) < float(losses[0].split()[1]) / 2
    assert sentence.startswith("To be, or not to be, that is the question.")
