"""Which LoRA snapshots a server has: each is written to disk once, loaded when it is needed, and unloaded when others
need its place.

Names are used once, because SGLang goes on with what it remembers under a name. Nothing is unloaded while it is in use:
SGLang would wait for that, and let nobody load meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from backend.generator.sglang import peft_directory
from backend.generator.sglang.client import AdapterMissing, Client, ServerLost, message_of
from backend.generator.sglang.finite import FiniteCheck
from backend.generator.sglang.held import Held
from backend.generator.sglang.names import unique_name
from backend.generator.sglang.server import Server
from backend.trainer.base import Adapter
from together_post_training.errors import PostTrainingError, Reason, fail

log = logging.getLogger(__name__)

_CLOSE_S = 5.0


@dataclass(slots=True, kw_only=True, eq=False)
class LoraSnapshot:
    """name: the server's for it. The files are there while it is held.

    loaded_in: the start of the server that it was loaded in; 0: none. num_users: requests that run with it.
    """

    name: str
    directory: Path
    finite: FiniteCheck
    held: Held
    loaded_in: int = 0
    num_users: int = 0
    loading: asyncio.Task[None] | None = None


class Adapters:
    """Owned by the event loop.

    Args:
        directory: of this server's adapters, which it sees under the same path.
        base_model: for the files.
        max_loaded: how many it may have; None: any number.
        finite_check: of an adapter that is loaded, by the server's name for it.
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
        self._snapshots: dict[str, LoraSnapshot] = {}
        # By the server's names; the latest used last.
        self._loaded: OrderedDict[str, LoraSnapshot] = OrderedDict()
        self._loading = asyncio.Lock()
        self._released = asyncio.Event()
        self._removing: set[asyncio.Task[None]] = set()

    def find(self, snapshot: str) -> LoraSnapshot | None:
        return self._snapshots.get(snapshot)

    async def add(self, snapshot: str, adapter: Adapter) -> None:
        """Writes and loads it. Raises what the server refuses; nothing is left behind then."""
        name = unique_name(snapshot)
        entry = LoraSnapshot(
            name=name,
            directory=self._directory / name,
            finite=self._finite_check(name),
            held=Held(lambda: self._remove_soon(entry)),
        )
        write = peft_directory.write
        try:
            await asyncio.to_thread(write, entry.directory, adapter, self._base_model)
            with suppress(ServerLost):  # It is loaded when it is needed.
                await self._loaded_once(entry)
        except BaseException:
            self._remove_soon(entry)
            raise
        self._snapshots[snapshot] = entry

    def drop(self, snapshot: str) -> None:
        self._snapshots.pop(snapshot).held.drop()

    @asynccontextmanager
    async def use(self, entry: LoraSnapshot) -> AsyncIterator[str]:
        """The server's name for it, which is held. It is loaded from here to the end, or until the server is started
        again.

        Raises:
            ServerLost, AdapterMissing; PostTrainingError for what the server refuses, NON_FINITE_LOGITS.
        """
        entry.num_users += 1
        try:
            await self._loaded_once(entry)
            self._loaded.move_to_end(entry.name)
            await entry.finite.require()
            yield entry.name
        except AdapterMissing:
            self._forget(entry)
            raise
        finally:
            entry.num_users -= 1
            self._released.set()

    async def close(self) -> None:
        """Unloads all where the server goes on."""
        if self._removing:
            _, late = await asyncio.wait(self._removing, timeout=_CLOSE_S)
            for task in late:
                task.cancel()
        for entry in list(self._loaded.values()) if self._server.is_shared else ():
            with suppress(ServerLost, PostTrainingError):
                await self._unload(entry)
        self._snapshots.clear()

    async def _loaded_once(self, entry: LoraSnapshot) -> None:
        """All who wait for an adapter wait for one load: were each to wait its turn, those who have theirs would keep
        the place that the others wait for."""
        while entry.loaded_in != self._server.number:
            if entry.loading is None:
                entry.loading = asyncio.create_task(self._load(entry), name=f"load {entry.name}")
                entry.loading.add_done_callback(lambda task: _end_loading(entry, task))
            await asyncio.shield(entry.loading)

    async def _load(self, entry: LoraSnapshot) -> None:
        async with self._loading:
            number = self._server.number
            if entry.loaded_in == number:
                return
            self._forget_earlier_starts(number)
            await self._make_room()
            url = await self._server.url()
            body = {"lora_name": entry.name, "lora_path": str(entry.directory)}
            status, answer = await self._client.post(url, "/load_lora_adapter", body)
            message = message_of(answer)
            if status != 200 and "already loaded" not in message:
                raise _refused(status, message, self._server, entry.directory)
            entry.loaded_in = number
            self._loaded[entry.name] = entry

    async def _make_room(self) -> None:
        while self._max_loaded is not None and len(self._loaded) >= self._max_loaded:
            unused = [entry for entry in self._loaded.values() if not entry.num_users]
            if unused:
                await self._unload(unused[0])
            else:
                self._released.clear()
                await self._released.wait()

    async def _unload(self, entry: LoraSnapshot) -> None:
        is_loaded = entry.loaded_in == self._server.number
        self._forget(entry)
        if is_loaded:
            url = await self._server.url()
            body = {"lora_name": entry.name}
            status, answer = await self._client.post(url, "/unload_lora_adapter", body)
            if status != 200:
                why = message_of(answer)
                log.warning("%s: %s could not be unloaded: %s", self._server.name, entry.name, why)

    def _forget(self, entry: LoraSnapshot) -> None:
        entry.loaded_in = 0
        self._loaded.pop(entry.name, None)

    def _forget_earlier_starts(self, number: int) -> None:
        for entry in [e for e in self._loaded.values() if e.loaded_in != number]:
            self._forget(entry)

    def _remove_soon(self, entry: LoraSnapshot) -> None:
        task = asyncio.create_task(self._remove(entry), name=f"remove {entry.name}")
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)

    async def _remove(self, entry: LoraSnapshot) -> None:
        with suppress(ServerLost, PostTrainingError):
            await self._unload(entry)
        await asyncio.to_thread(shutil.rmtree, entry.directory, ignore_errors=True)


def _end_loading(entry: LoraSnapshot, task: asyncio.Task[None]) -> None:
    entry.loading = None
    if not task.cancelled():
        task.exception()  # Those who wait have it; there may be none left.


def _refused(status: int, message: str, server: Server, directory: Path) -> PostTrainingError:
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
