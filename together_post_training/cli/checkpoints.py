"""`checkpoint list`, `info`, `delete`, `set-ttl`, `publish`, `unpublish` and `copy`. For `download`, see there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from together_post_training.cli import records
from together_post_training.cli.client import Client, CommandError, UsageError
from together_post_training.cli.output import Table, properties, say, show
from together_post_training.cli.records import Checkpoint, CheckpointType, File
from together_post_training.cli.text import NEVER, NONE, counted, now, plain, size, when, yes_no
from together_post_training.client import checkpoint_changes
from together_post_training.client.checkpoint_files import get_checkpoint
from together_post_training.names import parse_checkpoint_path
from together_post_training.v1 import checkpoints_pb2 as pb

# As --type names them: by the folder of the path, or by what is in it.
TYPES: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
    "training": "training",
    "sampler": "sampler",
    "external": "external",
}
_DEFAULT_LIMIT = 20


def list_checkpoints(options: argparse.Namespace, client: Client) -> None:
    """A run's are all shown, unless --limit says otherwise."""
    default = 0 if options.run_id else _DEFAULT_LIMIT
    limit = default if options.limit is None else options.limit
    found, has_more = _listed(client, options.run_id, limit)
    document = {"run_id": options.run_id} if options.run_id else {}
    table = checkpoint_table(found, options.run_id, has_more=has_more, now=now())
    show(options.format, document | {"checkpoints": found}, table)


def show_checkpoint(options: argparse.Namespace, client: Client) -> None:
    message = get(client, options.checkpoint_path)
    record, files = records.checkpoint(message), records.files(message)
    document = asdict(record) | {"files": files}
    show(options.format, document, checkpoint_properties(record, files, now()))


def get(client: Client, path: str) -> pb.Checkpoint:
    """With its files."""
    return client.run(get_checkpoint(client.connection, str(parse_checkpoint_path(path))))


def set_ttl(options: argparse.Namespace, client: Client) -> None:
    path = str(parse_checkpoint_path(options.checkpoint_path))
    request = pb.SetCheckpointTtlRequest(path=path)
    if options.ttl is not None:
        request.ttl.FromSeconds(options.ttl)
    record = records.checkpoint(client.call("checkpoints.SetCheckpointTtl", request))
    ends = "never expires" if record.expires_at is None else f"expires at {record.expires_at}"
    say(options.format, record, f"{path} {ends}")


def publish(options: argparse.Namespace, client: Client) -> None:
    path = str(parse_checkpoint_path(options.checkpoint_path))
    message = client.run(checkpoint_changes.publish(client.connection, path))
    say(options.format, records.checkpoint(message), f"{path} is public")


def unpublish(options: argparse.Namespace, client: Client) -> None:
    path = str(parse_checkpoint_path(options.checkpoint_path))
    message = client.run(checkpoint_changes.unpublish(client.connection, path))
    say(options.format, records.checkpoint(message), f"{path} is private")


def copy(options: argparse.Namespace, client: Client) -> None:
    path = str(parse_checkpoint_path(options.checkpoint_path))
    request = pb.CopyCheckpointRequest(path=path, session=options.run_id)
    if options.ttl is not None:
        request.ttl.FromSeconds(options.ttl)
    record = records.checkpoint(client.call("checkpoints.CopyCheckpoint", request))
    say(options.format, record, record.tinker_path)


def delete(options: argparse.Namespace, client: Client) -> None:
    """Asks first, unless told not to."""
    found = _matching(options, client) if options.run_id else None
    paths = options.checkpoint_paths if found is None else [each.tinker_path for each in found]
    for path in paths:
        parse_checkpoint_path(path)
    if not paths:
        say(options.format, _deleted(0, []), f"No checkpoints of run {options.run_id} match.")
        return
    if not options.yes:
        _confirm([_line(each) for each in found] if found else paths)
    outcomes = client.run_all([checkpoint_changes.delete(client.connection, p) for p in paths])
    failed = [
        {"tinker_path": path, "error": str(outcome)}
        for path, outcome in zip(paths, outcomes, strict=True)
        if isinstance(outcome, Exception)
    ]
    num_deleted = len(paths) - len(failed)
    document = _deleted(num_deleted, failed)
    say(options.format, document, f"Deleted {counted(num_deleted, 'checkpoint')}.")
    if failed:
        errors = " ".join(each["error"] for each in failed[:3])
        raise CommandError(f"{counted(len(failed), 'checkpoint')} could not be deleted: {errors}")


