"""A session and its operations, as long as they are in memory. The event loop owns both."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from backend.operations.ended import timestamp
from backend.operations.sequencer import Sequencer
from backend.operations.window import GradientWindow
from backend.operations.work import Work
from backend.trainer.base import ADAMW, OptimizerConfig, WeightsConfig
from together_post_training.errors import PostTrainingError
from together_post_training.names import operation_name
from together_post_training.v1 import operations_pb2 as pb
from together_post_training.v1 import sessions_pb2


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One running session.

    shown: what GetSession answers, but for the fields that `message` fills in.
    held: operations that wait for an earlier number to arrive.
    ended_through, ended: the number up to which all operations have ended; later ones that have.
    num_live: operations that were submitted and have not ended.
    warned_of: the kinds of warnings that its operations have had.
    """

    shown: sessions_pb2.Session
    weights: WeightsConfig
    sequencer: Sequencer
    policy_version: int
    last_request_time: float
    optimizer: OptimizerConfig = ADAMW
    window: GradientWindow = field(default_factory=GradientWindow)
    held: dict[int, Operation] = field(default_factory=dict)
    is_running: bool = True
    ended: set[int] = field(default_factory=set)
    ended_through: int = 0
    num_live: int = 0
    warned_of: set[str] = field(default_factory=set)
    _none_live: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return self.shown.id

    def heard_of(self, now: float, time_s: float) -> None:
        """`now`: of the sequencer's clock; `time_s`: since 1970."""
        self.sequencer.alive(now)
        self.last_request_time = time_s

    def operation_expected(self) -> None:
        self.num_live += 1
        self._none_live.clear()

    def operation_gone(self) -> None:
        self.num_live -= 1
        if not self.num_live:
            self._none_live.set()

    async def wait_until_none_live(self) -> None:
        while self.num_live:
            await self._none_live.wait()

    def operation_ended(self, sequence: int) -> None:
        self.operation_gone()
        self.ended.add(sequence)
        while self.ended_through + 1 in self.ended:
            self.ended_through += 1
            self.ended.remove(self.ended_through)

    def message(self) -> sessions_pb2.Session:
        """A copy that shows the session as it is now."""
        message = sessions_pb2.Session()
        message.CopyFrom(self.shown)
        running, stopped = sessions_pb2.SESSION_STATE_RUNNING, sessions_pb2.SESSION_STATE_STOPPED
        message.state = running if self.is_running else stopped
        message.policy_version = self.policy_version
        message.last_sequence = self.ended_through
        message.last_request_time.CopyFrom(timestamp(self.last_request_time))
        return message


@dataclass(slots=True, kw_only=True, eq=False)
class Operation:
    """One operation from its submission until its end has been announced.

    header: as it is shown, without a result.
    digest: of the request; empty for a number that was used up without one.
    num_chunks, seen_through: as in the request; num_chunks is None where there was none.
    refusal: why it will not run: its request was refused, it was cancelled, or it never came.
    accepted: done when it is in the journal; what reads it waits for that.
    """

    session: Session
    sequence: int
    header: pb.Operation
    digest: bytes
    num_chunks: int | None
    seen_through: int
    work: Work | None = None
    refusal: PostTrainingError | None = None
    is_started: bool = False
    accepted: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def kind(self) -> int:
        return self.header.kind

    @property
    def key(self) -> tuple[str, int]:
        return self.session.id, self.sequence

    @property
    def what(self) -> str:
        """For messages: "forward_backward", or "an operation that never arrived"."""
        if self.kind == pb.OPERATION_KIND_UNSPECIFIED:
            return "an operation that never arrived"
        return pb.OperationKind.Name(self.header.kind).removeprefix("OPERATION_KIND_").lower()


def new_header(session: str, sequence: int, kind: pb.OperationKind, time_s: float) -> pb.Operation:
    return pb.Operation(
        name=operation_name(session, sequence),
        kind=kind,
        state=pb.OPERATION_STATE_HELD,
        create_time=timestamp(time_s),
    )
