"""The generator over one SGLang server."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from backend.generator.base import SampleCall, SampledSequence, SampleResult
from backend.generator.sglang import peft_directory, replies, requests
from backend.generator.sglang.adapters import Adapters
from backend.generator.sglang.client import AdapterMissing, Client, Json, ServerLost, message_of
from backend.generator.sglang.finite import FiniteCheck
from backend.generator.sglang.full_directories import FullDirectories, FullSnapshot
from backend.generator.sglang.model import ServedModel
from backend.generator.sglang.options import SglangOptions
from backend.generator.sglang.prompt import PromptResult
from backend.generator.sglang.replies import Read, Sampled
from backend.generator.sglang.requests import Reading
from backend.generator.sglang.sample_run import RunWeights, SampleRun, hold
from backend.generator.sglang.server import Server
from backend.generator.sglang.weights import WeightTurns
from backend.generator.stopping import Decode, StopMatcher
from backend.generator.turns import Turns
from backend.trainer.base import FullWeights, ModelInfo, Weights
from backend.trainer.checks import check_full_weights
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.samples import check_tokens

T = TypeVar("T")

# A call that was running whenever the server ended is not what others should suffer for.
_MAX_LOSSES = 2
_LAST_ANSWERS_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """What a request is sent with, by the server's names; None: the base model."""

    lora: str | None = None
    weights: str | None = None


