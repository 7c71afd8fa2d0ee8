"""The server: everything put together, started and stopped. One process, one event loop."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path

import grpc
import grpc.aio

from backend.checkpoints.store import CheckpointStore
from backend.config import ServerConfig
from backend.generator.admission import Admission, AdmissionLimits
from backend.operations.intake import Intake
from backend.operations.registry import OperationRegistry, mark_failed
from backend.operations.sqlite_journal import SqliteJournal
from backend.resources import engines
from backend.resources.catalog import Catalog, ModelSpec
from backend.resources.engines import OpenEngines
from backend.resources.resource import Resource, ResourceFactory
from backend.resources.resources import Resources
from backend.resources.retention import Lifetimes
from backend.resources.sample_records import SampleRecords
from backend.resources.sessions import SessionLimits, Sessions
from backend.resources.snapshots import Snapshots
from backend.services.catalog_service import CatalogService
from backend.services.checkpoint_service import CheckpointService
from backend.services.generator_service import GeneratorService
from backend.services.model_resource_service import ModelResourceService
from backend.services.operation_service import OperationService
from backend.services.registration import Health, add_reflection, add_services
from backend.services.session_service import SessionService
from backend.services.status import ErrorBorder
from backend.services.trainer_service import TrainerService
from backend.store import open_embedded_store, open_store
from together_post_training.errors import Reason, fail
from together_post_training.v1 import operations_pb2

log = logging.getLogger(__name__)

# gRPC's own limits cancel bursts above 1000 requests at random.
_MAX_PENDING = 100_000
# Clients may ping every 10 s, also between calls.
_MIN_PING_INTERVAL_MS = 5_000
_LAST_ANSWERS_S = 0.5


class Server:
    """Make it within the event loop that runs it.

    clock: seconds since 1970. monotonic: seconds, never back.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        open_engines: OpenEngines | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self._monotonic = monotonic
        open_ = open_embedded_store if config.embedded else open_store
        self._store = open_(config.store)
        try:
            self._journal = SqliteJournal(
                self._store.journal, self._store.operations, config.durability
            )
        except BaseException:
            self._store.close()
            raise
        self._checkpoints = CheckpointStore(self._store.checkpoints, clock)
        self._registry = OperationRegistry(self._journal, clock)
        self._intake = Intake(self._registry, self._journal, clock)
        open_configured = partial(
            engines.open_engines, options=config.engines, scratch=self._store.handed_out
        )
        self._factory = self._make_factory(open_engines or open_configured)
        catalog = Catalog(
            config.models, load_on_demand=config.load_on_demand, trusts_paths=config.embedded
        )
        self._resources = Resources(catalog, self._open_resource)
        lifetimes = Lifetimes(
            lease_s=config.snapshot_lease_s, retention_s=config.snapshot_retention_s
        )
        self._snapshots = Snapshots(
            self._journal, self._checkpoints, self._resources, lifetimes, monotonic
        )
        self._records = SampleRecords(monotonic)
        limits = AdmissionLimits(
            num_calls=config.max_sampling_calls, num_bytes=config.max_sampling_bytes
        )
        self._admission = Admission(limits, monotonic)
        self._sessions = self._make_sessions()
        self._grpc = grpc.aio.server(interceptors=[ErrorBorder()], options=_options(config))
        self._health = Health(self._grpc)
        self._tasks: list[asyncio.Task] = []
        self._add_services()

    @property
    def store(self) -> Path:
        return self._store.root

    async def start(self) -> str:
        """Listens and answers health checks; models are not loaded yet. Returns "host:port".

        Raises:
            PostTrainingError: UNAVAILABLE when the address cannot be listened on.
        """
        config = self._config
        await self._recover()
        try:
            port = self._listen()
        except BaseException:
            await self._close()
            raise
        await self._health.set_serving(False)
        await self._grpc.start()
        self._repeat(config.gap_check_interval_s, self._sessions.give_up_missing)
        self._repeat(
            config.checkpoint_sweep_interval_s,
            lambda: asyncio.to_thread(self._checkpoints.sweep),
        )
        self._repeat(config.snapshot_sweep_interval_s, self._snapshots.sweep)
        return f"{config.host}:{port}"

    async def load_models(self) -> None:
        """Loads what the configuration names, then serves."""
        await self._resources.open_all()
        await self._health.set_serving(True)

    async def stop(self, grace_s: float) -> bool:
        """Ends what runs, at most `grace_s` later. False: an engine was still busy then."""
        await self._health.set_serving(False)
        error = fail(Reason.UNAVAILABLE, "The server is stopping.")
        self._intake.close(error)
        for task in self._tasks:
            task.cancel()
        start = self._monotonic()
        drained = await asyncio.gather(
            *(r.executor.drain(grace_s) for r in self._resources.all_ready())
        )
        self._registry.waiters.close(error)
        left_s = grace_s - (self._monotonic() - start)
        # Samples that run may end; those who waited for operations have their answers to send.
        await self._grpc.stop(grace=max(left_s, _LAST_ANSWERS_S))
        await self._close()
        return all(drained)

    async def _close(self) -> None:
        await self._resources.close()
        await self._journal.close()
        self._store.close()

    def _listen(self) -> int:
        host, port = self._config.host, self._config.port
        try:
            return self._grpc.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            raise fail(
                Reason.UNAVAILABLE,
                f"Cannot listen on {host}:{port}: it is in use, or not an address of this machine. Give another "
                "--port; 0 picks a free one.",
                host=host,
                port=port,
            ) from None

    async def _recover(self) -> None:
        for path in self._store.snapshots.iterdir():
            path.unlink()
        shutil.rmtree(self._store.handed_out, ignore_errors=True)
        lost = operations_pb2.Operation()
        error = fail(
            Reason.SESSION_LOST,
            "The server was restarted before this operation had ended; its session is lost. Start a new session from "
            "a checkpoint with resume_from.",
        )
        mark_failed(lost, error, operations_pb2.OPERATION_STATE_FAILED, self._clock())
        num_lost = await self._journal.recover(lost, self._clock())
        if num_lost:
            log.warning("%d sessions of an earlier server are lost", num_lost)
        await self._snapshots.restore()

    def _make_factory(self, open_engines: OpenEngines) -> ResourceFactory:
        return ResourceFactory(
            open_engines=open_engines,
            registry=self._registry,
            checkpoints=self._checkpoints,
            spill_dir=self._store.snapshots,
            max_resident=self._config.max_resident_snapshots,
            deterministic=self._config.deterministic,
            on_death=lambda: self._start(self._health.fail()),
            clock=self._clock,
        )

    async def _open_resource(self, spec: ModelSpec) -> Resource:
        return await self._factory.open(spec, self._snapshots)

    def _make_sessions(self) -> Sessions:
        config = self._config
        return Sessions(
            self._resources,
            self._journal,
            self._checkpoints,
            self._intake,
            SessionLimits(max_held=config.max_held, gap_timeout_s=config.gap_timeout_s),
            self._clock,
            self._monotonic,
        )

    def _add_services(self) -> None:
        add_services(
            self._grpc,
            catalog=CatalogService(self._resources),
            checkpoints=CheckpointService(self._checkpoints),
            generator=self._generator_service(),
            model_resources=ModelResourceService(self._resources),
            operations=OperationService(self._sessions, self._registry, self._intake),
            sessions=SessionService(self._sessions),
            trainer=TrainerService(self._sessions, self._intake, self._records),
        )
        add_reflection(self._grpc)

    def _generator_service(self) -> GeneratorService:
        return GeneratorService(self._snapshots, self._sessions, self._records, self._admission)

    def _repeat(self, interval_s: float, work: Callable[[], Awaitable[object]]) -> None:
        self._start(_every(interval_s, work))

    def _start(self, work: Coroutine) -> None:
        self._tasks.append(asyncio.create_task(work))


async def _every(interval_s: float, work: Callable[[], Awaitable[object]]) -> None:
    while True:
        await asyncio.sleep(interval_s)
        try:
            await work()
        except Exception:
            log.exception("a periodic task failed; it is tried again")


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.server.max_pending_requests", _MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _MAX_PENDING),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # Two servers on one port would each get half of the requests.
        ("grpc.so_reuseport", 0),
    ]
