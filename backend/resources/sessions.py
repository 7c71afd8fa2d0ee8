"""Sessions: made once for each id, kept alive by their callers, stopped, lost with the server."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from backend.checkpoints.store import CheckpointStore, LoadedCheckpoint
from backend.operations.actions import check_base_model, policy_version_after
from backend.operations.ended import timestamp
from backend.operations.intake import Intake
from backend.operations.journal import Journal, SessionEntry
from backend.operations.sequencer import Sequencer
from backend.operations.session import Session
from backend.resources.new_session import NewSession, fill_configuration
from backend.resources.resource import Resource, resource_id
from backend.resources.resources import Resources
from backend.trainer.base import (
    ADAMW,
    FullConfig,
    LoraConfig,
    OptimizerConfig,
    Trainer,
    WeightsConfig,
)
from backend.trainer.checks import check_lora
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.v1 import operations_pb2
from together_post_training.v1 import sessions_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    max_held: int = 1024
    gap_timeout_s: float = 60.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Creation:
    digest: bytes
    task: asyncio.Task[Session]


class Sessions:
    """Owned by the event loop.

    clock: seconds since 1970. monotonic: seconds, never back; it measures silence.
    """

    def __init__(
        self,
        resources: Resources,
        journal: Journal,
        checkpoints: CheckpointStore,
        intake: Intake,
        limits: SessionLimits,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resources = resources
        self._journal = journal
        self._checkpoints = checkpoints
        self._intake = intake
        self._limits = limits
        self._clock = clock
        self._monotonic = monotonic
        self._running: dict[str, Session] = {}
        self._creating: dict[str, _Creation] = {}
        self._digests: dict[str, bytes] = {}
        self._tasks: set[asyncio.Task] = set()

    async def create(self, new: NewSession, digest: bytes) -> pb.Session:
        """The session of that id, made now unless the same request has made it before.

        Raises:
            PostTrainingError: SESSION_EXISTS, and what keeps it from being made.
        """
        session_id = new.id or uuid.uuid4().hex
        known = await self._known(session_id, digest)
        if known is not None:
            return known
        creation = self._creating.get(session_id)
        if creation is None:
            creation = _Creation(
                digest=digest, task=asyncio.create_task(self._create(session_id, new, digest))
            )
            self._creating[session_id] = creation
        if creation.digest != digest:
            raise _exists(session_id)
        # A caller that hangs up leaves the session to its retry.
        return (await asyncio.shield(creation.task)).message()

    def running(self, session_id: str) -> Session | None:
        """A session that runs, or is being stopped. It was heard of now."""
        session = self._running.get(session_id)
        if session is not None:
            session.heard_of(self._monotonic(), self._clock())
        return session

    async def find(self, session_id: str) -> Session:
        """A session that takes operations.

        Raises:
            PostTrainingError: SESSION_NOT_FOUND, SESSION_STOPPED, or SESSION_LOST for one of an earlier server.
        """
        session = self.running(session_id)
        if session is None or not session.is_running:
            raise await self._why_not(session_id)
        return session

    def resource_of(self, session: Session) -> Resource:
        resource = self._resources.ready(session.shown.base_model)
        assert resource is not None, "a session's resource lives as long as its server"
        return resource

    async def get(self, session_id: str) -> pb.Session:
        """Also of earlier servers. To look at it is not to be heard of it. Raises SESSION_NOT_FOUND."""
        session = self._running.get(session_id)
        return (await self._entry(session_id)).session if session is None else session.message()

    async def list(self) -> list[pb.Session]:
        """Newest first."""
        entries = await self._journal.list_sessions()
        sessions = (self._running.get(entry.session.id) for entry in entries)
        return [
            entry.session if session is None else session.message()
            for entry, session in zip(entries, sessions, strict=True)
        ]

    async def stop(self, session_id: str) -> pb.Session:
        """Stops it once; what runs ends first, what has not started is cancelled."""
        session = self._running.get(session_id)
        if session is None:
            return (await self._entry(session_id)).session
        if session.is_running:
            session.is_running = False
            await self._put(session)
            self._spawn(self._stop(session))
            log.info("session %s stopped", session_id)
        return session.message()

    async def give_up_missing(self) -> None:
        """Ends the numbers that silent callers have not sent, so that what waits behind them goes on."""
        for session in list(self._running.values()):
            # Asked again each time: the caller may speak up in between.
            while session.is_running and (missing := session.sequencer.missing(self._monotonic())):
                await self._intake.use_up(
                    session,
                    self.resource_of(session).executor,
                    missing[0],
                    _gap(missing[0], self._limits.gap_timeout_s),
                    operations_pb2.OPERATION_STATE_FAILED,
                )

    async def _known(self, session_id: str, digest: bytes) -> pb.Session | None:
        """The session if the same request has made it. None: it is being made, or has yet to be."""
        if not self._is_here(session_id):
            entry = await self._journal.get_session(session_id)
            # It may have been made in between.
            if entry is not None and not self._is_here(session_id):
                same = entry.digest == digest
                raise _ended(entry.session) if same else _exists(session_id)
        session = self._running.get(session_id)
        if session is None:
            return None
        if self._digests[session_id] != digest:
            raise _exists(session_id)
        return session.message()

    def _is_here(self, session_id: str) -> bool:
        return session_id in self._running or session_id in self._creating

    async def _create(self, session_id: str, new: NewSession, digest: bytes) -> Session:
        try:
            loaded = await self._load(new)
            # A variant of the checkpoint's model says which window it needs.
            base_model = new.base_model or (loaded.manifest.base_model if loaded else "")
            resource = await self._resources.get(base_model)
            weights, optimizer = _configuration(new, loaded)
            if isinstance(weights, LoraConfig):
                check_lora(weights, resource.model)
            await resource.thread.call(
                _create, resource.trainer, session_id, weights, optimizer, loaded
            )
            session = self._new(session_id, new, resource, weights, optimizer, loaded)
            await self._keep(resource, session, digest)
        finally:
            del self._creating[session_id]
        self._running[session_id] = session
        self._digests[session_id] = digest
        resource.num_sessions += 1
        if isinstance(weights, FullConfig):
            resource.full_weights_session = session_id
        log.info("session %s started on %r: %s", session_id, base_model, _described(weights))
        return session

    async def _load(self, new: NewSession) -> LoadedCheckpoint | None:
        if new.resume_from is None:
            return None
        loaded = await asyncio.to_thread(
            self._checkpoints.load, new.resume_from, optimizer=new.load_optimizer
        )
        if new.base_model:
            check_base_model(loaded, self._resources.catalog.canonical(new.base_model))
        return loaded

    async def _keep(self, resource: Resource, session: Session, digest: bytes) -> None:
        try:
            await self._journal.put_session(SessionEntry(session=session.message(), digest=digest))
        except BaseException:
            await resource.thread.call(resource.trainer.delete_session, session.id)
            raise

    def _new(
        self,
        session_id: str,
        new: NewSession,
        resource: Resource,
        weights: WeightsConfig,
        optimizer: OptimizerConfig,
        loaded: LoadedCheckpoint | None,
    ) -> Session:
        now = self._clock()
        shown = pb.Session(
            id=session_id,
            base_model=resource.name,
            model_resource=resource_id(resource.name),
            create_time=timestamp(now),
            user_metadata=new.user_metadata,
            resumed_from="" if new.resume_from is None else str(new.resume_from),
            display_name=new.display_name,
        )
        fill_configuration(shown, weights, optimizer)
        return Session(
            shown=shown,
            weights=weights,
            optimizer=optimizer,
            sequencer=Sequencer(
                max_held=self._limits.max_held,
                gap_timeout_s=self._limits.gap_timeout_s,
                now=self._monotonic(),
            ),
            policy_version=0 if loaded is None else policy_version_after(loaded),
            last_request_time=now,
        )

    async def _stop(self, session: Session) -> None:
        resource = self.resource_of(session)
        await resource.executor.stop_session(session)
        await resource.thread.call(resource.trainer.delete_session, session.id)
        resource.num_sessions -= 1
        if resource.full_weights_session == session.id:
            resource.full_weights_session = ""
        await self._journal.forget_requests(session.id)
        await self._put(session)
        del self._running[session.id], self._digests[session.id]

    async def _put(self, session: Session) -> None:
        entry = SessionEntry(session=session.message(), digest=self._digests[session.id])
        await self._journal.put_session(entry)

    async def _entry(self, session_id: str) -> SessionEntry:
        entry = await self._journal.get_session(session_id)
        if entry is None:
            raise _not_found(session_id)
        return entry

    async def _why_not(self, session_id: str) -> PostTrainingError:
        session = self._running.get(session_id)
        if session is not None:
            return _ended(session.message())
        return _ended((await self._entry(session_id)).session)

    def _spawn(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _create(
    trainer: Trainer,
    session_id: str,
    weights: WeightsConfig,
    optimizer: OptimizerConfig,
    loaded: LoadedCheckpoint | None,
) -> None:
    """On the trainer's thread; leaves nothing behind when it fails."""
    trainer.create_session(session_id, weights, optimizer)
    if loaded is None:
        return
    try:
        trainer.load(session_id, loaded.weights, loaded.optimizer)
    except BaseException:
        trainer.delete_session(session_id)
        raise


