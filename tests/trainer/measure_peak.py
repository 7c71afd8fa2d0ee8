"""A process that trains one sample and prints [bytes at the peak, bytes that were estimated].

python -m tests.trainer.measure_peak DIRECTORY NUM_TOKENS stored|recomputed
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from backend.trainer import base_model
from backend.trainer.base import LoraConfig, Pass
from backend.trainer.free_memory import frugally, give_back
from backend.trainer.torch_trainer import TorchTrainer
from together_post_training.samples import Sample

CPU = torch.device("cpu")


def main(directory: str, num_tokens: int, how: str) -> None:
    torch.set_num_threads(1)
    base = base_model.load("measured", directory)
    trainer = TorchTrainer(base, activation_bytes=2**40 if how == "stored" else 1)
    trainer.create_session("s", LoraConfig(rank=16, alpha=16, seed=0))
    train(trainer, 64)
    give_back(CPU)
    before = status("VmRSS")
    # From here on VmHWM is the highest since now.
    Path("/proc/self/clear_refs").write_text("5")
    # Without holes in the heap, which are no part of the estimate.
    with frugally():
        train(trainer, num_tokens)
    cost = trainer._packed.cost
    estimate = cost.storing if how == "stored" else cost.recomputing
    print(json.dumps([status("VmHWM") - before, estimate(num_tokens)]))


def train(trainer: TorchTrainer, num_tokens: int) -> None:
    tokens = np.arange(num_tokens) % trainer.model.limits.vocab_size
    sample = Sample(tokens=tokens, inputs={"target_tokens": tokens})
    trainer.run(Pass(session="s", samples=[sample], backward=True))


def status(name: str) -> int:
    """In bytes."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
