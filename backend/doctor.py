"""`doctor`: what is installed, and which module a script's import line would get."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TextIO

import numpy as np

from backend.agreement import FLOAT32_TOLERANCE, Agreement, Refused, measure
from backend.resources.catalog import ModelSpec
from backend.resources.engines import EngineOptions, open_engines

_CLIENT = ("together-post-training", "grpcio", "protobuf", "numpy", "tinker")
_SERVER = (
    "torch",
    "transformers",
    "peft",
    "psutil",
    "safetensors",
    "grpcio-health-checking",
    "grpcio-reflection",
)
_SWAPPED_IMPORT = "together.post_training.tinker"


def run(out: TextIO) -> int:
    """Prints the report; 1 when a server could not run here."""
    print(f"Python {platform.python_version()} ({sys.executable})", file=out)
    for title, packages in (("client", _CLIENT), ("server", _SERVER)):
        for package in packages:
            print(f"{title}: {package} {_version(package) or 'is not installed'}", file=out)
    print(f"import {_SWAPPED_IMPORT}: {_describe_import()}", file=out)
    policy = os.environ.get("OMP_WAIT_POLICY", "not set; the server sets PASSIVE for itself")
    print(f"OMP_WAIT_POLICY: {policy}", file=out)
    missing = [package for package in _SERVER if _version(package) is None]
    if not missing:
        print(f"engines: {_describe_engines()}", file=out)
    print(f"SGLang, for serve --generator sglang: {_describe_sglang()}", file=out)
    if missing:
        print(
            f"A server needs {', '.join(missing)}: pip install 'together-post-training[server]'",
            file=out,
        )
    return 1 if missing else 0


def run_alignment(out: TextIO, spec: ModelSpec, options: EngineOptions) -> int:
    """Prints how far the generator's log-probabilities are from the trainer's; 1 where weights are float32 and they are
    further apart than that explains.

    Raises:
        PostTrainingError: what the engines refuse.
    """
    print(f"{spec.name}: log-probabilities of the generator against the trainer's", file=out)
    print(
        f"{'weights':<22}{'tokens':<10}{'number':>8}{'max |diff|':>12}{'mean |diff|':>13}{'KL':>11}",
        file=out,
    )
    rows = asyncio.run(_agreements(spec, options))
    for row in rows:
        print(_agreement_line(row), file=out)
    largest = float(np.max([row.max_diff for row in rows if isinstance(row, Agreement)]))
    if not _is_float32(options):
        print(f"largest difference {largest:.2g}: weights are not kept in float32", file=out)
        return 0
    is_met = largest <= FLOAT32_TOLERANCE
    verdict = "they agree" if is_met else "THEY DO NOT AGREE"
    print(f"{verdict}: largest difference {largest:.2g}, of {FLOAT32_TOLERANCE:g}", file=out)
    return 0 if is_met else 1


async def _agreements(spec: ModelSpec, options: EngineOptions) -> list[Agreement | Refused]:
    with tempfile.TemporaryDirectory(prefix="together-post-training-") as scratch:
        engines = open_engines(spec.name, spec.path, options, Path(scratch))
        try:
            return await measure(engines.trainer, engines.generator)
        finally:
            await engines.generator.close()


def _agreement_line(row: Agreement | Refused) -> str:
    if isinstance(row, Refused):
        return f"{row.weights:<22}refused: {row.why}"
    figures = f"{row.max_diff:>12.1e}{row.mean_diff:>13.1e}{row.kl:>11.1e}"
    return f"{row.weights:<22}{row.how:<10}{row.num_tokens:>8}{figures}"


def _is_float32(options: EngineOptions) -> bool:
    from backend.trainer import base_model

    if options.dtype != "auto":
        return options.dtype == "float32"
    dtype = base_model.default_dtype(base_model.find_device(options.device))
    return str(dtype) == "torch.float32"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _describe_engines() -> str:
    """What `serve` chooses by itself; how many tokens fit depends on the model, and is logged when it is loaded."""
    from backend.trainer import base_model, free_memory, memory

    device = base_model.find_device()
    dtype = str(base_model.default_dtype(device)).removeprefix("torch.")
    free = free_memory.available_bytes(device)
    return (
        f"on {device} (--device), weights in {dtype} (--dtype); {free_memory.gib(free)} free, "
        f"{free_memory.gib(memory.default_activation_bytes(free))} of it for activations (--activation-memory)"
    )


def _describe_sglang() -> str:
    installed = _version("sglang")
    if installed is None:
        return "not installed here; it may be in another environment (--sglang-python)"
    return f"{installed} (tested: 0.5.23)"


def _describe_import() -> str:
    """Ours is a module file; the official SDK's is a package, and wins where it is installed."""
    try:
        spec = importlib.util.find_spec(_SWAPPED_IMPORT)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        return "not found; install together-post-training"
    if spec.submodule_search_locations is None:
        return f"this project ({spec.origin})"
    return (
        f"the official SDK ({spec.origin}), which talks to the hosted service. To run a script against your own server "
        "use `import tinker_compat as tinker`, or `python -m tinker_compat script.py`"
    )
