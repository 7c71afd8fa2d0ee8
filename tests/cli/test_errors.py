"""What goes wrong is told in one line, with a status that scripts can tell apart."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys

import pytest

from tests.cli.conftest import Typed
from tests.packaging.environments import REPOSITORY
from tests.services.harness import Running
from together_post_training.cli.execute import execute
from together_post_training.cli.output import say


def test_without_a_server_both_ways_to_name_one_are_told(typed: Typed):
    outcome = typed("run", "list")
    assert outcome.status == 2
    assert "--address" in outcome.err
    assert "TOGETHER_POST_TRAINING_ADDRESS" in outcome.err


@pytest.mark.parametrize(
    "variable", ["TOGETHER_POST_TRAINING_ADDRESS", "TINKER_BASE_URL", "TOGETHER_BASE_URL"]
)
def test_server_is_found_where_service_client_finds_it(
    typed: Typed, server: Running, monkeypatch, variable
):
    monkeypatch.setenv(variable, f"grpc://{server.address}")
    assert typed("model", "list", "-f", "json").document["models"]


def test_server_that_does_not_answer_is_told_within_seconds(typed: Typed, monkeypatch):
    monkeypatch.setenv("TOGETHER_POST_TRAINING_CONNECT_TIMEOUT", "0.5")
    outcome = typed("run", "list", "--address", "127.0.0.1:1")
    assert outcome.status == 1
    assert outcome.err.startswith("error: Cannot reach grpc://127.0.0.1:1")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "list", "--address", "https://x.example"), "--address is a web address"),
        (("run", "list", "--address", "nowhere"), "--address is 'nowhere'"),
        (("run", "list", "--limit", "-1"), "'-1': it must be a whole number, 0 or above"),
        (("checkpoint", "set-ttl", "tinker://a/weights/b"), "--ttl SECONDS or --remove"),
        (("checkpoint", "set-ttl", "tinker://a/weights/b", "--ttl", "0"), "1 or above"),
        (("checkpoint", "set-ttl", "tinker://a/weights/b", "--ttl", "9" * 20), "at most 11 digits"),
        (("run", "list", "--limit", "9" * 5000), "at most 11 digits"),
        (("run", "info", ""), "it is empty"),
        (("session", "info", ""), "it is empty"),
        (("checkpoint", "list", "--run-id", ""), "it is empty"),
        (("checkpoint", "copy", "tinker://a/weights/b", ""), "it is empty"),
        (("checkpoint", "delete", "-y", "--run-id", ""), "it is empty"),
        (("checkpoint", "delete", "-y"), "one of the two"),
        (("checkpoint", "delete", "-y", "tinker://a/weights/b", "--run-id", "a"), "one of the two"),
        (("checkpoint", "delete", "-y", "tinker://a/weights/b", "--before", "2026-01-01"), "need --run-id"),
        (("checkpoint", "delete", "-y", "--run-id", "a", "--before", "soon"), "'soon' is no date"),
        (("checkpoint", "download", "tinker://a/weights/b", "--archive", "x.zip"), "must end in .tar"),
        (("checkpoint", "download", "tinker://a/weights/b", "--archive", "x.tar", "-o", "."), "give one"),
        (("checkpoint", "push-hf", "tinker://a/weights/b", "--repo", "me/x", "--public"), "hf upload"),
        (("session", "export-trace", "a", "--url-only"), "no traces"),
        (("--format", "json", "doctor"), "say nothing about doctor"),
        (("run",), "required: action"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_has_status_2(typed: Typed, arguments, said):
    outcome = typed(*arguments)
    assert outcome.status == 2
    assert outcome.out == ""
    assert said in outcome.err
    assert "embedded" not in outcome.err


def test_version_asks_a_server_only_where_one_is_named(typed: Typed, server: Running):
    assert typed("version").out.startswith("together-post-training ")
    versions = typed("version", "-f", "json", "--address", server.address).document
    assert versions.keys() == {"version", "tinker", "server"}


def test_reader_that_has_had_enough_gets_no_traceback(server: Running):
    command = (
        f"{sys.executable} -m together_post_training model list --address {server.address} | true"
    )
    done = subprocess.run(
        ["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""


def test_letters_that_the_output_has_none_of_are_escaped(monkeypatch):
    data = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(data, encoding="ascii"))
    show = argparse.Namespace(format=None, show=lambda options: say(options.format, None, "é本"))
    assert execute(show) == 0
    assert data.getvalue() == b"\\xe9\\u672c\n"


# What a client-only install does not have.
WITHOUT_SERVER = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "peft", "psutil", "safetensors", "huggingface_hub",
                                  "tokenizers", "grpc_health", "grpc_reflection", "pyrage"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from backend.cli import main
sys.exit(main(sys.argv[1:]))
"""


def without_server(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_SERVER, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


def test_client_commands_need_none_of_the_servers_packages(server: Running):
    done = without_server("run", "list", "--address", server.address)
    assert (done.returncode, done.stderr) == (0, "")
    assert "No training runs found" in done.stdout


def test_server_commands_say_what_to_install(server: Running):
    done = without_server("serve", "--model", "builtin:tiny")
    assert done.returncode == 1
    assert "pip install 'together-post-training[server]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_module_runs_the_clients_commands(server: Running):
    command = [
        sys.executable,
        "-m",
        "together_post_training",
        "model",
        "list",
        "--address",
        server.address,
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert "builtin:bigram16" in done.stdout
    wrong = subprocess.run(
        [*command[:3], "serve"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert wrong.returncode == 2
