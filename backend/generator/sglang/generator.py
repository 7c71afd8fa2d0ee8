"""The generator over one SGLang server."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from backend.generator.base import SampleCall, SampledSequence, SampleResult
from backend.generator.sglang import replies, requests
from backend.generator.sglang.client import AdapterMissing, Client, ServerLost
from backend.generator.sglang.model import ServedModel
from backend.generator.sglang.options import SglangOptions
from backend.generator.sglang.prompt import PromptResult
from backend.generator.sglang.replies import Read, Sampled
from backend.generator.sglang.requests import Reading
from backend.generator.sglang.sample_run import RunWeights, SampleRun, hold
from backend.generator.sglang.server import Server
from backend.generator.sglang.snapshots import Place, ServerSnapshots
from backend.generator.stopping import Decode, StopMatcher
from backend.generator.turns import Turns
from backend.trainer.base import ModelInfo, Weights
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.samples import check_tokens

T = TypeVar("T")

# A call that was running whenever the server ended is not what others should suffer for.
_MAX_LOSSES = 2
_LAST_ANSWERS_S = 5.0


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
        self._snapshots = ServerSnapshots(model, server, self._client, directory)
        self._following: set[SampleRun] = set()
        self._is_closed = False

    @property
    def model(self) -> ModelInfo:
        return self._served.info

    async def add_snapshot(self, snapshot: str, weights: Weights) -> None:
        await self._snapshots.add(snapshot, weights)

    def drop_snapshot(self, snapshot: str) -> None:
        self._snapshots.drop(snapshot)

    def move(self, old: str, new: str) -> None:
        """SGLang cannot change a running request's weights: it is ended there with the tokens that it has, and what
        follows is asked for under the new ones."""
        weights = self._snapshots.find(new)
        for run in self._following:
            if run.snapshot == old:
                run.move(new, weights)
                if run.request is not None:
                    self._client.abort(run.request)

    async def sample(self, call: SampleCall) -> SampleResult:
        self._check(call)
        with ExitStack() as held:
            weights = self._snapshots.find(call.snapshot)
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
        await self._snapshots.close()
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

    async def _finish(self, run: SampleRun) -> SampledSequence:
        while not run.is_finished:
            await self._persistently(self._advancing(run))
        return run.result()

    def _advancing(self, run: SampleRun) -> Callable[[], Awaitable[None]]:
        async def advance() -> None:
            snapshot = run.snapshot
            placed, turn = self._snapshots.placed(run.weights), self._turn(run.call, run.num_left)
            async with placed as place, turn:
                url = await self._server.url()
                if run.snapshot != snapshot:
                    return  # It moved while it waited.
                part = await self._sample(run, place, url)
            if run.is_long_to_take:
                await asyncio.to_thread(run.take, part, snapshot)
            else:
                run.take(part, snapshot)

        return advance

    async def _sample(self, run: SampleRun, place: Place, url: str) -> Sampled:
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
        rid = uuid.uuid4().hex
        with run.requesting(rid):
            reply = await self._client.generate(url, body, rid)
        self._require_open()
        part = replies.sampled(
            reply,
            num_asked=run.num_left,
            vocab_size=vocab_size,
            num_top=min(call.topk_sample_logprobs, vocab_size),
            experts=self._served.experts,
        )
        self._snapshots.check(part.weight_version, place)
        return part

    def _reading(
        self, call: SampleCall, weights: RunWeights, reading: Reading
    ) -> Callable[[], Awaitable[Read]]:
        async def attempt() -> Read:
            async with (
                self._snapshots.placed(weights) as place,
                self._turn(call, len(reading.tokens)),
            ):
                return await self._read(reading, place)

        return attempt

    async def _read(self, reading: Reading, place: Place) -> Read:
        body = requests.reading_body(reading, place.lora)
        url = await self._server.url()
        reply = await self._client.generate(url, body, uuid.uuid4().hex)
        found = replies.read(reply, reading, vocab_size=self.model.limits.vocab_size)
        self._snapshots.check(found.weight_version, place)
        return found

    def _turn(self, call: SampleCall, num_tokens: int):
        """Snapshots get equal shares where there are more calls than may be sent."""
        return self._turns.turn(call.snapshot or "", max(num_tokens, 1))

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
