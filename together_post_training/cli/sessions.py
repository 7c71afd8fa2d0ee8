"""`session list` and `session info`: what each client made. Tinker's clients may have several runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime

from together_post_training.cli import records
from together_post_training.cli.client import Client, CommandError
from together_post_training.cli.output import Table, properties, show
from together_post_training.cli.records import Session
from together_post_training.cli.runs import all_runs
from together_post_training.cli.text import NONE, now, titled, when


def list_sessions(options: argparse.Namespace, client: Client) -> None:
    found = records.sessions(all_runs(client))
    shown = found[: options.limit] if options.limit else found
    table = session_table(shown, num_more=len(found) - len(shown), now=now())
    show(options.format, {"sessions": shown}, table)


def show_session(options: argparse.Namespace, client: Client) -> None:
    for session in records.sessions(all_runs(client)):
        if session.session_id == options.session_id:
            show(options.format, session, session_properties(session, now()))
            return
    raise CommandError(
        f"Unknown session {options.session_id!r}: `session list` shows those that there are."
    )


def session_table(sessions: Sequence[Session], *, num_more: int, now: datetime) -> Table:
    return Table(
        title=titled("session", len(sessions), num_more),
        columns=("Session ID", "Name", "Runs", "Base Model", "Created", "Last Update"),
        rows=[
            (
                session.session_id,
                session.display_name or NONE,
                str(len(session.training_run_ids)),
                ", ".join(session.base_models),
                when(session.created_at, now),
                when(session.last_request_time, now),
            )
            for session in sessions
        ],
    )


def session_properties(session: Session, now: datetime) -> Table:
    rows = [
        ("Session ID", session.session_id),
        ("Name", session.display_name or NONE),
        ("Base Model", ", ".join(session.base_models)),
        ("Created", when(session.created_at, now)),
        ("Last Update", when(session.last_request_time, now)),
    ]
    rows += [("Run", run) for run in session.training_run_ids]
    return properties(f"Session {session.session_id}", rows)