def check_delete(options: argparse.Namespace) -> None:
    """Raises UsageError for options that do not go together, and for nobody to ask."""
    if bool(options.checkpoint_paths) == bool(options.run_id):
        raise UsageError("name the checkpoints to delete, or --run-id for a run's: one of the two")
    if not options.run_id and (options.type or options.before or options.after):
        raise UsageError("--type, --before and --after choose among a run's: they need --run-id")
    if not options.yes and not sys.stdin.isatty():
        raise UsageError(
            "deletions are confirmed on a terminal, and this is none: give -y to delete"
        )


def check_set_ttl(options: argparse.Namespace) -> None:
    if (options.ttl is None) == (not options.remove):
        raise UsageError("give --ttl SECONDS or --remove: one of the two")


def parse_date(text: str) -> datetime:
    """An ISO 8601 date or time, in UTC unless it says otherwise. Raises ValueError."""
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(
            f"{text!r} is no date: write 2024-01-31 or 2024-01-31T12:00:00Z (UTC)"
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def matches(
    record: Checkpoint, type: str | None, before: datetime | None, after: datetime | None
) -> bool:
    return (
        (type is None or record.checkpoint_type == TYPES[type])
        and (before is None or record.time < before)
        and (after is None or record.time > after)
    )


def checkpoint_table(
    found: Sequence[Checkpoint], run_id: str | None, *, has_more: bool, now: datetime
) -> Table:
    title = counted(len(found), "checkpoint") if found else "No checkpoints found"
    title += f" for run {run_id}" if run_id else ""
    return Table(
        title=title + (" (there are more: see --limit)" if has_more else ""),
        columns=("Checkpoint ID", "Type", "Size", "Public", "Created", "Expires", "Path"),
        rows=[
            (
                each.checkpoint_id,
                each.checkpoint_type or NONE,
                size(each.size_bytes),
                yes_no(each.public),
                when(each.time, now),
                when(each.expires_at, now, absent=NEVER),
                each.tinker_path,
            )
            for each in found
        ],
    )


def checkpoint_properties(record: Checkpoint, files: Sequence[File], now: datetime) -> Table:
    rows = [
        ("Checkpoint ID", record.checkpoint_id),
        ("Type", record.checkpoint_type or NONE),
        ("Tinker Path", record.tinker_path),
        ("Size", size(record.size_bytes)),
        ("Public", yes_no(record.public)),
        ("Created", when(record.time, now)),
        ("Expires", when(record.expires_at, now, absent=NEVER)),
        ("Training Run ID", record.training_run_id),
        ("Base Model", record.base_model),
        ("LoRA", records.lora(record)),
        ("Steps", str(record.policy_version)),
        ("Optimizer", yes_no(record.has_optimizer)),
    ]
    if record.copied_from:
        rows.append(("Copied From", record.copied_from))
    rows += [(f"File {file.name}", f"{size(file.size_bytes)}, {file.sha256}") for file in files]
    rows += [(f"Metadata {key}", value) for key, value in sorted(record.user_metadata.items())]
    return properties(f"Checkpoint {record.checkpoint_id}", rows)


def _listed(client: Client, run_id: str | None, limit: int) -> tuple[list[Checkpoint], bool]:
    request = pb.ListCheckpointsRequest(session=run_id or "")
    method = "checkpoints.ListCheckpoints"
    found, has_more = client.listed(method, request, "checkpoints", limit=limit)
    return [records.checkpoint(message) for message in found], has_more


def _matching(options: argparse.Namespace, client: Client) -> list[Checkpoint]:
    found, _ = _listed(client, options.run_id, 0)
    return [each for each in found if matches(each, options.type, options.before, options.after)]


def _line(record: Checkpoint) -> str:
    return f"{record.tinker_path} ({size(record.size_bytes)})"


def _confirm(lines: Sequence[str]) -> None:
    """Raises CommandError unless whoever sits there says yes."""
    for line in lines:
        print(f"  {plain(line)}", file=sys.stderr)
    question = f"Delete {counted(len(lines), 'checkpoint')} for ever? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError("Nothing was deleted.")


def _deleted(num_deleted: int, failed: list[dict[str, str]]) -> dict[str, object]:
    return {"deleted_count": num_deleted, "failed": failed}
