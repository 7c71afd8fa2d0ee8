"""Runs a command: its exit status, and what it says when it fails."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from together_post_training.cli import parser
from together_post_training.cli.client import CommandError, UsageError, connected
from together_post_training.cli.text import plain
from together_post_training.errors import ConnectionLostError, PostTrainingError

_SERVERS = ("serve", "doctor", "import-adapter", "export")


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m together_post_training`: the client's commands alone."""
    top = argparse.ArgumentParser(
        prog="python -m together_post_training",
        description="What is on a server, and taking checkpoints from it.",
        epilog=f"For {', '.join(_SERVERS)}: python -m backend.",
    )
    parser.add_options(top, at_the_top=True)
    parser.add_commands(top.add_subparsers(dest="command", required=True))
    return execute(top.parse_args(arguments))


def execute(options: argparse.Namespace) -> int:
    """0; 1 for what cannot be done; 2 for what makes no sense as it was typed; 130 when interrupted."""
    options.format = options.format or "table"
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Of what others named, there may be no letters here.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _execute(options)
        sys.stdout.flush()
    except UsageError as error:
        return _fail(error, 2)
    except BrokenPipeError:
        # Whoever read has had enough: nothing more is to be written, also at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CommandError, PostTrainingError, ConnectionLostError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _execute(options: argparse.Namespace) -> None:
    if hasattr(options, "refused"):
        raise UsageError(options.refused)
    if hasattr(options, "check"):
        options.check(options)
    if hasattr(options, "show"):
        options.show(options)
        return
    with connected(options.address, os.environ) as client:
        options.call(options, client)


def _fail(error: Exception, status: int) -> int:
    print(f"error: {plain(str(error))}", file=sys.stderr)
    return status
