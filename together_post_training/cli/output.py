"""Tables for people, one JSON document for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import IO, TYPE_CHECKING, Literal

from together_post_training.cli.text import plain

if TYPE_CHECKING:
    from rich.console import Console

Format = Literal["table", "json"]
# Wider than any table: what is read by programs is never wrapped or cut.
_UNBOUNDED = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def properties(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    return Table(title=title, columns=("Property", "Value"), rows=rows)


def show(format: Format, document: object, table: Table) -> None:
    """`document`: of dataclasses, lists, dicts and plain values."""
    if format == "json":
        json.dump(document, sys.stdout, indent=2, default=_jsonable)
        print()
    else:
        print_table(table, console(sys.stdout))


def say(format: Format, document: object, sentence: str) -> None:
    """The same for what a sentence tells."""
    if format == "json":
        json.dump(document, sys.stdout, indent=2, default=_jsonable)
        print()
    else:
        print(plain(sentence))


def console(file: IO[str]) -> Console:
    """Nothing that is printed on it is read as markup."""
    from rich.console import Console

    width = None if file.isatty() else _UNBOUNDED
    return Console(file=file, width=width, markup=False, emoji=False, highlight=False)


def print_table(table: Table, console: Console) -> None:
    from rich import table as rich_table
    from rich.text import Text

    shown = rich_table.Table(title=Text(plain(table.title)), title_justify="left")
    for number, column in enumerate(table.columns):
        style = "bright_cyan" if number == 0 else ""
        shown.add_column(column, style=style, overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(plain(cell)) for cell in row))
    console.print(shown)


def _jsonable(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    return asdict(value)  # pyright: ignore[reportArgumentType]
