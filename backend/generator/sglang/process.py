"""A server of our own: a child process that is started, watched, started again when it ends, and never left behind.

A thread does it all, so that a server can be waited for before there is an event loop, and restarts while loops come
and go. Nothing outlives this process, whatever ends it: see guard.py.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from together_post_training.errors import PostTrainingError, Reason, fail

log = logging.getLogger(__name__)

_GUARD = Path(__file__).with_name("guard.py")
_END_GRACE_S = 15.0
_POLL_S = 0.2
_PROGRESS_S = 10.0
_NUM_LAST_LINES = 40
_FIRST_DELAY_S, _LONGEST_DELAY_S = 1.0, 60.0
# One that ran for this long had started well: the next delay is the first again.
_GOOD_RUN_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start: what to run, and the address at which the server will listen."""

    url: str
    command: Sequence[str]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """number: of starts so far; what a server held is lost with each. url: None while it does not answer.

    fault: why it does not.
    """

    number: int = 0
    url: str | None = None
    fault: str = "it has not been started"


class SupervisedProcess:
    """Every method may be called from any thread.

    Args:
        name: for the log.
        launch: the next start.
        is_ready: whether the server at this URL answers; asked several times a second until it does.
        directory: where it runs.
    """

    def __init__(
        self,
        name: str,
        launch: Callable[[], Launch],
        is_ready: Callable[[str], bool],
        directory: Path,
        *,
        start_timeout_s: float,
        first_delay_s: float = _FIRST_DELAY_S,
    ) -> None:
        self._name = name
        self._launch = launch
        self._is_ready = is_ready
        self._directory = directory
        self._start_timeout_s = start_timeout_s
        self._first_delay_s = first_delay_s
        self._changed = threading.Condition()
        self._state = State()
        self._waiters: list[Future[State]] = []
        self._closing = threading.Event()
        self._child: _Child | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def state(self) -> State:
        return self._state

    def start(self) -> State:
        """Blocks until the server answers.

        Raises:
            PostTrainingError: UNAVAILABLE, with the server's last words; it is not tried again.
        """
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._state.url or not self._thread.is_alive())
        if self._state.url is None:
            raise self.unavailable()
        return self._state

    async def changed(self, seen: State) -> State:
        """Waits until the state is another than this."""
        with self._changed:
            if self._state is not seen:
                return self._state
            waiter: Future[State] = Future()
            self._waiters.append(waiter)
        return await asyncio.wrap_future(waiter)

    def unavailable(self) -> PostTrainingError:
        return fail(
            Reason.UNAVAILABLE,
            f"{self._name} does not answer: {self._state.fault}",
            server=self._name,
        )

    def close(self) -> None:
        """Ends the server, and waits until it and its children are gone."""
        self._closing.set()
        with self._changed:
            child = self._child
        if child is not None:
            child.end()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        delay_s = self._first_delay_s
        while not self._closing.is_set():
            started = time.monotonic()
            child = self._started()
            if self._became_ready(child, started):
                child.wait()
                delay_s = self._first_delay_s if _is_long(started) else delay_s
            self._lost(child)
            if self._state.number == 1 and not child.was_ready:
                break  # It never worked: whoever waits for the start is told why.
            if not self._closing.is_set():
                log.error("%s: %s; next start in %g s", self._name, self._state.fault, delay_s)
            self._closing.wait(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
        self._set(State(number=self._state.number, fault=self._state.fault))

    def _started(self) -> _Child:
        launch = self._launch()
        self._directory.mkdir(parents=True, exist_ok=True)
        number = self._state.number + 1
        log.info("%s: starting: %s", self._name, " ".join(launch.command))
        child = _Child(self._name, launch, self._directory)
        with self._changed:
            self._child = child
        self._set(State(number=number, fault="it is starting"))
        if self._closing.is_set():
            child.end()
        return child

    def _became_ready(self, child: _Child, started: float) -> bool:
        url, next_progress = child.url, started + _PROGRESS_S
        while child.is_running and not self._closing.is_set():
            if self._is_ready(url):
                log.info("%s: ready after %.0f s", self._name, time.monotonic() - started)
                child.was_ready = True
                self._set(State(number=self._state.number, url=url, fault=""))
                return True
            now = time.monotonic()
            if now > started + self._start_timeout_s:
                child.say(f"it was not ready after {self._start_timeout_s:g} s, and was ended")
                child.end()
                break
            if now > next_progress:
                next_progress += _PROGRESS_S
                log.info("%s: loading the model, %.0f s so far", self._name, now - started)
            time.sleep(_POLL_S)
        return False

    def _lost(self, child: _Child) -> None:
        status = child.wait()
        fault = (
            "it was closed"
            if self._closing.is_set()
            else f"it ended with status {status}, saying last:\n{child.last_lines()}"
        )
        self._set(State(number=self._state.number, fault=fault))

    def _set(self, state: State) -> None:
        with self._changed:
            self._state = state
            waiters, self._waiters = self._waiters, []
            self._changed.notify_all()
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(state)


class _Child:
    """One run of the server, under its guard. Its lines go to the log."""

    def __init__(self, name: str, launch: Launch, directory: Path) -> None:
        self.url = launch.url
        self.was_ready = False
        self._name = name
        self._lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(_GUARD), str(_END_GRACE_S), *launch.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(launch.env),
            cwd=directory,
        )
        self._reader = threading.Thread(target=self._read, name=f"{name} log", daemon=True)
        self._reader.start()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self) -> int:
        status = self._process.wait()
        self._reader.join()
        return status

    def say(self, line: str) -> None:
        self._lines.append(line)

    def last_lines(self) -> str:
        return "\n".join(self._lines) or "nothing"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            if line:
                self._lines.append(line)
                log.log(_level(line), "%s| %s", self._name, line)


def _level(line: str) -> int:
    """The server's own lines are for those who look for them; its errors for everyone."""
    if "Error" in line or "Traceback" in line or "CRITICAL" in line:
        return logging.WARNING
    return logging.DEBUG


def _is_long(started: float) -> bool:
    return time.monotonic() - started > _GOOD_RUN_S
