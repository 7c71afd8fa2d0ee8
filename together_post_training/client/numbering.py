"""Which sample a text is about, when one call was sent as several operations.

The server counts the samples of each operation from 0; the caller knows them by their place in the call.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from together_post_training.errors import PostTrainingError, Reason

_SAMPLE = re.compile(r"\b([Ss]ample) (\d+)\b")


def first_samples(requests: Sequence[Any]) -> list[int]:
    """The place of each request's first sample among the samples of all."""
    counts = [len(getattr(request, "samples", ())) for request in requests]
    return list(itertools.accumulate(counts, initial=0))[:-1]


def renumbered(text: str, first: int) -> str:
    """What an operation says of its own samples, the first of which is the call's sample `first`."""
    return _SAMPLE.sub(lambda found: f"{found[1]} {int(found[2]) + first}", text)


def renumbered_error(error: BaseException, first: int) -> BaseException:
    """The same failure, about the call's samples. One that quotes another operation stays as it is."""
    if not first or not isinstance(error, PostTrainingError) or error.reason is Reason.WINDOW_VOID:
        return error
    metadata = dict(error.metadata)
    if "sample" in metadata:
        metadata["sample"] = str(int(metadata["sample"]) + first)
    return PostTrainingError(error.reason, renumbered(error.message, first), metadata)
