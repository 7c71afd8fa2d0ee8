"""Clients of one server that train at the same time, each a session with a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import tinker_compat as tinker
from benchmarks import report
from benchmarks.spine import training_step

Sequences = Sequence[list[int]]


class Clients:
    def __init__(
        self,
        service: tinker.ServiceClient,
        model: str,
        sequences: Sequences,
        *,
        count: int,
        rank: int,
    ) -> None:
        """All train on the same sequences, each an adapter of its own."""
        made = [
            service.create_lora_training_client(model, rank=rank, seed=i).result()
            for i in range(count)
        ]
        self._steps = [training_step(client, list(sequences)) for client in made]
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="client")

    def train(self, num_steps: int) -> list[float]:
        """Seconds that each client took for so many steps; all begin together."""
        start = threading.Barrier(len(self._steps))

        def timed(step: Callable[[], None]) -> float:
            start.wait()
            return report.seconds(lambda: [step() for _ in range(num_steps)])

        return list(self._pool.map(timed, self._steps))
