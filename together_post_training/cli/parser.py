"""The commands and their options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from together_post_training.cli import checkpoints, download, models, runs, sessions
from together_post_training.cli.client import Client

T = TypeVar("T")

# What a command does, and what it checks before anything is called.
Run = Callable[[argparse.Namespace, Client], None]
Check = Callable[[argparse.Namespace], None]

COMMANDS = ("run", "checkpoint", "session", "model", "version")
_PATH = "tinker://RUN/{weights,sampler_weights,external_weights}/NAME"
# Of numbers that fit into the messages.
_MAX_DIGITS = 11
_PUSH_HF = (
    "uploading is not done here: `checkpoint download` it, then `hf upload REPOSITORY DIRECTORY`"
)
_NO_TRACES = "this service records no traces of sessions"


def add_options(parser: argparse.ArgumentParser, *, at_the_top: bool = False) -> None:
    """Those of every command, which may also stand before it, as in Tinker's."""
    absent = None if at_the_top else argparse.SUPPRESS
    parser.add_argument(
        "--format",
        "-f",
        choices=("table", "json"),
        default=absent,
        help="how to show what there is (default: table)",
    )
    parser.add_argument(
        "--address",
        default=absent,
        metavar="grpc://HOST:PORT",
        help="the server (default: as for ServiceClient, TOGETHER_POST_TRAINING_ADDRESS)",
    )


def add_commands(commands: Any) -> None:
    """`commands`: argparse's subparsers."""
    _add_runs(commands)
    _add_checkpoints(commands)
    _add_sessions(commands)
    _add_models(commands)


def _add_runs(commands: Any) -> None:
    group = _group(commands, "run", "training runs of a server")
    listed = _command(group, "list", runs.list_runs, "show the newest runs")
    _add_limit(listed, 20)
    listed.add_argument(
        "--columns",
        "-c",
        type=_read_as(runs.parse_columns),
        default=runs.DEFAULT_COLUMNS,
        metavar="COLUMN,...",
        help=f"of {', '.join(runs.COLUMNS)}; default: {','.join(runs.DEFAULT_COLUMNS)}",
    )
    info = _command(group, "info", runs.show_run, "show one run")
    info.add_argument("run_id", type=_name)


def _add_sessions(commands: Any) -> None:
    group = _group(commands, "session", "clients of a server and their training runs")
    listed = _command(group, "list", sessions.list_sessions, "show the sessions heard of last")
    _add_limit(listed, 20)
    info = _command(group, "info", sessions.show_session, "show one session")
    info.add_argument("session_id", type=_name)
    _add_refused(group, "export-trace", _NO_TRACES)


def _add_models(commands: Any) -> None:
    group = _group(commands, "model", "base models of a server")
    listed = _command(group, "list", models.list_models, "show the models that can be used")
    listed.add_argument("substring", nargs="?", help="only those whose name contains it")
    version = commands.add_parser("version", help="show which version this is")
    add_options(version)
    version.set_defaults(show=models.show_version)


def _add_checkpoints(commands: Any) -> None:
    group = _group(commands, "checkpoint", "checkpoints of a server")
    listed = _command(group, "list", checkpoints.list_checkpoints, "show the newest checkpoints")
    _add_limit(listed, None, "20, or all with --run-id")
    listed.add_argument("--run-id", type=_name, help="only this run's")
    _on_one(group, "info", checkpoints.show_checkpoint, "show one checkpoint and its files")
    _on_one(group, "publish", checkpoints.publish, "mark it as one that others may read")
    _on_one(group, "unpublish", checkpoints.unpublish, "take that mark away")
    _add_download(group)
    _add_delete(group)
    ttl = _on_one(group, "set-ttl", checkpoints.set_ttl, "say when it is to be deleted")
    ttl.add_argument("--ttl", type=_seconds, metavar="SECONDS", help="counted from now")
    ttl.add_argument("--remove", action="store_true", help="never")
    ttl.set_defaults(check=checkpoints.check_set_ttl)
    copy = _on_one(group, "copy", checkpoints.copy, "copy it under another run's id")
    copy.add_argument("run_id", type=_name, help="the copy's; no such run need be known")
    copy.add_argument("--ttl", type=_seconds, metavar="SECONDS", help="the copy's; default: never")
    _add_refused(group, "push-hf", _PUSH_HF)


def _add_download(group: Any) -> None:
    parser = _on_one(group, "download", download.download, "write its files to a directory")
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="DIRECTORY",
        help="where RUN_weights_NAME/ is made (default: here)",
    )
    parser.add_argument(
        "--archive", type=Path, metavar="FILE.tar", help="write them to an archive instead"
    )
    parser.add_argument("--force", action="store_true", help="replace what is there")
    parser.set_defaults(check=download.check_options)


def _add_delete(group: Any) -> None:
    parser = _command(group, "delete", checkpoints.delete, "delete checkpoints for ever")
    parser.add_argument("checkpoint_paths", nargs="*", metavar=_PATH)
    parser.add_argument("--run-id", type=_name, help="all of this run's that match")
    parser.add_argument("--type", choices=tuple(checkpoints.TYPES), help="with --run-id")
    for name in ("before", "after"):
        parser.add_argument(
            f"--{name}",
            type=_read_as(checkpoints.parse_date),
            metavar="DATE",
            help=f"with --run-id: made {name} this date or time (ISO 8601, UTC)",
        )
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    parser.set_defaults(check=checkpoints.check_delete)


def _group(commands: Any, name: str, about: str) -> Any:
    parser = commands.add_parser(name, help=about)
    add_options(parser)
    return parser.add_subparsers(dest="action", required=True)


def _command(group: Any, name: str, run: Run, about: str) -> argparse.ArgumentParser:
    parser = group.add_parser(name, help=about)
    add_options(parser)
    parser.set_defaults(call=run)
    return parser


def _on_one(group: Any, name: str, run: Run, about: str) -> argparse.ArgumentParser:
    parser = _command(group, name, run, about)
    parser.add_argument("checkpoint_path", metavar=_PATH)
    return parser


def _add_refused(group: Any, name: str, why: str) -> None:
    """A command of Tinker's that there is none of here, whatever its arguments."""
    parser = group.add_parser(name, help=f"refused: {why}", prefix_chars="\0", add_help=False)
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(refused=f"{name} is not supported: {why}")


def _add_limit(parser: argparse.ArgumentParser, default: int | None, words: str = "20") -> None:
    parser.add_argument(
        "--limit", type=_count, default=default, help=f"how many at most, 0: all (default: {words})"
    )


def _read_as(read: Callable[[str], T]) -> Callable[[str], T]:
    """Reads an option. `read`: raises ValueError, saying what is accepted."""

    def parse(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _count(text: str) -> int:
    return _whole(text, 0)


def _seconds(text: str) -> int:
    return _whole(text, 1)


def _name(text: str) -> str:
    """On the wire, no name means all: what a script's unset variable never asks for."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name one")
    return text


def _whole(text: str, least: int) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    if not is_number or int(text) < least:
        raise argparse.ArgumentTypeError(
            f"{text!r}: it must be a whole number, {least} or above, of at most {_MAX_DIGITS} digits"
        )
    return int(text)
