"""Where SGLang is installed for tests, and how its server runs on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_PYTHON = _ROOT / ".venv-sglang" / "bin" / "python"

# torch's own attention, sampling and LoRA: nothing that is compiled for a GPU.
ARGUMENTS = (
    "--device=cpu",
    "--dtype=float32",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
    "--max-total-tokens=32768",
    # A scheduler with nothing to do polls otherwise, and takes a core from the tests of other servers.
    "--sleep-on-idle",
)
LORA_ARGUMENTS = (
    "--enable-lora",
    "--lora-backend=torch_native",
    "--lora-target-modules=all",
    "--max-loras-per-batch=4",
    "--max-lora-rank=16",
    # This LoRA backend applies an adapter of the output head to the wrong rows when one step reads several prompts.
    "--prefill-max-requests=1",
)
# What a server on a CPU is told besides.
VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    # Logprobs of the untempered distribution, whatever the temperature.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
# What this installation needs, whoever starts a server in it.
_OWN_VARIABLES = {
    # Its sitecustomize.py and sgl_kernel.
    "PYTHONPATH": str(Path(__file__).parent / "stubs"),
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """An interpreter that has SGLang; `variables` belong into the environment of a server."""

    python: Path
    variables: Mapping[str, str]


def installation() -> Installation:
    """Raises FileNotFoundError where SGLang was not installed."""
    if not _PYTHON.exists():
        raise FileNotFoundError(
            f"{_PYTHON} does not exist: run `make test-sglang`, which installs SGLang and then runs these tests."
        )
    return Installation(python=_PYTHON, variables=_OWN_VARIABLES)


def end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-8000:]
