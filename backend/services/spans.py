"""Provenance spans: where a sample's tokens came from. Checked here; read by losses that ask for it."""

from __future__ import annotations

from collections.abc import Sequence

from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.v1.data_pb2 import ProvenanceSpan


def check_spans(spans: Sequence[ProvenanceSpan], num_positions: int, *, what: str, of: str) -> None:
    """No spans, or spans that cover every one of the positions of what they belong to.

    Args:
        what: the spans' name, for messages; `of`: what they belong to.

    Raises:
        PostTrainingError: LENGTH_MISMATCH naming both numbers, or INVALID_ARGUMENT.
    """
    if not spans:
        return
    covered = sum(_length(span, f"{what}[{i}]") for i, span in enumerate(spans))
    if covered != num_positions:
        raise fail(
            Reason.LENGTH_MISMATCH,
            f"{what} cover {covered} positions, but {of} has {num_positions}; they must be equal.",
            what=what,
            expected=num_positions,
            got=covered,
        )


def _length(message: ProvenanceSpan, what: str) -> int:
    source = message.WhichOneof("source")
    if source is None:
        raise _invalid(what, "has no source: set prompt_tokens or sampled_tokens")
    span = getattr(message, source)
    if not span.sequence_id:
        raise _invalid(what, "names no sequence: set sequence_id")
    if span.offset < 0 or span.length < 0:
        raise _invalid(
            what, f"has offset {span.offset} and length {span.length}: both must be 0 or more"
        )
    return span.length


def _invalid(what: str, fault: str) -> PostTrainingError:
    return fail(Reason.INVALID_ARGUMENT, f"{what} {fault}.", what=what)
