"""The laws of every generator, over SGLang: the very functions of tests/conformance.

On a CPU SGLang has no use for seeds. Laws that sample twice and want the same tokens are therefore held at temperature
0 (`REPEATING`); those about seeds, about the order of equals, or about what SGLang cannot do, are left out (`REPLACED`)
for the tests below of the same names, or for one that shows the refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FunctionType, ModuleType

import numpy as np
import pytest

from tests.conformance import (
    test_generator_conformance,
    test_generator_scores,
    test_generator_succ16,
)
from tests.conformance.bench import Bench
from tests.conformance.data import HIT, MISS, call
from tests.conformance.test_full_weights import (  # noqa: F401
    full,
    test_law_14_snapshots_of_full_weights_stay_beside_base_and_adapters,
    test_law_15_full_weights_are_sampled_with_the_logprobs_of_forward,
    test_snapshot_that_does_not_fit_the_model_is_refused_by_name,
)
from tests.conformance.test_generator_conformance import prompt_of, tokens_of
from tests.sglang.engines import KINDS, Greedy, Kind
from together_post_training.errors import PostTrainingError, Reason

pytestmark = pytest.mark.sglang

REPEATING = {
    "test_a_cancelled_call_leaves_the_engine_serving",
    "test_a_running_sample_survives_the_drop_of_its_snapshot",
    "test_a_seed_fixes_the_tokens_whatever_else_is_served",
    "test_a_snapshot_answers_the_same_whatever_is_trained_later",
    "test_a_warm_answer_equals_a_cold_one",
    "test_any_integer_is_a_seed",
    "test_law_14_snapshots_of_full_weights_stay_beside_base_and_adapters",
    "test_longer_samples_begin_like_shorter_ones",
    "test_samples_of_one_call_stop_each_for_themselves",
}
REPLACED = {
    # Of which of equally likely tokens comes first: not the lowest here, and not always the same.
    "test_min_p_applies_to_what_top_k_and_top_p_leave",
    "test_top_k_keeps_the_lowest_of_equal_tokens",
    "test_topk_of_the_prompt",
    # Of seeds.
    "test_min_p_keeps_tokens_of_so_much_of_the_likeliests_probability",
    "test_sample_i_uses_seed_plus_i",
    "test_top_k_above_the_vocabulary_and_0_keep_all",
    # Of alternatives, which are refused.
    "test_a_prompt_of_one_token_has_nothing_to_tell",
    "test_alternatives_follow_from_the_seed_whatever_else_is_asked_and_served",
    "test_alternatives_follow_the_tempered_distribution",
    "test_alternatives_have_the_untempered_logprobs_of_forward",
    "test_asking_for_alternatives_changes_no_sample",
    "test_greedy_alternatives_are_the_likeliest",
    "test_what_is_asked_of_a_prompt_is_answered_once_and_like_each_alone",
    # In test_supervision.py, for one server of its own.
    "test_a_closed_generator_refuses",
}


def laws_of(*modules: ModuleType) -> dict[str, FunctionType]:
    found = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if name.startswith("test_") and isinstance(value, FunctionType)
    }
    assert found.keys() >= REPLACED, "a law was renamed"
    return {name: law for name, law in found.items() if name not in REPLACED}


globals().update(laws_of(test_generator_conformance, test_generator_scores, test_generator_succ16))


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def bench(request: pytest.FixtureRequest, started: Callable[[Kind], Bench]) -> Bench:
    return _for(request, started(request.param))


@pytest.fixture(params=[kind for kind in KINDS if kind.is_succ16], ids=lambda kind: kind.name)
def succ16(request: pytest.FixtureRequest, started: Callable[[Kind], Bench]) -> Bench:
    return _for(request, started(request.param))


def _for(request: pytest.FixtureRequest, bench: Bench) -> Bench:
    if request.function.__name__ in REPEATING:
        return replace(bench, generator=Greedy(bench.generator))
    return bench


def test_sample_i_uses_seed_plus_i(bench: Bench):
    """It does not, and says so wherever a seed was chosen and would matter."""
    asked = call(prompt_of(bench, 4), num_samples=4, max_tokens=12, seed=7)
    result = bench.sample(asked)
    assert len({tuple(tokens) for tokens in tokens_of(result)}) == 4
    (warning,) = result.warnings
    assert "seed=7 has no effect" in warning
    for quiet in (
        replace(asked, is_seeded=False),
        replace(asked, temperature=0.0),
        replace(asked, max_tokens=0, prompt_logprobs=True),
    ):
        assert bench.sample(quiet).warnings == ()


def test_top_k_above_the_vocabulary_and_0_keep_all(succ16: Bench):
    """At temperature 5 all 16 tokens are among 400 draws: the rarest have a share of 0.058."""
    for top_k in (0, 16, 1000):
        hot = call([3], num_samples=400, max_tokens=1, temperature=5.0, top_k=top_k)
        drawn = np.concatenate([s.tokens for s in succ16.sample(hot).sequences])
        assert set(drawn.tolist()) == set(range(16))


@pytest.mark.parametrize(("temperature", "min_p"), [(1.0, 0.1), (2.0, 0.3), (0.6, 0.02)])
def test_min_p_keeps_tokens_of_so_much_of_the_likeliests_probability(
    bench: Bench, temperature, min_p
):
    hot = call(
        prompt_of(bench, 4),
        num_samples=8,
        max_tokens=20,
        temperature=temperature,
        topk_sample_logprobs=1,
    )
    below = [
        (sequence.logprobs - sequence.topk.logprobs[:, 0]) / temperature
        for sequence in bench.sample(replace(hot, min_p=min_p)).sequences
        if sequence.topk is not None
    ]
    assert len(below) == 8
    assert np.min(below) >= np.log(min_p) - bench.tolerance
    assert bench.engine.is_succ16 or np.min(below) < -0.1
    greedy = tokens_of(bench.sample(replace(hot, temperature=0.0)))
    assert tokens_of(bench.sample(replace(hot, min_p=1.0))) == greedy


def test_alternatives_are_refused_by_name(bench: Bench):
    with pytest.raises(PostTrainingError, match="prompt_alt_tokens") as error:
        bench.sample(call(prompt_of(bench, 4), prompt_alt_tokens=3))
    assert error.value.reason is Reason.UNIMPLEMENTED


def test_what_is_asked_of_a_prompt_is_answered_once_and_like_each_alone(bench: Bench):
    targets = np.arange(3 * 8).reshape(-1, 3) % 16
    asked = call(
        prompt_of(bench, 9),
        num_samples=3,
        max_tokens=4,
        prompt_logprobs=True,
        topk_prompt_logprobs=4,
        target_prompt_tokens=targets,
    )
    together = bench.sample(asked)
    scored = bench.sample(replace(asked, topk_prompt_logprobs=0, target_prompt_tokens=None))
    ranked = bench.sample(replace(asked, prompt_logprobs=False, target_prompt_tokens=None))
    named = bench.sample(replace(asked, prompt_logprobs=False, topk_prompt_logprobs=0))
    assert {len(result.sequences) for result in (together, scored, ranked, named)} == {3}
    assert together.topk_prompt is not None
    assert ranked.topk_prompt is not None
    for got, alone in (
        (together.prompt_logprobs, scored.prompt_logprobs),
        (together.topk_prompt.logprobs, ranked.topk_prompt.logprobs),
        (together.target_prompt_logprobs, named.target_prompt_logprobs),
    ):
        assert got is not None
        assert alone is not None
        np.testing.assert_allclose(got, alone, rtol=0, atol=bench.tolerance)
    assert together.topk_prompt.token_ids.tolist() == ranked.topk_prompt.token_ids.tolist()
    assert scored.topk_prompt is scored.target_prompt_logprobs is None
    assert ranked.prompt_logprobs is ranked.target_prompt_logprobs is None
    assert named.prompt_logprobs is named.topk_prompt is None


def test_a_prompt_of_one_token_has_nothing_to_tell(bench: Bench):
    asked = call([3], max_tokens=2, prompt_logprobs=True, topk_prompt_logprobs=2)
    result = bench.sample(asked)
    np.testing.assert_equal(result.prompt_logprobs, [np.nan])
    assert result.topk_prompt is not None
    assert result.topk_prompt.token_ids.shape == (1, 2)
    assert len(result.sequences[0].tokens) == 2


@pytest.mark.parametrize("k", [3, 16, 17])
def test_topk_of_the_prompt(succ16: Bench, k):
    topk = succ16.sample(
        call([3, 4], num_samples=4, max_tokens=1, topk_prompt_logprobs=k)
    ).topk_prompt
    assert topk is not None
    assert topk.token_ids.shape == topk.logprobs.shape == (2, k)
    assert np.all(topk.logprobs[0] == -99999)
    kept = min(k, 16)
    ids = topk.token_ids[1, :kept].tolist()
    assert ids[0] == 4
    assert len(set(ids)) == kept
    np.testing.assert_allclose(topk.logprobs[1, :kept], [HIT] + [MISS] * (kept - 1), atol=1e-4)
    assert np.all(topk.logprobs[1, kept:] == -99999)


def test_min_p_applies_to_what_top_k_and_top_p_leave(succ16: Bench):
    """top_k 3 keeps 4 and two of the equals; min_p above e^-.8 = .449, as at temperature 5, 4 alone."""
    hot = call([3], num_samples=300, max_tokens=1, temperature=5.0, top_k=3)
    for min_p, kept in ((0.0, 3), (0.44, 3), (0.46, 1)):
        drawn = np.concatenate(
            [s.tokens for s in succ16.sample(replace(hot, min_p=min_p)).sequences]
        )
        assert 4 in drawn
        assert len(set(drawn.tolist())) == kept
