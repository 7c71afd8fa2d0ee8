"""Values as people read them. What others named cannot move the cursor, colour or rename anything."""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime

NEVER = "Never"
NONE = "-"

# Control characters, invisible ones that turn the direction of writing, halves of characters, and line separators.
_UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_UNITS = ("KB", "MB", "GB", "TB", "PB")
_PERIODS_S = (("week", 7 * 86400), ("day", 86400), ("hour", 3600), ("minute", 60))
# Older than this, a date says more.
_RELATIVE_S = 31 * 86400


def plain(text: str) -> str:
    """On one line, with everything that a terminal would obey escaped as in Python's strings."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(c) if unicodedata.category(c) in _UNSAFE else c for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def size(num_bytes: int) -> str:
    """In powers of 1024, as Tinker's."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value, unit = num_bytes / 1024, 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}"


def when(time: datetime | None, now: datetime, *, absent: str = NONE) -> str:
    """How long ago, or in how long; a date where that is more than a month."""
    if time is None:
        return absent
    seconds = (time - now).total_seconds()
    if abs(seconds) >= _RELATIVE_S:
        return time.strftime("%Y-%m-%d")
    for name, length_s in _PERIODS_S:
        if abs(seconds) >= length_s:
            number = int(abs(seconds) // length_s)
            period = f"{number} {name}{'' if number == 1 else 's'}"
            return f"in {period}" if seconds > 0 else f"{period} ago"
    return "in less than a minute" if seconds > 0 else "just now"


def yes_no(value: bool) -> str:
    return "Yes" if value else "No"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def titled(noun: str, number: int, num_more: int) -> str:
    """Of a list."""
    title = counted(number, noun) if number else f"No {noun}s found"
    return f"{title} ({num_more} more not shown, see --limit)" if num_more else title


def now() -> datetime:
    return datetime.now(UTC)
