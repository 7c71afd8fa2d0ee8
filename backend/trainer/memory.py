"""What computing takes in memory, what there is, and what follows: micro-batches, recomputing, refusing."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from torch import Tensor

from together_post_training.errors import PostTrainingError, Reason, fail

T = TypeVar("T")

log = logging.getLogger(__name__)

# Of what is free when a trainer starts, for activations; the rest is for adapters, the generator's cache, and others.
_SHARE = 0.5
# Tokens of a micro-batch. On a CPU the time per token is flat from about 500 on; a GPU wants more work at a time.
_MOST_TOKENS = {"cpu": 1024, "cuda": 16384}
_FEWEST_TOKENS = 64
# Of what is free when a row is computed: estimates are not exact, and other programs live too.
_MARGIN = 0.9
# Blocks of this size and more go back to the system when they are freed. glibc would raise the limit to 32 MB as it
# goes, and keep activations of many sizes in a heap full of holes: passes then peaked at 1.4 times as much when all
# layers were stored and 4 times when they were computed again, and took the same time.
_MAPPED_BYTES = 2**17
_M_MMAP_THRESHOLD = -3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Bytes that a row takes at its peak, beside weights and adapters. Within a tenth of what the system shows, for
    models of 15 and 135 million parameters, with and without recomputing.

    fixed: whatever the number of tokens.
    stored: for each token, what all layers keep for backward.
    layer: for each token, the part of one decoder layer.
    inputs: for each token, the inputs of all decoder layers, which is what recomputing keeps.
    ends: for each token, what embedding, head and their gradients take.
    """

    fixed: int
    stored: int
    layer: int
    inputs: int
    ends: int

    def storing(self, num_tokens: int) -> int:
        return self.fixed + num_tokens * (self.stored + self.ends)

    def recomputing(self, num_tokens: int) -> int:
        return self.fixed + num_tokens * (self.inputs + self.layer + self.ends)

    def scoring(self, num_tokens: int) -> int:
        """Of a forward pass alone."""
        return self.fixed + num_tokens * (self.layer + self.ends)

    def most_stored(self, num_bytes: int) -> int:
        """How many tokens can be stored in as much."""
        return max(0, num_bytes - self.fixed) // (self.stored + self.ends)


class Memory:
    """How a device's memory is used for activations. Owned by the trainer's thread.

    Args:
        cost: of the model that most sessions share.
        token_budget: tokens of a micro-batch; None: as many as fit, up to what makes a difference in speed.
        activation_bytes: for activations; None: half of what is free now.
        available: what is free on a device, in bytes.
    """

    def __init__(
        self,
        device: torch.device,
        cost: Cost,
        *,
        token_budget: int | None = None,
        activation_bytes: int | None = None,
        available: Callable[[torch.device], int] | None = None,
    ) -> None:
        _map_large_blocks()
        self.device = device
        self._available = available or available_bytes
        free = self._available(device)
        self.activation_bytes = activation_bytes or default_activation_bytes(free)
        self.recompute_above = cost.most_stored(self.activation_bytes)
        most = _MOST_TOKENS[device.type]
        self.token_budget = token_budget or max(_FEWEST_TOKENS, min(most, self.recompute_above))
        log.info(
            "%s: %s free, %s for activations; micro-batches of %d tokens, %s a token; layers of samples from %d tokens "
            "on are computed again in backward",
            device,
            gib(free),
            gib(self.activation_bytes),
            self.token_budget,
            mib(cost.stored),
            self.recompute_above + 1,
        )

    def must_recompute(self, cost: Cost, num_tokens: int, *, for_backward: bool) -> bool:
        """Whether layers of a row are to be computed again in backward, because storing them all takes too much.

        Raises:
            PostTrainingError: OUT_OF_MEMORY for a row that does not fit even then.
        """
        free = self._free()
        if for_backward and cost.storing(num_tokens) <= min(self.activation_bytes, free):
            return False
        needed = cost.recomputing(num_tokens) if for_backward else cost.scoring(num_tokens)
        if needed > free:
            give_back(self.device)
            free = self._free()
        if needed > free:
            raise _too_large(num_tokens, needed, free, self.device)
        return for_backward

    def _free(self) -> int:
        return int(self._available(self.device) * _MARGIN)


