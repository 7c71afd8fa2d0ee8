"""Pages of an ordered list that may change between two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from backend.services.fields import invalid

T = TypeVar("T")

# Ascending: (a number, a name that is different for each item).
Order = tuple[float, str]


def paged(
    items: Iterable[T], order: Callable[[T], Order], size: int, token: str
) -> tuple[Sequence[T], str]:
    """The first `size` items behind the place that the token marks, and the next page's token; "" on the last.

    The token marks a place in the order, which stays where it is when items come and go.

    Raises:
        PostTrainingError: INVALID_ARGUMENT for a token that was not made here.
    """
    ordered = sorted(items, key=order)
    if token:
        after = _parse(token)
        ordered = [item for item in ordered if order(item) > after]
    shown = ordered[:size]
    return shown, _format(order(shown[-1])) if len(ordered) > size else ""


def _format(place: Order) -> str:
    return f"{place[0]!r}/{place[1]}"


def _parse(token: str) -> Order:
    number, _, name = token.partition("/")
    try:
        return float(number), name
    except ValueError:
        raise invalid("page_token", repr(token), "a next_page_token of this list") from None
