"""The snapshots of one server: what it is given of them, when, and what a request must name to be answered from one."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backend.generator.sglang import peft_directory, replies, requests
from backend.generator.sglang.adapters import Adapters
from backend.generator.sglang.client import Client, Json, ServerLost, message_of
from backend.generator.sglang.finite import FiniteCheck
from backend.generator.sglang.full_directories import FullDirectories, FullSnapshot
from backend.generator.sglang.model import ServedModel
from backend.generator.sglang.requests import Reading
from backend.generator.sglang.sample_run import RunWeights
from backend.generator.sglang.server import Server
from backend.generator.sglang.weights import WeightTurns
from backend.trainer.base import FullWeights, Weights
from backend.trainer.checks import check_full_weights
from together_post_training.errors import PostTrainingError, Reason, fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a request is sent with, by the server's names; None: the base model."""

    lora: str | None = None
    weights: str | None = None


class ServerSnapshots:
    """Owned by the event loop. `directory`: see `SglangGenerator`."""

    def __init__(self, model: ServedModel, server: Server, client: Client, directory: Path) -> None:
        self._served = model
        self._server = server
        self._client = client
        self._base_version = server.facts.weight_version
        self._adapters = Adapters(
            server,
            client,
            directory / "adapters",
            model.info.location,
            server.facts.max_loaded_loras,
            lambda name: FiniteCheck(lambda: self._gives_numbers(name)),
        )
        self._full = FullDirectories(
            directory / "full",
            Path(model.info.location),
            lambda: FiniteCheck(lambda: self._gives_numbers(None)),
        )
        self._turns = WeightTurns(self._replace, lambda: server.number, self._after_restart)

    def find(self, snapshot: str | None) -> RunWeights:
        """None: the base model. Raises SNAPSHOT_NOT_FOUND."""
        if snapshot is None:
            return None
        found = self._adapters.find(snapshot) or self._full.find(snapshot)
        if found is None:
            raise fail(
                Reason.SNAPSHOT_NOT_FOUND, f"Unknown snapshot {snapshot!r}.", snapshot=snapshot
            )
        return found

    async def add(self, snapshot: str, weights: Weights) -> None:
        """Raises INCOMPATIBLE_CHECKPOINT, and what the server refuses."""
        is_known = self._adapters.find(snapshot) or self._full.find(snapshot)
        assert not is_known, f"snapshot {snapshot!r} exists: a name is used once"
        if isinstance(weights, FullWeights):
            check_full_weights(weights, self._served.tensor_shapes)
            await self._full.add(snapshot, weights)
            return
        self._served.check_adapter(weights, self._server.facts)
        adapter = peft_directory.completed(weights, self._served.layers)
        await self._adapters.add(snapshot, adapter)

    def drop(self, snapshot: str) -> None:
        """Raises SNAPSHOT_NOT_FOUND."""
        is_full = isinstance(self.find(snapshot), FullSnapshot)
        (self._full if is_full else self._adapters).drop(snapshot)

    @asynccontextmanager
    async def placed(self, weights: RunWeights) -> AsyncIterator[Place]:
        """The server has these, which are held, until the end, or until it is started again.

        Raises:
            ServerLost, AdapterMissing; PostTrainingError for what the server refuses, NON_FINITE_LOGITS.
        """
        if isinstance(weights, FullSnapshot):
            async with self._turns.turn(weights.name):
                await weights.finite.require()
                yield Place(weights=weights.name)
            return
        async with self._turns.turn(None):
            if weights is None:
                yield Place()
                return
            async with self._adapters.use(weights) as lora:
                yield Place(lora=lora)

    def check(self, version: str, place: Place) -> None:
        """Raises ServerLost for an answer under others than were asked for: the server was started again unseen, or
        somebody else gave it other weights."""
        expected = self._version(place.weights)
        if version and version != expected:
            self._turns.forget()
            raise ServerLost(f"it has weights {version!r}, not {expected!r}")

    async def close(self) -> None:
        """Leaves a server that goes on as it was."""
        await self._adapters.close()
        if self._turns.live is not None and self._server.is_shared:
            with suppress(ServerLost, PostTrainingError):
                await self._replace(None)

    async def _replace(self, weights: str | None) -> None:
        """See `WeightTurns`."""
        directory = self._full.directory(weights)
        body = {
            "model_path": str(directory),
            "weight_version": self._version(weights),
            "flush_cache": True,
        }
        url = await self._server.url()
        status, answer = await self._client.post(url, "/update_weights_from_disk", body)
        if status != 200 or not answer.get("success"):
            raise _not_replaced(self._server, status, answer, directory)

    def _version(self, weights: str | None) -> str:
        return self._base_version if weights is None else weights

    def _after_restart(self) -> str | None:
        """What weights it has then."""
        version = self._server.facts.weight_version
        return None if version == self._base_version else version

    async def _gives_numbers(self, lora: str | None) -> bool:
        """Reads two tokens under whatever the server has now."""
        tokens = np.array([0, min(1, self._served.info.limits.vocab_size - 1)], np.int64)
        reading = Reading(tokens=tokens, first=1)
        body = requests.reading_body(reading, lora)
        reply = await self._client.generate(await self._server.url(), body, uuid.uuid4().hex)
        try:
            replies.read(reply, reading, vocab_size=self._served.info.limits.vocab_size)
        except PostTrainingError as error:
            if error.reason is Reason.NON_FINITE_LOGITS:
                return False
            raise
        return True


def _not_replaced(server: Server, status: int, answer: Json, directory: Path) -> PostTrainingError:
    if status in (404, 405):
        return fail(
            Reason.UNIMPLEMENTED,
            f"{server.name} cannot be given full weights: it is a router, or not SGLang. Name the servers behind it "
            "themselves: --generator sglang:http://HOST:PORT,http://HOST:PORT",
        )
    return fail(
        Reason.UNAVAILABLE,
        f"{server.name} could not load {directory} (it must see that under the same path: --sglang-dir): "
        f"{message_of(answer)}",
        directory=directory,
    )
