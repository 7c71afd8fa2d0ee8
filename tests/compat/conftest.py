"""The real server with the exact numpy model, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tinker_compat as tinker
from tests.client.fake_service import FakeService

REPOSITORY = Path(__file__).parents[2]
MODEL = "builtin:bigram16"


@contextmanager
def running_server(store: Path, *options: str) -> Iterator[str]:
    """The address of a server that lives as long as the block."""
    ready, child_end = os.pipe()
    command = [sys.executable, "-m", "backend", "serve", "--model", MODEL, "--port", "0"]
    command += ["--store", str(store), "--ready-fd", str(child_end), "--parent-pipe", *options]
    with open(store.parent / "server.log", "wb") as log:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[child_end],
        )
    os.close(child_end)
    with os.fdopen(ready) as announced:
        address = announced.readline().strip()
    assert address, (store.parent / "server.log").read_text()
    try:
        yield f"grpc://{address}"
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_server(tmp_path_factory.mktemp("server") / "store") as running:
        yield running


@pytest.fixture
def service(address: str) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=address)
    yield client
    client.close("errored").result()


@pytest.fixture
def client(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(MODEL, rank=4, seed=1).result()


@pytest.fixture
def sampler(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=MODEL).result()


@pytest.fixture
def fake() -> Iterator[FakeService]:
    running = FakeService()
    running.start()
    yield running
    running.close()
