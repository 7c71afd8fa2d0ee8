"""Training runs, and the sessions that Tinker groups them by. Pure.

A training run is a session of the service's, `<session>:train:<n>`, with what it saved. What Tinker calls a session is
a ServiceClient: what comes before ":train:".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from together_post_training.errors import Reason, fail
from together_post_training.v1 import checkpoints_pb2, sessions_pb2

T = TypeVar("T")

_OF_A_RUN = ":train:"
ACCESS_SCOPES = ("owned", "accessible")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A training run.

    session: None: the server has only its checkpoints, which were copied or imported under its id, or have outlived it.
    checkpoints: newest first; not empty without a session.
    """

    id: str
    session: sessions_pb2.Session | None
    checkpoints: tuple[checkpoints_pb2.Checkpoint, ...] = ()

    @property
    def configuration(self) -> sessions_pb2.Session | checkpoints_pb2.Checkpoint:
        """Says what is trained, of which base model."""
        return self.checkpoints[0] if self.session is None else self.session

    @property
    def create_time(self) -> datetime:
        if self.session is None:
            return to_datetime(self.checkpoints[-1].create_time)
        return to_datetime(self.session.create_time)

    @property
    def last_request_time(self) -> datetime:
        if self.session is None:
            return to_datetime(self.checkpoints[0].create_time)
        return to_datetime(self.session.last_request_time)

    @property
    def user_metadata(self) -> dict[str, str]:
        """Where there is no session, its newest checkpoint's."""
        return dict(self.configuration.user_metadata)

    @property
    def display_name(self) -> str:
        return "" if self.session is None else self.session.display_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRecord:
    """A ServiceClient, known by its training runs: newest first, and at least one."""

    id: str
    runs: tuple[RunRecord, ...]

    @property
    def create_time(self) -> datetime:
        return min(run.create_time for run in self.runs)

    @property
    def user_metadata(self) -> dict[str, str]:
        """What all its runs have: what was given to the ServiceClient goes to each of them."""
        first, *others = (run.user_metadata.items() for run in self.runs)
        return dict(pair for pair in first if all(pair in other for other in others))

    @property
    def display_name(self) -> str:
        return next((run.display_name for run in self.runs if run.display_name), "")

    @property
    def checkpoints(self) -> list[checkpoints_pb2.Checkpoint]:
        return [checkpoint for run in self.runs for checkpoint in run.checkpoints]


def client_id(run_id: str) -> str:
    """Of another client's run, which is not numbered, the run's own."""
    return run_id.partition(_OF_A_RUN)[0]


def runs_from(
    sessions: Iterable[sessions_pb2.Session], checkpoints: Iterable[checkpoints_pb2.Checkpoint]
) -> list[RunRecord]:
    """Newest first. `checkpoints`: newest first."""
    saved: dict[str, list[checkpoints_pb2.Checkpoint]] = {}
    for checkpoint in checkpoints:
        saved.setdefault(checkpoint.session, []).append(checkpoint)
    known = {session.id: session for session in sessions}
    runs = [
        RunRecord(id=id_, session=known.get(id_), checkpoints=tuple(saved.get(id_, ())))
        for id_ in known.keys() | saved.keys()
    ]
    return newest_first(runs)


def clients_from(runs: Iterable[RunRecord]) -> list[ClientRecord]:
    """Newest first. `runs`: newest first."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(client_id(run.id), []).append(run)
    return newest_first([ClientRecord(id=id_, runs=tuple(group)) for id_, group in groups.items()])


def newest_first(records: Iterable[Any]) -> list[Any]:
    """By id where they are of the same time."""
    by_id = sorted(records, key=lambda record: record.id)
    return sorted(by_id, key=lambda record: record.create_time, reverse=True)


def page(limit: Any, offset: Any, default_limit: int) -> tuple[int, int]:
    """Both as whole numbers. None: the default. They travel as text in Tinker, so a number of any kind is one.

    Raises INVALID_ARGUMENT for what are no whole numbers from 0.
    """
    return _whole("limit", limit, default_limit), _whole("offset", offset, 0)


def _whole(name: str, value: Any, default: int) -> int:
    if value is None:
        return default
    text = str(value)
    if not (text.isascii() and text.isdigit()):
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"{name} is {value!r}: must be a whole number, 0 or more.",
            field=name,
            value=value,
        )
    return int(text)


def paged(items: Sequence[T], limit: int, offset: int) -> Sequence[T]:
    return items[offset : offset + limit]


def check_access_scope(access_scope: str) -> None:
    """There are no accounts: what is accessible is owned."""
    if access_scope not in ACCESS_SCOPES:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"access_scope is {access_scope!r}: must be 'owned' or 'accessible'.",
            field="access_scope",
            value=access_scope,
        )


def to_datetime(stamp: Timestamp) -> datetime:
    return stamp.ToDatetime(tzinfo=UTC)
