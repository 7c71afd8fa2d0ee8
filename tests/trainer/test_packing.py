"""Layouts hold every sample once, in as few tokens as they have."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from backend.trainer.packing import Part, plan, runs_of

lengths_strategy = st.lists(st.integers(1, 50), min_size=1, max_size=40)
passes_strategy = st.lists(lengths_strategy, min_size=1, max_size=4)


@given(passes=passes_strategy, token_budget=st.integers(1, 120))
def test_plan_holds_every_sample_once_within_the_budget(passes, token_budget):
    batches = plan(passes, token_budget)
    held = [(part.work, i) for batch in batches for part in batch for i in part.samples]
    assert sorted(held) == [(work, i) for work, own in enumerate(passes) for i in range(len(own))]
    for batch in batches:
        sizes = [passes[part.work][i] for part in batch for i in part.samples]
        assert sum(sizes) <= token_budget or len(sizes) == 1


@given(lengths=lengths_strategy)
def test_runs_spell_out_the_lengths_in_order(lengths):
    runs = runs_of(lengths)
    assert [run.length for run in runs for _ in range(run.count)] == lengths
    assert all(a.length != b.length for a, b in pairwise(runs))


@given(passes=passes_strategy, token_budget=st.integers(1, 120))
def test_plan_lays_a_pass_together_and_its_equal_lengths_side_by_side(passes, token_budget):
    for batch in plan(passes, token_budget):
        assert all(one.work < other.work for one, other in pairwise(batch))
        for part in batch:
            lengths = [passes[part.work][i] for i in part.samples]
            assert len(runs_of(lengths)) == len(set(lengths))


def test_plan_goes_from_long_to_short_and_keeps_the_order_of_equals():
    assert plan([[3, 5, 3, 1]], token_budget=100) == [(Part(work=0, samples=(1, 0, 2, 3)),)]


def test_plan_lets_passes_share_a_micro_batch_and_go_on_in_the_next():
    assert plan([[4, 2], [5, 3], [9]], token_budget=12) == [
        (Part(work=0, samples=(0, 1)), Part(work=1, samples=(0,))),
        (Part(work=1, samples=(1,)), Part(work=2, samples=(0,))),
    ]
