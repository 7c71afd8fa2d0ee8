"""How a server of our own is started: arguments and environment. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from backend.generator.sglang.facts import ATTENTION_MODULES, WINDOW_RESERVE
from backend.generator.sglang.options import SglangOptions

_ENV = {
    # Log-probabilities of the untempered distribution; without it they are those at the call's temperature.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    # The window is the model's; what the server keeps of it for itself comes on top.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONUNBUFFERED": "1",
}
_CPU_ENV = {"SGLANG_USE_CPU_ENGINE": "1"}
_CPU_LORA = {
    "--lora-backend": ("torch_native",),
    # This backend takes rows of one prompt for another's where an adapter has the output head and several prompts are
    # read in one step (SGLang 0.5.23, layers/logits_processor.py); one at a time is right.
    "--prefill-max-requests": ("1",),
}


# The trainer's weights are there already; the other half is for what it computes with.
_BESIDE_THE_TRAINER = 0.5
_BESIDE_EACH_OTHER = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a server is to serve, and where.

    gpu: the first GPU it takes; None: it computes on the CPU. memory_fraction: of what is free on its GPU, for weights
        and the cache; None: SGLang chooses.
    """

    directory: Path
    window: int
    max_lora_rank: int
    has_tokenizer: bool
    has_experts: bool
    dtype: Literal["float32", "bfloat16"]
    gpu: int | None
    memory_fraction: float | None = None


def command(served: Served, options: SglangOptions, port: int) -> list[str]:
    """Arguments that the user gave come last, and are given once."""
    given = {argument.partition("=")[0] for argument in options.arguments}
    ours = _arguments(served, port).items()
    flags = [part for name, values in ours if name not in given for part in (name, *values)]
    return [options.python, "-m", "sglang.launch_server", *flags, *options.arguments]


def environment(
    served: Served, options: SglangOptions, inherited: Mapping[str, str]
) -> dict[str, str]:
    for_device = _CPU_ENV if served.gpu is None else {}
    return {**inherited, **_ENV, **for_device, **dict(options.env)}


def split_arguments(text: str) -> tuple[str, ...]:
    """As a shell would. Raises ValueError for a quote that is not closed."""
    return tuple(shlex.split(text))


def gpu_of(replica: int, num_gpus: int, gpus_each: int = 1) -> int:
    """Replicas take the last GPUs first: the trainer has the first one."""
    places = max(num_gpus // gpus_each, 1)
    return (places - 1 - replica % places) * gpus_each


def memory_fraction(places: Sequence[int], place: int, trainer_gpu: int) -> float | None:
    """Of what is free on a server's GPU, where it has that to share. places: the first GPU of every server; None: it
    has it for itself, and SGLang chooses."""
    num_sharing = places.count(place)
    if place == trainer_gpu:
        return _BESIDE_THE_TRAINER / num_sharing
    return _BESIDE_EACH_OTHER / num_sharing if num_sharing > 1 else None


def gpus_each(arguments: Sequence[str]) -> int:
    """How many GPUs a server takes, as its arguments say."""
    joined = " ".join(arguments).replace("=", " ").split()
    for name in ("--tp-size", "--tensor-parallel-size", "--tp"):
        if name in joined[:-1]:
            return int(joined[joined.index(name) + 1])
    return 1


def _arguments(served: Served, port: int) -> dict[str, tuple[str, ...]]:
    """Values by name; a flag has none."""
    # The kernel for adapters of experts takes more than PEFT's files give it, and ends the server without a GPU.
    lora_modules = ATTENTION_MODULES if served.has_experts else ("all",)
    chosen = {
        "--model-path": (str(served.directory),),
        "--host": ("127.0.0.1",),
        "--port": (str(port),),
        "--dtype": (served.dtype,),
        "--context-length": (str(served.window + WINDOW_RESERVE),),
        "--enable-lora": (),
        "--max-lora-rank": (str(served.max_lora_rank),),
        "--lora-target-modules": lora_modules,
        "--log-level-http": ("warning",),
    }
    if not served.has_tokenizer:
        chosen["--skip-tokenizer-init"] = ()
    if served.has_experts:
        chosen["--enable-return-routed-experts"] = ()
    if served.gpu is None:
        # It polls otherwise, and takes a core from the trainer.
        return {**chosen, "--device": ("cpu",), "--sleep-on-idle": (), **_CPU_LORA}
    if served.memory_fraction is not None:
        chosen["--mem-fraction-static"] = (f"{served.memory_fraction:g}",)
    return {**chosen, "--base-gpu-id": (str(served.gpu),)}