class SglangGenerator:
    """See `backend.generator.base.Generator`.

    Args:
        directory: for snapshots, which the server sees under the same path. It is this generator's own, and removed
            when it is closed.
    """

    def __init__(
        self,
        model: ServedModel,
        server: Server,
        options: SglangOptions,
        directory: Path,
        decode: Decode | None,
    ) -> None:
        self._served = model
        self._server = server
        self._directory = directory
        self._decode = decode
        self._client = Client()
        self._turns = Turns(options.max_running)
        self._base_version = server.facts.weight_version
        self._adapters = Adapters(
            server,
            self._client,
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
        self._weights = WeightTurns(self._replace, lambda: server.number, self._after_restart)
        self._following: set[SampleRun] = set()
        self._is_closed = False

    @property
    def model(self) -> ModelInfo:
        return self._served.info

    async def add_snapshot(self, snapshot: str, weights: Weights) -> None:
        is_known = self._adapters.find(snapshot) or self._full.find(snapshot)
        assert not is_known, f"snapshot {snapshot!r} exists: a name is used once"
        if isinstance(weights, FullWeights):
            check_full_weights(weights, self._served.tensor_shapes)
            await self._full.add(snapshot, weights)
            return
        self._served.check_adapter(weights, self._server.facts)
        adapter = peft_directory.completed(weights, self._served.layers)
        await self._adapters.add(snapshot, adapter)

    def drop_snapshot(self, snapshot: str) -> None:
        is_full = isinstance(self._find(snapshot), FullSnapshot)
        (self._full if is_full else self._adapters).drop(snapshot)

    def move(self, old: str, new: str) -> None:
        """SGLang cannot change a running request's weights: it is ended there with the tokens that it has, and what
        follows is asked for under the new ones."""
        weights = self._find(new)
        for run in self._following:
            if run.snapshot == old:
                run.move(new, weights)
                if run.request is not None:
                    self._client.abort(run.request)

    async def sample(self, call: SampleCall) -> SampleResult:
        self._check(call)
        with ExitStack() as held:
            weights = self._find(call.snapshot)
            hold(held, weights)
            runs = [
                SampleRun(call, i, self._decode, weights, held) for i in range(call.num_samples)
            ]
            self._following |= set(runs) if call.follows else set()
            try:
                return await self._answer(call, weights, runs)
            finally:
                self._following -= set(runs)

    async def _answer(
        self, call: SampleCall, weights: RunWeights, runs: list[SampleRun]
    ) -> SampleResult:
        """The prompt is scored under the weights that the call began with."""
        prompt = PromptResult(call)
        for reading in requests.readings(call, self.model.limits.vocab_size):
            read = await self._persistently(self._reading(call, weights, reading))
            prompt.add(reading, read)
        sequences = await _all([self._finish(run) for run in runs]) if call.max_tokens else []
        cached = prompt.cached_tokens if prompt.cached_tokens is not None else runs[0].cached_tokens
        return prompt.result(sequences, cached or 0, requests.warnings(call, self._server.facts))

    async def close(self) -> None:
        if self._is_closed:
            return
        await self.leave()
        await asyncio.to_thread(self._server.close)

    async def leave(self) -> None:
        """Leaves the server as it was, for others."""
        self._is_closed = True
        await self._client.abort_all(_LAST_ANSWERS_S)
        await self._adapters.close()
        if self._weights.live is not None and self._server.is_shared:
            with suppress(ServerLost, PostTrainingError):
                await self._replace(None)
        await self._client.close()
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    def _check(self, call: SampleCall) -> None:
        self._require_open()
        limits = self.model.limits
        check_tokens(call.prompt, limits, what="The prompt")
        if call.target_prompt_tokens is not None and call.target_prompt_tokens.size:
            check_tokens(
                np.maximum(call.target_prompt_tokens, 0), limits, what="target_prompt_tokens"
            )
        StopMatcher(call.stop, self._decode)
        requests.check_supported(
            call, self._server.facts, self.model, has_experts=self._served.has_experts
        )

    def _require_open(self) -> None:
        if self._is_closed:
            raise _closed()

    def _find(self, snapshot: str | None) -> RunWeights:
        """None: the base model. Raises SNAPSHOT_NOT_FOUND."""
        if snapshot is None:
            return None
        found = self._adapters.find(snapshot) or self._full.find(snapshot)
        if found is None:
            raise fail(
                Reason.SNAPSHOT_NOT_FOUND, f"Unknown snapshot {snapshot!r}.", snapshot=snapshot
            )
        return found

    async def _finish(self, run: SampleRun) -> SampledSequence:
        while not run.is_finished:
            await self._persistently(self._advancing(run))
        return run.result()

    def _advancing(self, run: SampleRun) -> Callable[[], Awaitable[None]]:
        async def advance() -> None:
            snapshot = run.snapshot
            async with self._placed(run.weights) as place, self._turn(run.call, run.num_left):
                if run.snapshot != snapshot:
                    return  # It moved while it waited.
                part = await self._sample(run, place)
            if run.is_long_to_take:
                await asyncio.to_thread(run.take, part, snapshot)
            else:
                run.take(part, snapshot)

        return advance

    async def _sample(self, run: SampleRun, place: _Place) -> Sampled:
        call, vocab_size = run.call, self.model.limits.vocab_size
        body = requests.sampling_body(
            call,
            run.so_far(),
            run.num_left,
            lora=place.lora,
            seed=requests.seed_of(call, run.index, self._server.facts),
            vocab_size=vocab_size,
            has_experts=self._served.has_experts,
        )
        url, run.request = await self._server.url(), uuid.uuid4().hex
        try:
            reply = await self._client.generate(url, body, run.request)
        finally:
            run.request = None
        self._require_open()
        part = replies.sampled(
            reply,
            num_asked=run.num_left,
            vocab_size=vocab_size,
            num_top=min(call.topk_sample_logprobs, vocab_size),
            experts=self._served.experts,
        )
        self._check_weights(part.weight_version, place)
        return part

    def _reading(
        self, call: SampleCall, weights: RunWeights, reading: Reading
    ) -> Callable[[], Awaitable[Read]]:
        async def attempt() -> Read:
            async with self._placed(weights) as place, self._turn(call, len(reading.tokens)):
                return await self._read(reading, place)

        return attempt

    async def _read(self, reading: Reading, place: _Place) -> Read:
        body = requests.reading_body(reading, place.lora)
        url = await self._server.url()
        reply = await self._client.generate(url, body, uuid.uuid4().hex)
        found = replies.read(reply, reading, vocab_size=self.model.limits.vocab_size)
        self._check_weights(found.weight_version, place)
        return found

    def _turn(self, call: SampleCall, num_tokens: int):
        """Snapshots get equal shares where there are more calls than may be sent."""
        return self._turns.turn(call.snapshot or "", float(max(num_tokens, 1)))

    @asynccontextmanager
    async def _placed(self, weights: RunWeights) -> AsyncIterator[_Place]:
        """The server has these, which are held, until the end, or until it is started again."""
        if isinstance(weights, FullSnapshot):
            async with self._weights.turn(weights.name):
                await weights.finite.require()
                yield _Place(weights=weights.name)
            return
        async with self._weights.turn(None):
            if weights is None:
                yield _Place()
                return
            async with self._adapters.use(weights) as lora:
                yield _Place(lora=lora)

    async def _persistently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Again where the server was lost meanwhile, a few times.

        Raises:
            PostTrainingError: UNAVAILABLE.
        """
        num_losses = 0
        while True:
            try:
                return await attempt()
            except AdapterMissing as missing:
                error: Exception = missing
            except ServerLost as lost:
                error = lost
                if not self._is_closed:
                    await self._server.lost(self._server.number)
            num_losses += 1
            if self._is_closed or num_losses > _MAX_LOSSES:
                raise self._gave_up(num_losses, error)

    def _gave_up(self, num_losses: int, error: Exception) -> PostTrainingError:
        if self._is_closed:
            return _closed()
        return fail(
            Reason.UNAVAILABLE,
            f"{self._server.name} was lost {num_losses} times while it worked on this call ({error}).",
            server=self._server.name,
        )

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

    def _check_weights(self, version: str, place: _Place) -> None:
        """Raises ServerLost for an answer under others than were asked for: the server was started again unseen, or
        somebody else gave it other weights."""
        expected = self._version(place.weights)
        if version and version != expected:
            self._weights.forget()
            raise ServerLost(f"it has weights {version!r}, not {expected!r}")

    def _after_restart(self) -> str | None:
        """What weights it has then."""
        version = self._server.facts.weight_version
        return None if version == self._base_version else version

    async def _gives_numbers(self, lora: str | None) -> bool:
        """Reads two tokens under whatever the server has now."""
        tokens = np.array([0, min(1, self.model.limits.vocab_size - 1)], np.int64)
        reading = Reading(tokens=tokens, first=1)
        body = requests.reading_body(reading, lora)
        reply = await self._client.generate(await self._server.url(), body, uuid.uuid4().hex)
        try:
            replies.read(reply, reading, vocab_size=self.model.limits.vocab_size)
        except PostTrainingError as error:
            if error.reason is Reason.NON_FINITE_LOGITS:
                return False
            raise
        return True


async def _all(work: Sequence[Coroutine[Any, Any, SampledSequence]]) -> list[SampledSequence]:
    """All results, or the first failure, and then nothing goes on."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _closed() -> PostTrainingError:
    return fail(Reason.UNAVAILABLE, "The generator was closed.")


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
