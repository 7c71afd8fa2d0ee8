"""The wire as people see it: grpcurl, without any of this project's code or .proto files on its side."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.services.harness import HIT, MISS, MODEL, Running

Call = Callable[..., Any]
V1 = "together_post_training.v1"


@pytest.fixture(scope="module")
def grpcurl(shared: Running) -> Callable[..., subprocess.CompletedProcess[str]]:
    binary = Path(sys.executable).with_name("grpcurl")
    assert binary.is_file(), "install the dev extra, which brings grpcurl"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        """Options go before the address, the method after it."""
        *options, method = arguments
        command = [str(binary), "-plaintext", *options, shared.address, *method.split()]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture
def call(grpcurl: Callable[..., subprocess.CompletedProcess[str]]) -> Call:
    """Sends JSON, gives the JSON that comes back."""

    def run(method: str, request: dict | str | None = None) -> Any:
        typed = request if isinstance(request, str) else json.dumps(request or {})
        done = grpcurl("-d", typed, f"{V1}.{method}")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_grpcurl_lists_and_describes_the_services(grpcurl):
    listed = grpcurl("list").stdout.split()
    assert f"{V1}.TrainerService" in listed
    assert "grpc.health.v1.Health" in listed
    methods = grpcurl(f"list {V1}.TrainerService").stdout.split()
    assert f"{V1}.TrainerService.ForwardBackward" in methods
    described = grpcurl(f"describe {V1}.AdamParams").stdout
    assert "optional double learning_rate = 1;" in described
    for service in listed:
        assert grpcurl(f"describe {service}").returncode == 0


def test_grpcurl_checks_health(grpcurl):
    done = grpcurl("grpc.health.v1.Health/Check")
    assert json.loads(done.stdout) == {"status": "SERVING"}


def test_grpcurl_trains_and_samples_with_json_typed_by_hand(call: Call):
    session = call("SessionService/CreateSession", {"base_model": MODEL, "lora": {"rank": 4}})["id"]
    typed = """{
      "session": "%s", "sequence": 1, "loss": {"type": "cross_entropy"},
      "samples": [{
        "model_input": {"chunks": [{"encoded_text": {"tokens": [3, 4, 5, 9]}}]},
        "loss_fn_inputs": {
          "target_tokens": {"ints": {"values": [4, 5, 9, 10]}},
          "weights": {"floats": {"values": [1, 1, 0, 0.5]}}
        }
      }]
    }"""
    operation = call("TrainerService/ForwardBackward", typed % session)
    assert operation["name"] == f"sessions/{session}/operations/1"
    done = call("OperationService/WaitOperation", {"name": operation["name"]})
    assert done["state"] == "OPERATION_STATE_SUCCEEDED"
    assert done["forward_backward"]["metrics"]["loss:sum"] == pytest.approx(-2.5 * HIT, abs=1e-5)
    logprobs = done["forward_backward"]["loss_fn_outputs"][0]["tensors"]["logprobs"]
    assert (logprobs["dtype"], logprobs["shape"]["dims"]) == ("DTYPE_FLOAT32", ["4"])
    step = {"session": session, "sequence": 2, "adam": {"learning_rate": 0.1}}
    step = call("TrainerService/OptimStep", step)
    done = call("OperationService/WaitOperation", {"name": step["name"]})
    assert done["optim_step"]["policy_version"] == "1"
    sync = call("TrainerService/WeightsSync", {"session": session, "sequence": 3})
    done = call("OperationService/WaitOperation", {"name": sync["name"]})
    sampled = call(
        "GeneratorService/Sample",
        {
            "snapshot": done["weights_sync"]["snapshot"],
            "prompt": {"chunks": [{"encoded_text": {"tokens": [3]}}]},
            "params": {"max_tokens": 2, "temperature": 0, "stop": {}},
        },
    )
    assert sampled["sequences"][0]["stop_reason"] == "STOP_REASON_LENGTH"
    assert sampled["policy_version"] == "1"


def test_grpcurl_scores_a_prompt_of_the_base_model(call: Call):
    snapshot = call("GeneratorService/OpenSnapshot", {"base_model": MODEL})["name"]
    prompt = {"chunks": [{"encoded_text": {"tokens": [3, 4, 9]}}]}
    scored = call("GeneratorService/ComputeLogprobs", {"snapshot": snapshot, "prompt": prompt})
    logprobs = np.frombuffer(base64.b64decode(scored["logprobs"]["raw"]), "<f4")
    np.testing.assert_allclose(logprobs, [np.nan, HIT, MISS], atol=1e-5)


def test_grpcurl_shows_reason_and_details_of_an_error(grpcurl):
    done = grpcurl("-d", '{"base_model": "nothing"}', f"{V1}.SessionService/CreateSession")
    assert done.returncode != 0
    assert "Code: NotFound" in done.stderr
    assert "Unknown base model 'nothing'" in done.stderr
    assert '"reason":"MODEL_NOT_FOUND"' in done.stderr.replace('": "', '":"')
