"""Which policy versions sequences were sampled from. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from backend.generator.base import SampledSequence, Segment
from backend.resources.live import Use
from together_post_training.v1 import generator_pb2 as pb


def fill_segments(
    response: pb.SampleResponse, sequences: Sequence[SampledSequence], use: Use
) -> None:
    """With the names and versions that callers know. `sequences`: the response's, as the generator gave them."""
    begun = next(iter(use.snapshots))
    used: set[str | None] = set()
    for shown, sequence in zip(response.sequences, sequences, strict=True):
        for segment in sequence.segments or (Segment(snapshot=begun),):
            used.add(segment.snapshot)
            snapshot = use.snapshots[segment.snapshot]
            shown.policy_segments.add(
                policy_version=snapshot.policy_version,
                first_token=segment.first_token,
                snapshot=snapshot.name,
            )
    in_turn = [snapshot for name, snapshot in use.snapshots.items() if name in used]
    response.policy_version = in_turn[-1].policy_version
