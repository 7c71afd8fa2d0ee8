"""All that is kept of what was sampled."""

from __future__ import annotations

from collections.abc import Callable

from backend.resources.expert_records import ExpertRecords
from backend.resources.sequence_records import SequenceRecords


class SampleRecords:
    """clock: seconds, never back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.sequences = SequenceRecords(clock)
        self.experts = ExpertRecords(clock)
