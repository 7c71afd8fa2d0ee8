"""One SGLang server: a child of this process, or one that somebody else runs."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import httpx

from backend.generator.sglang.command import Served, command, environment
from backend.generator.sglang.facts import Facts, facts
from backend.generator.sglang.options import SglangOptions
from backend.generator.sglang.process import Launch, SupervisedProcess
from together_post_training.errors import PostTrainingError, Reason, fail

log = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 10.0
# A server whose scheduler crashed drops its connections first, and ends a few seconds later.
_NOTICE_S = 12.0
_RETRY_S = 0.5


class Server(Protocol):
    """number: of its starts, as far as known; what a server held is lost with each.

    facts: what it said then. is_shared: it goes on when we end.
    """

    name: str
    facts: Facts
    is_shared: bool

    @property
    def number(self) -> int: ...

    async def url(self) -> str:
        """Waits until it answers. Raises UNAVAILABLE, after a while."""
        ...

    async def lost(self, number: int) -> None:
        """A request to this start of it failed: comes back when it has been started anew, or seems to be fine."""
        ...

    def close(self) -> None:
        """Blocks until it is gone, if it is ours."""
        ...


class OwnServer:
    """See `Server`; started, and after a crash started again."""

    is_shared = False

    def __init__(self, name: str, served: Served, options: SglangOptions, directory: Path) -> None:
        self.name = name
        self._wait_s = options.restart_wait_s
        self._process = SupervisedProcess(
            name,
            _launcher(served, options),
            is_ready,
            directory,
            start_timeout_s=options.start_timeout_s,
        )

    def start(self) -> None:
        """Blocks until it answers. Raises UNAVAILABLE."""
        try:
            state = self._process.start()
            assert state.url is not None
            self.facts = ask_facts(state.url)
        except PostTrainingError as error:
            self._process.close()
            raise _with_advice(error) from None
        except BaseException:
            self._process.close()
            raise

    @property
    def number(self) -> int:
        return self._process.state.number

    async def url(self) -> str:
        state = self._process.state
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s):
                while state.url is None and state.fault != "it was closed":
                    state = await self._process.changed(state)
        if state.url is None:
            raise self._process.unavailable()
        return state.url

    async def lost(self, number: int) -> None:
        state = self._process.state
        if state.number == number and state.url is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.changed(state), _NOTICE_S)

    def close(self) -> None:
        self._process.close()


class GivenServer:
    """See `Server`; it runs already."""

    is_shared = True

    def __init__(self, url: str, options: SglangOptions) -> None:
        self.name = f"SGLang at {url}"
        self._url = url
        self._wait_s = options.restart_wait_s
        self._number = 1
        self._recovering = asyncio.Lock()
        try:
            self.facts = ask_facts(url)
        except (httpx.HTTPError, ValueError) as error:
            raise self._unavailable(str(error)) from None

    @property
    def number(self) -> int:
        return self._number

    async def url(self) -> str:
        return self._url

    async def lost(self, number: int) -> None:
        """Nobody tells whether it was started anew, so it counts as if it had been."""
        async with self._recovering:
            if self._number != number:
                return
            deadline = time.monotonic() + self._wait_s
            while not await asyncio.to_thread(is_ready, self._url):
                if time.monotonic() > deadline:
                    raise self._unavailable(f"nothing for {self._wait_s:g} s")
                await asyncio.sleep(_RETRY_S)
            with suppress(httpx.HTTPError, ValueError):
                self.facts = await asyncio.to_thread(ask_facts, self._url)
            self._number += 1

    def close(self) -> None:
        pass

    def _unavailable(self, why: str) -> PostTrainingError:
        return fail(Reason.UNAVAILABLE, f"{self.name} does not answer: {why}", server=self._url)


def is_ready(url: str) -> bool:
    """GET /ready is there since SGLang 0.5.20, and costs nothing; the older one generates a token."""
    try:
        response = httpx.get(f"{url}/ready", timeout=_ASK_TIMEOUT_S, trust_env=False)
        if response.status_code == 404:
            response = httpx.get(f"{url}/health", timeout=_ASK_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError:
        return False
    return response.status_code == 200


def ask_facts(url: str) -> Facts:
    """Raises httpx.HTTPError; ValueError for what is no SGLang server that we know how to talk to."""
    response = httpx.get(f"{url}/server_info", timeout=_ASK_TIMEOUT_S, trust_env=False)
    if response.status_code == 404:
        response = httpx.get(f"{url}/get_server_info", timeout=_ASK_TIMEOUT_S, trust_env=False)
    response.raise_for_status()
    info = response.json()
    if not isinstance(info, dict):
        raise ValueError("its /server_info is no object")
    return facts(info)


def _with_advice(error: PostTrainingError) -> PostTrainingError:
    if "No module named" in error.message or "cannot be run" in error.message:
        advice = "Name the interpreter of an environment that has SGLang with --sglang-python."
        return fail(error.reason, f"{error.message}\n{advice}", **error.metadata)
    return error


def _launcher(served: Served, options: SglangOptions) -> Callable[[], Launch]:
    def launch() -> Launch:
        port = _free_port()
        return Launch(
            url=f"http://127.0.0.1:{port}",
            command=command(served, options, port),
            env=environment(served, options, os.environ),
        )

    return launch


def _free_port() -> int:
    """Somebody else may take it in between; the server then ends, and its next start has another."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
