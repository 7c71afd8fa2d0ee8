"""Layouts hold every sample once, in as few tokens as they have."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from backend.trainer.packing import Run, plan, runs_of

lengths_strategy = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@given(lengths=lengths_strategy, token_budget=st.integers(1, 120))
def test_plan_holds_every_sample_once_within_the_budget(lengths, token_budget):
    batches = plan(lengths, token_budget)
    assert sorted(i for batch in batches for i in batch.samples) == list(range(len(lengths)))
    for batch in batches:
        assert batch.num_tokens == sum(lengths[i] for i in batch.samples)
        assert batch.num_tokens <= token_budget or len(batch.samples) == 1


@given(lengths=lengths_strategy)
def test_runs_spell_out_the_lengths_in_order(lengths):
    runs = runs_of(lengths)
    assert [run.length for run in runs for _ in range(run.count)] == lengths
    assert all(a.length != b.length for a, b in pairwise(runs))


@given(lengths=lengths_strategy, token_budget=st.integers(1, 120))
def test_plan_lays_equal_lengths_side_by_side(lengths, token_budget):
    for batch in plan(lengths, token_budget):
        assert len(batch.runs) == len({lengths[i] for i in batch.samples})


def test_plan_goes_from_long_to_short_and_keeps_the_order_of_equals():
    (batch,) = plan([3, 5, 3, 1], token_budget=100)
    assert batch.samples == (1, 0, 2, 3)
    assert batch.runs == (Run(1, 5), Run(2, 3), Run(1, 1))
