"""What memory a device has left, and giving memory back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch

# glibc keeps freed blocks smaller than a limit that it raises to 32 MB as it goes, in a heap full of holes: passes
# peaked at 1.4 times what they need when all layers were stored, and 4 times when they were computed again. Giving
# every block back at once avoids that, but each page that comes anew must be cleared: passes took 1.7 times as long.
_FRUGAL_BYTES = 2**17
_USUAL_BYTES = 2**25
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


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


def give_back(device: torch.device) -> None:
    """Returns what is not in use to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        _glibc("malloc_trim", 0)


@contextmanager
def frugally() -> Iterator[None]:
    """Meanwhile, what is freed goes back to the system at once: a lower peak, at the cost of speed."""
    _glibc("mallopt", _M_MMAP_THRESHOLD, _FRUGAL_BYTES)
    try:
        yield
    finally:
        _glibc("mallopt", _M_MMAP_THRESHOLD, _USUAL_BYTES)
        _glibc("mallopt", _M_TRIM_THRESHOLD, 2 * _USUAL_BYTES)


def _glibc(function: str, *args: int) -> None:
    """Other C libraries have none of these, nor the need."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            getattr(ctypes.CDLL(None), function)(*args)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f} MiB"