def _configuration(
    new: NewSession, loaded: LoadedCheckpoint | None
) -> tuple[WeightsConfig, OptimizerConfig]:
    """With the checkpoint's optimiser state goes its optimiser; without, a new one may be chosen."""
    if loaded is None:
        assert new.weights is not None, "a session without a checkpoint says what it trains"
        return new.weights, new.optimizer or ADAMW
    if loaded.optimizer is not None:
        return loaded.manifest.weights, loaded.manifest.optimizer
    return loaded.manifest.weights, new.optimizer or ADAMW


def _described(weights: WeightsConfig) -> str:
    return f"LoRA of rank {weights.rank}" if isinstance(weights, LoraConfig) else "full weights"


def _exists(session_id: str) -> PostTrainingError:
    return fail(
        Reason.SESSION_EXISTS,
        f"Session {session_id!r} exists already and was made by another request. Choose another id.",
        session=session_id,
    )


def _not_found(session_id: str) -> PostTrainingError:
    return fail(
        Reason.SESSION_NOT_FOUND,
        f"Unknown session {session_id!r}: it was not made on this server.",
        session=session_id,
    )


def _ended(session: pb.Session) -> PostTrainingError:
    session_id = session.id
    if session.state == pb.SESSION_STATE_STOPPED:
        return fail(
            Reason.SESSION_STOPPED,
            f"Session {session_id!r} was stopped. Make a new one, from a checkpoint if you saved one.",
            session=session_id,
        )
    return fail(
        Reason.SESSION_LOST,
        f"Session {session_id!r} ended when the server restarted. Its checkpoints and the results of its operations "
        "can be read; start a new session from a checkpoint with resume_from.",
        session=session_id,
    )


def _gap(sequence: int, gap_timeout_s: float) -> PostTrainingError:
    return fail(
        Reason.SEQUENCE_GAP,
        f"Operation {sequence} never arrived: later ones waited for it, and its session was silent for "
        f"{gap_timeout_s:g} s.",
        sequence=sequence,
        gap_timeout_s=gap_timeout_s,
    )
