"""Runs a command for as long as its own standard input stays open, then ends all that the command started.

A program of its own, with nothing but the standard library: whoever started it holds the other end of the pipe, and
the system closes that however its holder ends, SIGKILL included. SGLang's server has children that hold most of its
memory, so what is ended is the whole process group.

    python guard.py GRACE_S COMMAND...
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """The command's exit status; as a shell gives it, if a signal ended it."""
    grace_s, command = float(arguments[0]), arguments[1:]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # The pipe says when.
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # Safe: this process has one thread. For the case that the guard itself is killed.
            preexec_fn=_die_with_parent,
        )
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}", flush=True)
        return 127
    threading.Thread(target=_end_when_input_closes, args=(child, grace_s), daemon=True).start()
    status = child.wait()
    _signal_group(child, signal.SIGKILL)
    return status if status >= 0 else 128 - status


def _end_when_input_closes(child: subprocess.Popen, grace_s: float) -> None:
    while os.read(0, 4096):
        pass
    _signal_group(child, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.05)
    _signal_group(child, signal.SIGKILL)


def _signal_group(child: subprocess.Popen, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _die_with_parent() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