def _too_large(num_tokens: int, needed: int, free: int, device: torch.device) -> PostTrainingError:
    return fail(
        Reason.OUT_OF_MEMORY,
        f"{num_tokens} tokens at a time take about {gib(needed)} of memory beside the model, even with layers computed "
        f"again in backward, and {gib(free)} may be used on {device} now. Send shorter samples, start the server with "
        "--dtype bfloat16, stop other sessions or programs, or use a machine with more memory.",
        num_tokens=num_tokens,
        needed_bytes=needed,
        available_bytes=free,
    )


# What there is


def default_activation_bytes(free: int) -> int:
    return int(free * _SHARE)


def available_bytes(device: torch.device) -> int:
    """What can be allocated on the device now. On a CPU that is the machine's memory or the process's cgroup's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused
    return max(0, min([psutil.virtual_memory().available, *_cgroup_bytes()]))


def _cgroup_bytes(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """What each cgroup above this process has left, where it has a limit; both versions of the interface."""
    for line in _lines(own):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            top = root
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = root / "memory"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            yield from _left_in(folder, *names)


def _left_in(folder: Path, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """Nothing where there is no limit, or no such folder: in a container the path may be the host's."""
    most, used = (next(iter(_lines(folder / name)), "max") for name in (limit, usage))
    if most == "max" or used == "max":
        return
    # Cached files count as used, and go when memory is wanted.
    stat = dict(line.split() for line in _lines(folder / "memory.stat"))
    yield int(most) - int(used) + int(stat.get(reclaimable, 0))


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text().splitlines()
    return []


# What is taken


def measure(
    forward: Callable[[], object],
    besides: Iterable[Tensor],
    *,
    num_tokens: int,
    num_layers: int,
    hidden_size: int,
    dtype: torch.dtype,
    fixed: int,
) -> Cost:
    """The cost of a model, from what autograd keeps of one forward of `num_tokens`; it is proportional to them.

    Args:
        forward: runs the body and returns what holds on to its graph.
        besides: what lives anyway: parameters and buffers.
        fixed: see `Cost`.
    """
    stored = -(-_saved_bytes(forward, besides) // num_tokens)
    return Cost(
        fixed=fixed,
        stored=stored,
        layer=-(-stored // num_layers),
        inputs=num_layers * hidden_size * dtype.itemsize,
        # Embedded and final hidden states, those the head chooses, and the gradients of the two, in float32.
        ends=6 * hidden_size * torch.float32.itemsize,
    )


def _saved_bytes(forward: Callable[[], object], besides: Iterable[Tensor]) -> int:
    """What autograd keeps of a forward, but for these tensors."""
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        # Without its graph: an output that a node saves would keep that node, and with it itself, for ever.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # Held until all is counted: what is freed gives its address to what comes next.
        result = forward()
    known = {tensor.untyped_storage().data_ptr() for tensor in besides}
    del result
    return sum(size for address, size in sizes.items() if address not in known)


# When it runs out


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


def give_back(device: torch.device) -> None:
    """Returns what is not in use to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        _glibc("malloc_trim", 0)


def _map_large_blocks() -> None:
    _glibc("mallopt", _M_MMAP_THRESHOLD, _MAPPED_BYTES)


def _glibc(function: str, *args: int) -> None:
    """Other C libraries have none of these, nor the need."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            getattr(ctypes.CDLL(None), function)(*args)


def _out_of_memory(error: BaseException, device: torch.device) -> PostTrainingError:
    return fail(
        Reason.OUT_OF_MEMORY,
        f"Memory ran out on {device} ({available_bytes(device) / 2**30:.2f} GiB are free now); nothing of this "
        "operation was kept, and the session can go on. Send fewer or shorter samples, or start the server with "
        "--dtype bfloat16, a smaller --token-budget or --activation-memory, or on a machine with more memory.",
        error=str(error).partition("\n")[0],
    )


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f} MiB"
