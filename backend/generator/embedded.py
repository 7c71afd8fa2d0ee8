"""The embedded generator: samples from snapshots on the trainer's own base weights, in this process."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import torch

from backend.generator.base import SampleCall, SampleResult
from backend.generator.batch import Batch
from backend.generator.engine import Engine
from backend.generator.full_snapshots import FullSnapshots
from backend.generator.invariant_runner import InvariantRunner
from backend.generator.kv_cache import KVCache, bytes_per_token, capacity_for
from backend.generator.lora import SnapshotWeights
from backend.generator.model_runner import ModelRunner
from backend.generator.self_check import check_equals_transformers
from backend.generator.sequences import Job
from backend.generator.stepper import Stepper
from backend.generator.text import load_decoder
from backend.trainer.base import FullWeights, ModelInfo, Weights
from backend.trainer.base_model import BaseModel
from together_post_training.errors import Reason, fail
from together_post_training.samples import check_tokens

_USUAL_CACHE_BYTES = 2 * 2**30


class EmbeddedGenerator:
    """See `backend.generator.base.Generator`.

    Batches of different sizes add up in different orders, so log-probabilities move by about 1e-6 with what is sampled
    beside them. Tokens do not: each is drawn by its own number, which would have to fall that close to a boundary. With
    `batch_invariant` they do not move at all.

    Args:
        base: shared with the trainer; nothing is copied.
        max_running: samples that run at once; more wait their turn.
        cache_bytes: memory for keys and values, of what runs and, in what that leaves, of what was read before; at
            least a window's. None: 2 GiB, or a window's if that is more. Each snapshot of full weights that is sampled
            from has as much for itself.
        max_prefill_tokens: tokens of prompts read in one step while samples run; longer prompts are read in parts, so
            that nobody waits longer for the next token.
        batch_invariant: the same call gives the same bits, whatever is computed beside it, however its prompt is read,
            and whatever of it was read before. Takes longer; see `invariant`.

    Raises:
        PostTrainingError: INVALID_ARGUMENT if `cache_bytes` does not hold one whole window; UNIMPLEMENTED for a model
            that this engine would compute differently than transformers, and for `batch_invariant` where this machine
            does not allow it.
    """

    def __init__(
        self,
        base: BaseModel,
        *,
        max_running: int = 128,
        cache_bytes: int | None = None,
        max_prefill_tokens: int = 512,
        batch_invariant: bool = False,
    ) -> None:
        self._model = base.info
        num_threads = torch.get_num_threads()

        def make_runner(model: BaseModel) -> ModelRunner:
            return InvariantRunner(model, num_threads) if batch_invariant else ModelRunner(model)

        runner = make_runner(base)
        check_equals_transformers(base, runner)
        self._copy = runner.snapshot
        self._decode = load_decoder(base.tokenizer_dir)
        self._snapshots: dict[str, SnapshotWeights] = {}
        self._is_closed = False
        num_tokens = _cache_tokens(base, cache_bytes)

        def start(runner: ModelRunner) -> Engine:
            return Engine(
                Stepper(runner, base.info.limits.vocab_size),
                Batch(
                    KVCache(num_tokens),
                    max_running=max_running,
                    max_prefill_tokens=max_prefill_tokens,
                ),
            )

        self._engine = start(runner)
        self._following: set[_Following] = set()
        self._full = FullSnapshots(base, lambda model: start(make_runner(model)))

    @property
    def model(self) -> ModelInfo:
        return self._model

    async def add_snapshot(self, snapshot: str, weights: Weights) -> None:
        is_known = snapshot in self._snapshots or snapshot in self._full
        assert not is_known, f"snapshot {snapshot!r} exists: a name is used once"
        if isinstance(weights, FullWeights):
            self._full.add(snapshot, weights)
            return
        known = self._copy(weights)
        self._snapshots[snapshot] = known
        self._engine.keep_prefixes(known)

    def drop_snapshot(self, snapshot: str) -> None:
        if snapshot in self._full:
            self._full.drop(snapshot)
            return
        self._check_known(snapshot)
        self._engine.drop_prefixes(self._snapshots.pop(snapshot))

    def move(self, old: str, new: str) -> None:
        self._check_known(new)
        for following in self._following:
            if following.snapshot == old:
                following.snapshot = new
                following.has_moved.set()

    async def sample(self, call: SampleCall) -> SampleResult:
        if self._is_closed:
            raise fail(Reason.UNAVAILABLE, "The generator was closed.")
        self._check_known(call.snapshot)
        self._check(call)
        async with AsyncExitStack() as held:
            following = self._follow(call, held)
            engine, weights = await self._place(call.snapshot, held)
            job = Job(call, weights, self._decode)
            engine.submit(job)
            answer = asyncio.wrap_future(job.future)
            held.callback(answer.cancel)
            while call.follows and await following.moves_before(answer):
                snapshot = following.snapshot
                to, weights = await self._place(snapshot, held)
                moved = asyncio.wrap_future(engine.move(job, snapshot, weights, to))
                await asyncio.wait([moved, answer], return_when=asyncio.FIRST_COMPLETED)
                engine = to
            return await answer

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await asyncio.to_thread(self._engine.close)
            await asyncio.to_thread(self._full.close)
            self._snapshots.clear()

    def _follow(self, call: SampleCall, held: AsyncExitStack) -> _Following:
        following = _Following(call.snapshot)
        if call.follows:
            self._following.add(following)
            held.callback(self._following.discard, following)
        return following

    async def _place(
        self, snapshot: str | None, held: AsyncExitStack
    ) -> tuple[Engine, SnapshotWeights | None]:
        """Where a call of this snapshot runs, and the adapter that it takes; both last as long as it is held."""
        if snapshot is not None and snapshot in self._full:
            return await held.enter_async_context(self._full.engine(snapshot)), None
        self._check_known(snapshot)
        return self._engine, None if snapshot is None else self._snapshots[snapshot]

    def _check_known(self, snapshot: str | None) -> None:
        if snapshot is None or snapshot in self._full or snapshot in self._snapshots:
            return
        raise fail(Reason.SNAPSHOT_NOT_FOUND, f"Unknown snapshot {snapshot!r}.", snapshot=snapshot)

    def _check(self, call: SampleCall) -> None:
        """What would fail in the middle of a step, and with it the calls computed in the same one."""
        limits = self._model.limits
        check_tokens(call.prompt, limits, what="The prompt")
        needed = len(call.prompt) + call.max_tokens
        if needed > limits.max_seq_length:
            raise fail(
                Reason.SEQUENCE_TOO_LONG,
                f"The prompt has {len(call.prompt)} tokens and max_tokens is {call.max_tokens}: together more than "
                f"the model's window of {limits.max_seq_length}.",
                num_tokens=len(call.prompt),
                max_tokens=call.max_tokens,
                max_seq_length=limits.max_seq_length,
            )


class _Following:
    """A call's snapshot, which may change while it runs. Owned by the event loop."""

    def __init__(self, snapshot: str | None) -> None:
        self.snapshot = snapshot
        self.has_moved = asyncio.Event()

    async def moves_before(self, answer: asyncio.Future[SampleResult]) -> bool:
        """Waits until the snapshot changes, or until the call is answered."""
        moved = asyncio.ensure_future(self.has_moved.wait())
        try:
            await asyncio.wait([moved, answer], return_when=asyncio.FIRST_COMPLETED)
        finally:
            moved.cancel()
        self.has_moved.clear()
        return not answer.done()


def _cache_tokens(base: BaseModel, cache_bytes: int | None) -> int:
    per_token = bytes_per_token(base.module.config, base.dtype)
    window = capacity_for(base.info.limits.max_seq_length)
    if cache_bytes is None:
        return max(_USUAL_CACHE_BYTES // per_token, window)
    if cache_bytes < window * per_token:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"{cache_bytes} bytes for keys and values hold {cache_bytes // per_token} tokens of this model: give at "
            f"least {window * per_token} ({window * per_token / 2**30:.3f} GiB), for one window.",
            cache_bytes=cache_bytes,
            min_cache_bytes=window * per_token,
        )
    return cache_bytes // per_token
