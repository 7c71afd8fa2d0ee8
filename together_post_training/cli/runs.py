"""`run list` and `run info`: training runs, which the service calls sessions."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType

from together_post_training.cli import records
from together_post_training.cli.client import Client
from together_post_training.cli.output import Table, properties, show
from together_post_training.cli.records import Run
from together_post_training.cli.text import NONE, now, titled, when
from together_post_training.client import listing
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.v1 import sessions_pb2

Column = tuple[str, Callable[[Run, datetime], str]]

COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "id": ("Run ID", lambda run, now: run.training_run_id),
        "model": ("Base Model", lambda run, now: run.base_model),
        "lora": ("LoRA", lambda run, now: records.lora(run)),
        "steps": ("Steps", lambda run, now: str(run.policy_version)),
        "created": ("Created", lambda run, now: when(run.created_at, now)),
        "updated": ("Last Update", lambda run, now: when(run.last_request_time, now)),
        "status": ("Status", lambda run, now: (run.state or NONE).capitalize()),
        "owner": ("Owner", lambda run, now: run.model_owner),
        "name": ("Name", lambda run, now: run.display_name or NONE),
        "checkpoint": (
            "Last Checkpoint",
            lambda run, now: run.last_checkpoint.checkpoint_id if run.last_checkpoint else NONE,
        ),
        "checkpoint_time": (
            "Checkpoint Time",
            lambda run, now: when(run.last_checkpoint and run.last_checkpoint.time, now),
        ),
    }
)
DEFAULT_COLUMNS = ("id", "model", "lora", "steps", "updated", "status")


def parse_columns(text: str) -> tuple[str, ...]:
    """Raises ValueError, naming those that there are not."""
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in COLUMNS]:
        raise ValueError(f"no such columns: {', '.join(unknown)}. There are {', '.join(COLUMNS)}")
    return names


def list_runs(options: argparse.Namespace, client: Client) -> None:
    found = all_runs(client)
    shown = found[: options.limit] if options.limit else found
    table = run_table(shown, options.columns, num_more=len(found) - len(shown), now=now())
    show(options.format, {"runs": shown}, table)


def show_run(options: argparse.Namespace, client: Client) -> None:
    id_ = options.run_id
    saved = client.run(listing.all_checkpoints(client.connection, id_))
    try:
        session = client.call("sessions.GetSession", sessions_pb2.GetSessionRequest(id=id_))
    except PostTrainingError as error:
        if error.reason is not Reason.SESSION_NOT_FOUND or not saved:
            raise
        sessions = []
    else:
        sessions = [session]
    (run,) = records.runs(sessions, saved)
    show(options.format, run, run_properties(run, now()))


def all_runs(client: Client) -> list[Run]:
    """Newest first."""
    sessions = client.run(listing.all_sessions(client.connection))
    return records.runs(sessions, client.run(listing.all_checkpoints(client.connection)))


def run_table(
    runs: Sequence[Run], columns: Sequence[str], *, num_more: int, now: datetime
) -> Table:
    return Table(
        title=titled("training run", len(runs), num_more),
        columns=[COLUMNS[name][0] for name in columns],
        rows=[[COLUMNS[name][1](run, now) for name in columns] for run in runs],
    )


def run_properties(run: Run, now: datetime) -> Table:
    shown = [(title, of(run, now)) for title, of in COLUMNS.values()]
    for title, last in (
        ("Training Path", run.last_checkpoint),
        ("Sampler Path", run.last_sampler_checkpoint),
    ):
        shown.append((title, NONE if last is None else last.tinker_path))
    shown.append(("Resumed From", run.resumed_from or NONE))
    shown += [(f"Metadata {key}", value) for key, value in sorted(run.user_metadata.items())]
    return properties(f"Training run {run.training_run_id}", shown)
