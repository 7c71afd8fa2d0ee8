"""Runs a recipe as its user would: a command in a shell, against a server."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tinker_compat as tinker

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = REPOSITORY / ".venv-cookbook"
Version = Literal["newest", "older"]
_SERVER_STOP_S = 60.0
_TAIL_CHARACTERS = 6000
_SERVER_TAIL_CHARACTERS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a recipe wrote. output: standard output and error together."""

    log: Path
    output: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return _lines(self.log / "metrics.jsonl")

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        return _lines(self.log / "checkpoints.jsonl")

    def series(self, name: str) -> list[float]:
        """A metric over the steps that have it."""
        return [row[name] for row in self.metrics if name in row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cookbook:
    """Where recipes run, and against what.

    Args:
        hub: their working directory.
        address: of the server; None: each recipe starts one of its own.
        store: where it keeps checkpoints.
        scratch: home directory and caches of the recipes.
    """

    hub: Path
    address: str | None
    store: Path
    scratch: Path

    def logprobs(self, path: str, tokens: Sequence[int]) -> list[float]:
        """What the server computes with a saved sampler, for each token but the first."""
        with tinker.ServiceClient(base_url=self.address) as service:
            sampler = service.create_sampling_client(model_path=path)
            prompt = tinker.ModelInput.from_ints(list(tokens))
            logprobs = sampler.compute_logprobs(prompt).result()
        return [logprob for logprob in logprobs if logprob is not None]

    def run(
        self,
        recipe: str,
        *settings: str,
        log: Path,
        version: Version = "newest",
        timeout_s: float = 180.0,
    ) -> Run:
        """`python -m tinker_compat -m tinker_cookbook.recipes.<recipe> <settings> log_path=<log>`.

        Raises:
            AssertionError: with the end of what it wrote, when it fails or takes longer.
        """
        output = self.python(
            "-m",
            "tinker_compat",
            "-m",
            f"tinker_cookbook.recipes.{recipe}",
            *settings,
            f"log_path={log}",
            version=version,
            timeout_s=timeout_s,
        )
        return Run(log=log, output=output)

    def python(self, *arguments: str, version: Version = "newest", timeout_s: float = 180.0) -> str:
        """Runs the environment's interpreter in the hub; what it wrote.

        Raises:
            AssertionError: with the end of what it wrote, when it fails or takes longer.
        """
        command = [str(ENVIRONMENT / "bin" / "python"), "-P", *arguments]
        try:
            done = subprocess.run(
                command,
                cwd=self.hub,
                env=self._variables(version),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as expired:
            outcome = f"was not done after {timeout_s:g} s"
            raise AssertionError(self._report(arguments, outcome, expired.stdout)) from None
        outcome = f"ended with status {done.returncode}"
        assert done.returncode == 0, self._report(arguments, outcome, done.stdout)
        return done.stdout.decode(errors="replace")

    def _report(self, arguments: Sequence[str], outcome: str, output: bytes | None) -> str:
        text = (output or b"").decode(errors="replace")
        report = f"python {' '.join(arguments)} {outcome}:\n{text[-_TAIL_CHARACTERS:]}"
        if self.address is None:
            return report
        log = _log_of(self.store).read_text(errors="replace")
        return f"{report}\nThe end of the server's log:\n{log[-_SERVER_TAIL_CHARACTERS:]}"

    def _variables(self, version: Version) -> dict[str, str]:
        path = [str(REPOSITORY)]
        if version == "older":
            path.insert(0, str(ENVIRONMENT / "older"))
        return {
            **_offline(self.hub),
            "PYTHONPATH": os.pathsep.join(path),
            **({"TINKER_BASE_URL": self.address} if self.address is not None else {}),
            "TOGETHER_POST_TRAINING_STORE": str(self.store),
            "TINKER_API_KEY": "any",
            "WANDB_MODE": "disabled",
            "TOGETHER_POST_TRAINING_CACHE": str(self.scratch / "cache"),
            "HOME": str(self.scratch),
        }


@contextmanager
def running_server(hub: Path, store: Path) -> Iterator[str]:
    """The address of a server that loads what the hub has, and lives as long as the block."""
    ready, child_end = os.pipe()
    command = [
        str(REPOSITORY / ".venv/bin/python"),
        "-P",
        "-m",
        "backend",
        "serve",
        "--load-on-demand",
    ]
    command += ["--port", "0", "--store", str(store), "--ready-fd", str(child_end), "--parent-pipe"]
    log = _log_of(store)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=hub,
            env={**_offline(hub), "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[child_end],
        )
    os.close(child_end)
    with os.fdopen(ready) as announced:
        address = announced.readline().strip()
    assert address, log.read_text(errors="replace")
    try:
        yield f"grpc://{address}"
    finally:
        process.terminate()
        process.wait(_SERVER_STOP_S)


def _offline(hub: Path) -> dict[str, str]:
    """Nothing but this machine is reached: what tries anyway fails at once, at a port that nobody listens on."""
    nowhere = "http://127.0.0.1:9"
    return {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(hub / ".hf"),
        "http_proxy": nowhere,
        "https_proxy": nowhere,
        "no_proxy": "127.0.0.1,localhost",
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _log_of(store: Path) -> Path:
    return store.parent / "server.log"
