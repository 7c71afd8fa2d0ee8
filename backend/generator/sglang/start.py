"""Servers and generators of a model, opened together with its trainer."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from backend.generator.sglang.agreement import check_agreement
from backend.generator.sglang.command import Served, gpu_of, gpus_each, memory_fraction
from backend.generator.sglang.generator import SglangGenerator
from backend.generator.sglang.model import ServedModel
from backend.generator.sglang.options import SglangOptions
from backend.generator.sglang.server import GivenServer, OwnServer, Server
from backend.generator.text import load_decoder
from backend.trainer.base import Trainer
from backend.trainer.base_model import BaseModel
from together_post_training.errors import Reason, fail

T = TypeVar("T")


class SglangServers:
    """The servers of one base model. Made before the trainer, which looks at what memory they leave it.

    Args:
        num_servers: how many to start, where the options name none.
        scratch: where snapshots are written, unless the options say.

    Raises:
        PostTrainingError: UNAVAILABLE for one that does not start or answer.
    """

    def __init__(
        self, base: BaseModel, options: SglangOptions, num_servers: int, scratch: Path
    ) -> None:
        if options.urls and num_servers not in (1, len(options.urls)):
            raise fail(
                Reason.INVALID_ARGUMENT,
                f"{num_servers} generator replicas, and the addresses of {len(options.urls)} SGLang servers: leave "
                "one of the two out.",
            )
        self._base = base
        self._options = options
        self._directory = (options.directory or scratch).expanduser().resolve()
        self._directory.mkdir(parents=True, exist_ok=True)
        self.servers = self._given() if options.urls else self._started(num_servers)

    def generators(self, trainer: Trainer) -> list[SglangGenerator]:
        """One for each server, which is compared with the trainer first; blocks.

        Raises:
            PostTrainingError: UNIMPLEMENTED where they disagree.
        """
        for server in self.servers:
            _in_a_loop_of_its_own(lambda server=server: self._check(server, trainer))
        return [self._generator(server) for server in self.servers]

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def _generator(self, server: Server) -> SglangGenerator:
        return SglangGenerator(
            ServedModel(self._base),
            server,
            self._options,
            self._directory / uuid.uuid4().hex[:12],
            load_decoder(self._base.tokenizer_dir),
        )

    async def _check(self, server: Server, trainer: Trainer) -> None:
        generator = self._generator(server)
        try:
            await check_agreement(generator, trainer, self._base, server.facts)
        finally:
            await generator.leave()

    def _given(self) -> Sequence[Server]:
        return [GivenServer(url, self._options) for url in self._options.urls]

    def _started(self, num_servers: int) -> Sequence[Server]:
        served = self._served(num_servers)
        servers = [
            OwnServer(f"sglang-{i}", each, self._options, self._directory)
            for i, each in enumerate(served)
        ]
        try:
            with ThreadPoolExecutor(num_servers) as pool:
                list(pool.map(OwnServer.start, servers))
        except BaseException:
            for server in servers:
                server.close()
            raise
        return servers

    def _served(self, num_servers: int) -> list[Served]:
        base = self._base
        on_cpu = Served(
            directory=Path(base.info.location),
            window=base.info.limits.max_seq_length,
            max_lora_rank=base.info.max_lora_rank,
            has_tokenizer=base.tokenizer_dir is not None,
            has_experts=ServedModel(base).has_experts,
            dtype="float32" if base.dtype == torch.float32 else "bfloat16",
            gpu=None,
        )
        if base.device.type != "cuda":
            return [on_cpu] * num_servers
        num_gpus, each = torch.cuda.device_count(), gpus_each(self._options.arguments)
        places = [gpu_of(i, num_gpus, each) for i in range(num_servers)]
        trainer_gpu = base.device.index or 0
        return [
            replace(on_cpu, gpu=gpu, memory_fraction=memory_fraction(places, gpu, trainer_gpu))
            for gpu in places
        ]


def _in_a_loop_of_its_own(work: Callable) -> None:
    """Whoever opens engines may be in a loop already, which this blocks."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(work())).result()
