"""The server dies and comes back: every call ends, with its result or with a definite error."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from tinker import types

import tinker_compat as tinker
from tests.compat.conftest import MODEL, running_server
from tests.compat.data import datum, greedy, prompt


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def kill(store: Path) -> None:
    os.kill(int((store / "server" / "lock").read_text()), signal.SIGKILL)


def test_a_server_that_was_killed_and_restarted_gives_definite_errors_and_its_checkpoints(tmp_path):
    store, port = tmp_path / "store", str(unused_port())
    service = tinker.ServiceClient(base_url=f"127.0.0.1:{port}")
    with running_server(store, "--port", port):
        client = service.create_lora_training_client(MODEL, rank=4).result()
        client.forward_backward([datum([3], target_tokens=[9])], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.5)).result()
        path = client.save_state("kept").result().path
        trained = client.forward([datum()], "cross_entropy").result().metrics
        kill(store)
    under_way = client.forward([datum()], "cross_entropy")
    sampling = service.create_sampling_client(base_model=MODEL)
    assert not under_way.done(), "it waits for the server to come back"
    with running_server(store, "--port", port):
        assert sampling.sample(prompt(3), 1, greedy(2)).result(30).sequences[0].tokens == [4, 5]
        with pytest.raises(tinker.TinkerError, match=r"(?i)session"):
            under_way.result(30)
        with pytest.raises(tinker.TinkerError, match=r"(?i)session"):
            client.optim_step(types.AdamParams()).result(30)
        resumed = service.create_training_client_from_state_with_optimizer(path).result(30)
        assert resumed.forward([datum()], "cross_entropy").result(30).metrics == trained
        service.close("success").result(30)
