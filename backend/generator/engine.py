"""The engine: continuous batching, one token of every running sample per step.

One thread owns everything that computes. Calls come in through a queue; between two steps all that arrived are read
together, those that were cancelled leave, and those that are done are answered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

from backend.generator.batch import Batch
from backend.generator.lora import SnapshotWeights
from backend.generator.sequences import Job, Prefill, Sample
from backend.generator.stepper import Drawn, Stepper
from together_post_training.errors import PostTrainingError, Reason, fail

Item = TypeVar("Item", Prefill, Sample)

_log = logging.getLogger(__name__)


class Engine:
    """Runs the jobs that are submitted, from any thread, in one of its own."""

    def __init__(self, stepper: Stepper, batch: Batch) -> None:
        self._stepper = stepper
        self._batch = batch
        self._inbox: SimpleQueue[Job | Callable[[], None] | None] = SimpleQueue()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._inbox.put(job)
        if self._has_ended:
            self._fail_left_behind()

    def keep_prefixes(self, weights: SnapshotWeights) -> None:
        """What is read under these weights is kept for later calls, until they are dropped."""
        self._inbox.put(lambda: self._batch.prefixes.add(weights))

    def drop_prefixes(self, weights: SnapshotWeights) -> None:
        self._inbox.put(lambda: self._batch.prefixes.drop(weights))

    def move(
        self, job: Job, snapshot: str | None, weights: SnapshotWeights | None, to: Engine
    ) -> Future[None]:
        """A job that was submitted here goes on under other weights, maybe in another engine.

        Returns:
            Done once the job is there: only then may that engine be asked to move it. Never, if this one has ended.
        """
        moved: Future[None] = Future()
        self._inbox.put(lambda: moved.set_result(self._move(job, snapshot, weights, to)))
        return moved

    def end(self) -> None:
        """Ends the thread after the step that is in progress, and fails what is unfinished."""
        self._inbox.put(None)

    def close(self) -> None:
        """The same, and waits for it."""
        self.end()
        self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():
            while self._receive():
                try:
                    self._step()
                except Exception as error:
                    self._fail(self._batch.jobs, error)
        for job in self._batch.jobs:
            job.fail(_closed())
        self._has_ended = True
        self._fail_left_behind()

    def _receive(self) -> bool:
        """Takes in all that has arrived; waits for something if there is nothing to do. False at the end."""
        try:
            while self._take_in():
                pass
        except Empty:
            return True
        return False

    def _take_in(self) -> bool:
        message = self._inbox.get(block=self._batch.is_idle)
        if isinstance(message, Job):
            self._batch.add(message)
        elif message is not None:
            message()
        return message is not None

    def _fail_left_behind(self) -> None:
        """What arrived too late."""
        with suppress(Empty):
            while True:
                message = self._inbox.get_nowait()
                if isinstance(message, Job):
                    message.fail(_closed())

    def _move(
        self, job: Job, snapshot: str | None, weights: SnapshotWeights | None, to: Engine
    ) -> None:
        if job.future.done():
            return
        self._batch.forget({job})
        try:
            job.move(snapshot, weights)
        except Exception as error:
            self._fail({job}, error)  # There may be no memory for what it reads again.
            return
        if to is self:
            self._batch.add(job)
        else:
            job.number = -1
            to.submit(job)

    def _step(self) -> None:
        batch = self._batch
        batch.forget({job for job in batch.running_jobs if job.future.cancelled()})
        if prefills := batch.admit():
            self._guarded(self._read, prefills, {prefill.job for prefill in prefills})
        batch.make_room()
        if batch.running:
            self._guarded(self._advance, batch.running, batch.running_jobs)

    def _guarded(self, work: Callable[[list[Item]], None], on: list[Item], jobs: set[Job]) -> None:
        """A failure is that of the jobs that were computed together; others, and the engine, go on."""
        try:
            work(on)
        except Exception as error:
            self._fail(jobs, error)

    def _read(self, prefills: list[Prefill]) -> None:
        drawn = self._stepper.read(prefills)
        self._batch.start(prefills)
        self._push(drawn)
        self._answer({prefill.job for prefill in prefills})

    def _advance(self, running: list[Sample]) -> None:
        jobs = {sample.job for sample in running}
        self._push(self._stepper.advance(running))
        self._answer(jobs)

    def _push(self, drawn: Iterable[Drawn]) -> None:
        for d in drawn:
            sample = d.sample
            if sample.row is None:
                continue  # Another sample has failed their call in this very step.
            try:
                sample.push(d.token, d.logprob, d.topk)
            except PostTrainingError as error:
                self._batch.forget({sample.job})
                sample.job.fail(error)
                continue
            except Exception as error:
                # Matching stop strings is the only thing that is done for each sample apart.
                self._fail({sample.job}, error)
                continue
            if sample.is_finished:
                self._batch.retire(sample)
                sample.job.num_unfinished -= 1

    def _answer(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if job.is_done and not job.future.done():
                job.finish()

    def _fail(self, jobs: set[Job], error: Exception) -> None:
        _log.error("A step of the generator failed", exc_info=error)
        self._batch.forget(jobs)
        for job in jobs:
            job.fail(fail(Reason.INTERNAL, f"The generator failed: {error}"))


def _closed() -> PostTrainingError:
    return fail(Reason.UNAVAILABLE, "The generator was closed.")
