from __future__ import annotations

import sys
from pathlib import Path

from tests.packaging.environments import REPOSITORY, run

GENERATED = "together_post_training/v1"


def test_generated_code_is_what_proto_gives(tmp_path: Path):
    protos = [str(path) for path in sorted((REPOSITORY / "proto" / GENERATED).glob("*.proto"))]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    include = f"--proto_path={REPOSITORY / 'proto'}"
    run(sys.executable, "-m", "grpc_tools.protoc", include, *outputs, *protos)
    fresh = {path.name: path.read_bytes() for path in (tmp_path / GENERATED).iterdir()}
    committed = {
        path.name: path.read_bytes()
        for pattern in ("*_pb2*.py", "*_pb2*.pyi")
        for path in (REPOSITORY / GENERATED).glob(pattern)
    }
    assert committed == fresh, "run `make proto` and commit what it changes"
