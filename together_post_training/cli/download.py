"""`checkpoint download`: a checkpoint's files, whole or not at all, in a directory or an archive.

Files are fetched into a hidden directory beside the destination, which the last step renames. What a broken download
left there is gone on with; every file's SHA-256 is that of the server's list before anything is renamed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from together_post_training.cli import checkpoints, parts, placing, records
from together_post_training.cli.client import Client, CommandError, UsageError
from together_post_training.cli.output import console, properties, show
from together_post_training.cli.records import Checkpoint, File
from together_post_training.cli.text import plain, size
from together_post_training.names import parse_checkpoint_path


def download(options: argparse.Namespace, client: Client) -> None:
    path = parse_checkpoint_path(options.checkpoint_path)
    folder = f"{path.session}_{path.folder}_{path.name}"
    archive = options.archive
    target = archive if archive is not None else (options.output or Path()) / folder
    placing.check_free(target, force=options.force)
    message = checkpoints.get(client, str(path))
    record, files = records.checkpoint(message), records.files(message)
    check_files(record, files)
    with placing.held_scratch(target) as scratch:
        with _progress(options, files) as report:
            client.run(
                parts.fetch_all(client.connection, str(path), message.files, scratch, report)
            )
        placing.remove_strangers(scratch, {file.name for file in files})
        if archive is None:
            placing.put_directory(scratch, target, force=options.force)
        else:
            placing.put_archive(scratch, target, record.time.timestamp(), force=options.force)
    _tell(options, record, files, target)


def check_options(options: argparse.Namespace) -> None:
    """Raises UsageError."""
    if options.archive is not None and options.output is not None:
        raise UsageError("--output names the directory to download to, --archive a file: give one")
    if options.archive is not None and options.archive.suffix != ".tar":
        raise UsageError(f"--archive {options.archive}: its name must end in .tar")


def check_files(record: Checkpoint, files: list[File]) -> None:
    """Raises CommandError for a list that would leave the directory, or is none.

    Names are the server's: one component each, which no file system takes for another.
    """
    if not files:
        raise CommandError(f"The server lists no files of {record.tinker_path}.")
    seen: set[str] = set()
    for file in files:
        is_plain = Path(file.name).name == file.name and plain(file.name) == file.name
        is_safe = (
            is_plain and not file.name.startswith(".") and not set('\\:*?"<>|') & set(file.name)
        )
        if not file.name or not is_safe or file.name.lower() in seen or file.size_bytes < 0:
            raise CommandError(
                f"The server lists a file named {file.name!r}, which is no plain file name: nothing was downloaded."
            )
        seen.add(file.name.lower())


def _tell(options: argparse.Namespace, record: Checkpoint, files: list[File], target: Path) -> None:
    num_bytes = sum(file.size_bytes for file in files)
    document = {
        "checkpoint_path": record.tinker_path,
        "destination": str(target),
        "file_size_bytes": num_bytes,
        "files": files,
    }
    rows = [
        ("Checkpoint Path", record.tinker_path),
        ("Total Size", size(num_bytes)),
        ("Downloaded to", str(target)),
    ]
    show(options.format, document, properties("Checkpoint download", rows))


@contextmanager
def _progress(options: argparse.Namespace, files: list[File]) -> Iterator[parts.Report]:
    """Shown on a terminal alone."""
    if options.format == "json" or not sys.stderr.isatty():
        yield lambda filename, num_bytes: None
        return
    from rich import progress

    bars = progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=console(sys.stderr),
    )
    tasks = {file.name: bars.add_task(file.name, total=file.size_bytes) for file in files}
    with bars:
        yield lambda filename, num_bytes: bars.update(tasks[filename], completed=num_bytes)
