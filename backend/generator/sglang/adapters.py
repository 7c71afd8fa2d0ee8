"""Which LoRA snapshots a server holds: each is written to disk once, loaded when it is needed, and unloaded when others
need its place.

Names are used once, because SGLang goes on with what it remembers under a name. Nothing is unloaded while it is in use:
SGLang would wait for that, and let nobody load meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from backend.generator.sglang import peft_directory
from backend.generator.sglang.client import Client, ServerLost, message_of
from backend.generator.sglang.finite import FiniteCheck
from backend.generator.sglang.server import Server
from backend.trainer.base import Adapter
from together_post_training.errors import Reason, fail

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Snapshot:
    """name: the server's for it. loaded_in: the start of the server that it was loaded in; 0: none yet."""

    name: str
    directory: Path
    finite: FiniteCheck
    loaded_in: int = 0
    num_users: int = 0
    is_dropped: bool = False


class Adapters:
    """Owned by the event loop.

    Args:
        directory: of this server's adapters, which it sees under the same path.
        base_model: for the files.
        max_loaded: how many it may hold; None: any number.
        finite_check: of an adapter, by the server's name for it.
    """

    def __init__(
        self,
        server: Server,
        client: Client,
        directory: Path,
        base_model: str,
        max_loaded: int | None,
        finite_check: Callable[[str], FiniteCheck],
    ) -> None:
        self._server = server
        self._client = client
        self._directory = directory
        self._base_model = base_model
        self._max_loaded = max_loaded
        self._finite_check = finite_check
        # The latest used last.
        self._snapshots: OrderedDict[str, _Snapshot] = OrderedDict()
        self._loading = asyncio.Lock()
        self._released = asyncio.Event()
        self._removing: set[asyncio.Task[None]] = set()

    def __contains__(self, snapshot: str) -> bool:
        return snapshot in self._snapshots

    async def add(self, snapshot: str, adapter: Adapter) -> None:
        """Writes and loads it. Raises what the server refuses; nothing is left behind then."""
        name = unique_name(snapshot)
        entry = _Snapshot(
            name=name, directory=self._directory / name, finite=self._finite_check(name)
        )
        try:
            await asyncio.to_thread(
                peft_directory.write, entry.directory, adapter, self._base_model
            )
            with suppress(ServerLost):  # It is loaded when it is needed.
                await self._load(entry)
        except BaseException:
            shutil.rmtree(entry.directory, ignore_errors=True)
            raise
        self._snapshots[snapshot] = entry

    def drop(self, snapshot: str) -> None:
        entry = self._snapshots.pop(snapshot)
        entry.is_dropped = True
        self._remove_unused(entry)

    @asynccontextmanager
    async def use(self, snapshot: str) -> AsyncIterator[str]:
        """The server's name for it. It is loaded from here to the end, or until the server is started again.

        Raises:
            ServerLost; PostTrainingError for what the server refuses, NON_FINITE_LOGITS.
        """
        entry = self._snapshots[snapshot]
        self._snapshots.move_to_end(snapshot)
        entry.num_users += 1
        try:
            if entry.loaded_in != self._server.number:
                await self._load(entry)
            await entry.finite.require()
            yield entry.name
        finally:
            entry.num_users -= 1
            self._released.set()
            self._remove_unused(entry)

    def missing(self, snapshot: str) -> None:
        """The server says that it does not have it."""
        entry = self._snapshots.get(snapshot)
        if entry is not None:
            entry.loaded_in = 0

    async def close(self) -> None:
        """Unloads what is loaded, for a server that goes on."""
        for entry in list(self._snapshots.values()):
            with suppress(ServerLost):
                await self._unload(entry)
        for task in self._removing:
            task.cancel()
        self._snapshots.clear()

    async def _load(self, entry: _Snapshot) -> None:
        async with self._loading:
            number = self._server.number
            if entry.loaded_in == number:
                return
            await self._make_room()
            url = await self._server.url()
            body = {"lora_name": entry.name, "lora_path": str(entry.directory)}
            status, answer = await self._client.post(url, "/load_lora_adapter", body)
            message = message_of(answer)
            if status != 200 and "already loaded" not in message:
                raise _refused(status, message, self._server, entry.directory)
            entry.loaded_in = number

    async def _make_room(self) -> None:
        while self._max_loaded is not None:
            loaded = [e for e in self._snapshots.values() if e.loaded_in == self._server.number]
            if len(loaded) < self._max_loaded:
                return
            unused = [entry for entry in loaded if not entry.num_users]
            if unused:
                await self._unload(unused[0])
            else:
                self._released.clear()
                await self._released.wait()

    async def _unload(self, entry: _Snapshot) -> None:
        if entry.loaded_in != self._server.number:
            return
        entry.loaded_in = 0
        url = await self._server.url()
        body = {"lora_name": entry.name}
        status, answer = await self._client.post(url, "/unload_lora_adapter", body)
        if status != 200:
            log.warning("%s: adapter %s stays loaded: %s", self._server.name, entry.name, answer)

    def _remove_unused(self, entry: _Snapshot) -> None:
        if entry.is_dropped and not entry.num_users:
            task = asyncio.create_task(self._remove(entry), name=f"remove {entry.name}")
            self._removing.add(task)
            task.add_done_callback(self._removing.discard)

    async def _remove(self, entry: _Snapshot) -> None:
        with suppress(ServerLost):
            await self._unload(entry)
        await asyncio.to_thread(shutil.rmtree, entry.directory, ignore_errors=True)


def unique_name(snapshot: str) -> str:
    """Letters, digits and dashes of the snapshot's name, for people who list a server's models, and what makes it
    unique among all servers of all stores."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", snapshot).strip("-")[-60:]
    return f"{readable}-{uuid.uuid4().hex[:12]}"


def _refused(status: int, message: str, server: Server, directory: Path) -> Exception:
    if status in (404, 405):
        return fail(
            Reason.UNIMPLEMENTED,
            f"{server.name} cannot load adapters: it is a router, or not SGLang. Name the servers behind it "
            "themselves: --generator sglang:http://HOST:PORT,http://HOST:PORT",
        )
    if "LoRA is not enabled" in message:
        return fail(
            Reason.UNIMPLEMENTED,
            f"{server.name} serves no adapters: start it with --enable-lora --lora-target-modules all "
            "--max-lora-rank RANK.",
        )
    if "Repo id" in message or "does not exist" in message or "No such file" in message:
        return fail(
            Reason.UNAVAILABLE,
            f"{server.name} cannot read {directory}: give a directory that it sees under the same path with "
            "--sglang-dir.",
            directory=directory,
        )
    return fail(Reason.UNIMPLEMENTED, f"{server.name} refuses the adapter: {message}")
