"""What users named is shown as text, and nothing else."""

from __future__ import annotations

import io
import unicodedata
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from together_post_training.cli.output import Table, print_table
from together_post_training.cli.text import plain, size, when

NOW = datetime(2026, 3, 31, 12, tzinfo=UTC)


@given(st.text())
def test_plain_text_holds_nothing_that_a_terminal_obeys(text):
    shown = plain(text)
    assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert shown.splitlines() in ([], [shown])


@given(st.text(alphabet=st.characters(categories=["L", "N", "P", "S", "Zs"])))
def test_plain_text_leaves_what_is_harmless_as_it_is(text):
    assert plain(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("\x9b31m", r"\x9b31m"),
        ("\ud800", r"\ud800"),
        ("[bold]日本 é[/]", "[bold]日本 é[/]"),
    ],
)
def test_plain_text_escapes_as_python_does(text, expected):
    assert plain(text) == expected


def test_table_reads_no_markup_and_no_emoji_and_cuts_nothing():
    out = io.StringIO()
    cells = ("[red]x[/red]", ":smile:", "[/]", "y" * 500)
    table = Table(title="[bold]t", columns=("a", "b", "c", "d"), rows=[cells])
    print_table(table, Console(file=out, width=100_000, markup=False, emoji=False, highlight=False))
    assert "\x1b" not in out.getvalue()
    for shown in (*cells, "[bold]t"):
        assert shown in out.getvalue()


def test_table_on_a_narrow_terminal_folds_instead_of_cutting():
    out = io.StringIO()
    table = Table(title="t", columns=("a", "b"), rows=[("x" * 70, "y" * 70)])
    print_table(table, Console(file=out, width=40))
    assert out.getvalue().count("x") == out.getvalue().count("y") == 70
    assert "…" not in out.getvalue()


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KB"), (2653, "2.6 KB"), (5 * 2**30, "5.0 GB"),
     (2**60, "1024.0 PB")],
)  # fmt: skip
def test_size_is_in_powers_of_1024(num_bytes, expected):
    assert size(num_bytes) == expected


@pytest.mark.parametrize(
    ("ago", "expected"),
    [
        (timedelta(seconds=5), "just now"),
        (timedelta(minutes=1), "1 minute ago"),
        (timedelta(hours=2, minutes=59), "2 hours ago"),
        (timedelta(days=6), "6 days ago"),
        (timedelta(days=15), "2 weeks ago"),
        (timedelta(days=40), "2026-02-19"),
        (timedelta(seconds=-5), "in less than a minute"),
        (timedelta(hours=-30), "in 1 day"),
    ],
)
def test_time_is_told_from_now(ago, expected):
    assert when(NOW - ago, NOW) == expected


def test_time_that_is_absent_is_told_as_such():
    assert (when(None, NOW), when(None, NOW, absent="Never")) == ("-", "Never")
