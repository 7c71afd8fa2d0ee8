"""What is done when memory runs out: nothing is kept of the attempt, and the caller is told what would help."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from backend.trainer.free_memory import available_bytes, gib, give_back
from together_post_training.errors import PostTrainingError, Reason, fail

T = TypeVar("T")


def guarded(compute: Callable[[], T], device: torch.device) -> T:
    """Runs it; what goes wrong holds on to nothing that was computed.

    Raises:
        PostTrainingError: OUT_OF_MEMORY where memory ran out, and what `compute` raises.
    """
    try:
        return compute()
    except PostTrainingError as error:
        failure = error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        failure = _out_of_memory(error, device)
        give_back(device)
    # Tracebacks hold frames, and these hold tensors, for as long as someone keeps the failure.
    failure.__traceback__ = failure.__context__ = failure.__cause__ = None
    raise failure


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a class of its own for GPUs alone."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    signs = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def _out_of_memory(error: BaseException, device: torch.device) -> PostTrainingError:
    return fail(
        Reason.OUT_OF_MEMORY,
        f"Memory ran out on {device} ({gib(available_bytes(device))} are free now); nothing of this "
        "operation was kept, and the session can go on. Send fewer or shorter samples, or start the server with "
        "--dtype bfloat16, a smaller --token-budget or --activation-memory, or on a machine with more memory.",
        error=str(error).partition("\n")[0],
    )
