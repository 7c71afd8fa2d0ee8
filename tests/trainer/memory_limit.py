"""A process that runs out of memory in the middle of a pass, and goes on.

    python -m tests.trainer.memory_limit DIRECTORY

Prints the reason of the failure, whether anything was kept of the pass, and the loss once there is memory again.
"""

from __future__ import annotations

import json
import resource
import sys

import numpy as np
import psutil
import torch

from backend.trainer import base_model
from backend.trainer.base import LoraConfig, Pass
from backend.trainer.torch_trainer import TorchTrainer
from together_post_training.errors import PostTrainingError
from together_post_training.samples import Sample

_NUM_TOKENS = 5000
# On top of what holes in the heap may still hold.
_ALLOWED_BYTES = 4 * 2**20


def main(directory: str) -> None:
    torch.set_num_threads(1)
    trainer = TorchTrainer(base_model.load("limited", directory))
    trainer.create_session("s", LoraConfig(rank=4, alpha=4, seed=0))
    tokens = np.arange(_NUM_TOKENS) % trainer.model.limits.vocab_size
    sample = Sample(tokens=tokens, inputs={"target_tokens": tokens})
    work = Pass(session="s", samples=[sample], backward=True)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + _ALLOWED_BYTES, resource.RLIM_INFINITY))
    try:
        trainer.run(work)
        reason = "none"
    except PostTrainingError as error:
        reason = error.reason.value
    kept = trainer.has_gradients("s")
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    loss = trainer.run(work).metrics["loss:sum"]
    print(json.dumps([reason, kept, loss]))


if __name__ == "__main__":
    main(sys.argv[1])
