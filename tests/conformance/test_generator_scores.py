"""What a call can ask of its prompt, and min_p, over every generator: the numbers are the trainer's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backend.generator.base import AltTokens, SampleCall, SampleResult, Topk
from tests.conformance.bench import Bench
from tests.conformance.data import HIT, MISS, call, forward, sample
from tests.conformance.test_generator_conformance import prompt_of, tokens_of, trained

NUM_TOKENS = 9


def distributions(bench: Bench, session: str, prompt: list[int]) -> np.ndarray:
    """The trainer's log p of every token at positions 1 to the last: (num tokens - 1, V)."""
    every = list(range(bench.trainer.model.limits.vocab_size))
    (logprobs,) = forward(bench.trainer, session, [sample(prompt[:-1], [every] * len(prompt[1:]))])
    return logprobs


def asked(bench: Bench, session: str, **options: Any) -> SampleCall:
    """Of a random prompt, from what the session has learned."""
    defaults = {"snapshot": bench.publish(session), "max_tokens": 0}
    return call(prompt_of(bench, NUM_TOKENS, seed=3), **{**defaults, **options})


def alt_of(result: SampleResult) -> AltTokens:
    assert result.prompt_alt is not None
    return result.prompt_alt


def topk_of(result: SampleResult) -> Topk:
    assert result.topk_prompt is not None
    return result.topk_prompt


# The last n


@pytest.mark.parametrize("n", [1, 4, NUM_TOKENS - 1])
def test_the_last_n_are_scored_as_in_the_whole(bench: Bench, n):
    every = asked(bench, trained(bench), prompt_logprobs=True, topk_prompt_logprobs=3)
    whole, part = bench.sample(every), bench.sample(replace(every, num_scored=n))
    assert whole.prompt_logprobs is not None
    assert part.prompt_logprobs is not None
    assert np.isnan(part.prompt_logprobs).tolist() == [True] * (NUM_TOKENS - n) + [False] * n
    np.testing.assert_allclose(
        part.prompt_logprobs[-n:], whole.prompt_logprobs[-n:], rtol=0, atol=bench.tolerance
    )
    assert np.all(topk_of(part).token_ids[:-n] == 0)
    assert np.all(topk_of(part).logprobs[:-n] == -99999)
    assert topk_of(part).token_ids[-n:].tolist() == topk_of(whole).token_ids[-n:].tolist()
    np.testing.assert_allclose(
        topk_of(part).logprobs[-n:], topk_of(whole).logprobs[-n:], rtol=0, atol=bench.tolerance
    )


def test_the_last_n_of_a_prompt_that_is_warm_are_scored_as_cold(bench: Bench):
    """Prompts that share all but their last tokens, as completions of one context do."""
    session = trained(bench)
    snapshot = bench.publish(session)
    for seed in range(3):
        prompt = prompt_of(bench, 40) + prompt_of(bench, 4, seed=seed)
        scoring = call(prompt, snapshot=snapshot, max_tokens=0, prompt_logprobs=True, num_scored=4)
        scored = bench.sample(scoring).prompt_logprobs
        assert scored is not None
        (logprobs,) = forward(bench.trainer, session, [sample(prompt[:-1], prompt[1:])])
        np.testing.assert_allclose(scored[-4:], logprobs[-4:], rtol=0, atol=bench.tolerance)


# Named tokens


def test_target_logprobs_are_those_of_forward(bench: Bench):
    session = trained(bench)
    vocab_size = bench.generator.model.limits.vocab_size
    targets = np.random.default_rng(1).integers(-1, vocab_size, (NUM_TOKENS - 1, 6))
    targets[2], targets[5, :3] = -1, -1
    scoring = asked(bench, session, target_prompt_tokens=targets)
    result = bench.sample(scoring)
    got = result.target_prompt_logprobs
    assert got is not None
    assert (got.dtype, got.shape) == (np.float32, targets.shape)
    expected = np.take_along_axis(
        distributions(bench, session, scoring.prompt.tolist()), np.maximum(targets, 0), axis=1
    )
    wanted = targets >= 0
    np.testing.assert_allclose(got[wanted], expected[wanted], rtol=0, atol=bench.tolerance)
    assert np.all(got[~wanted] == 0)
    assert result.prompt_logprobs is None
    assert result.topk_prompt is None


def test_targets_of_the_prompts_own_tokens_are_its_logprobs(bench: Bench):
    prompt = prompt_of(bench, NUM_TOKENS)
    result = bench.sample(
        call(
            prompt,
            max_tokens=2,
            prompt_logprobs=True,
            target_prompt_tokens=np.array(prompt[1:])[:, None],
        )
    )
    assert result.prompt_logprobs is not None
    assert result.target_prompt_logprobs is not None
    np.testing.assert_array_equal(result.target_prompt_logprobs[:, 0], result.prompt_logprobs[1:])


# Alternatives


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_alternatives_have_the_untempered_logprobs_of_forward(bench: Bench, temperature):
    session = trained(bench)
    drawing = asked(bench, session, prompt_alt_tokens=20, temperature=temperature)
    alt = alt_of(bench.sample(drawing))
    assert alt.tokens.shape == alt.logprobs.shape == (NUM_TOKENS - 1, 20)
    assert (alt.tokens.dtype, alt.logprobs.dtype) == (np.int64, np.float32)
    rows = distributions(bench, session, drawing.prompt.tolist())
    expected = np.take_along_axis(rows, alt.tokens, axis=1)
    np.testing.assert_allclose(alt.logprobs, expected, rtol=0, atol=bench.tolerance)


def test_alternatives_follow_the_tempered_distribution(bench: Bench):
    """By 60 seeds of 100 draws: the share of each position's likeliest token, in 4.5 standard deviations."""
    session, temperature, num_draws = trained(bench), 1.6, 60 * 100
    drawing = asked(bench, session, prompt_alt_tokens=100, temperature=temperature)
    calls = [replace(drawing, seed=1000 + i) for i in range(60)]
    results = bench.sample_all(calls)
    drawn = np.concatenate(
        [alt_of(r).tokens for r in results if isinstance(r, SampleResult)], axis=1
    )
    assert drawn.shape == (NUM_TOKENS - 1, num_draws)
    masses = np.exp(distributions(bench, session, drawing.prompt.tolist()) / temperature)
    for tokens, mass in zip(drawn, masses / masses.sum(axis=1, keepdims=True), strict=True):
        best = int(mass.argmax())
        share = float(mass[best])
        allowed = 4.5 * np.sqrt(share * (1 - share) / num_draws)
        assert np.mean(tokens == best) == pytest.approx(share, abs=allowed)


def test_alternatives_follow_from_the_seed_whatever_else_is_asked_and_served(bench: Bench):
    """Fewer are the first of more; truncation and the last n do not touch them; other seeds give others."""
    session = trained(bench)
    drawing = asked(bench, session, prompt_alt_tokens=8, temperature=1.5, seed=4)
    alone = alt_of(bench.sample(drawing)).tokens.tolist()
    company = [
        drawing,
        replace(drawing, prompt_alt_tokens=3),
        replace(drawing, max_tokens=5, num_samples=3, top_k=1, top_p=0.1, min_p=1.0),
        replace(drawing, prompt_logprobs=True, num_scored=2, topk_prompt_logprobs=4),
        replace(drawing, seed=5),
        call(prompt_of(bench, 30), max_tokens=10, num_samples=4, temperature=2.0),
    ]
    results = [r for r in bench.sample_all(company) if isinstance(r, SampleResult)]
    assert len(results) == len(company)
    assert alt_of(results[0]).tokens.tolist() == alone
    assert alt_of(results[1]).tokens.tolist() == [row[:3] for row in alone]
    assert alt_of(results[2]).tokens.tolist() == alone
    assert alt_of(results[3]).tokens.tolist() == alone
    assert alt_of(results[4]).tokens.tolist() != alone


def test_asking_for_alternatives_changes_no_sample(bench: Bench):
    asked = call(prompt_of(bench, 6), max_tokens=12, num_samples=3, temperature=1.3, seed=8)
    plain = bench.sample(asked)
    assert tokens_of(bench.sample(replace(asked, prompt_alt_tokens=50))) == tokens_of(plain)


def test_greedy_alternatives_are_the_likeliest(bench: Bench):
    drawing = asked(
        bench, trained(bench), prompt_alt_tokens=3, temperature=0.0, topk_prompt_logprobs=1
    )
    result = bench.sample(drawing)
    assert alt_of(result).tokens.tolist() == [
        [token] * 3 for token in topk_of(result).token_ids[1:, 0].tolist()
    ]


# All together


def test_what_is_asked_of_a_prompt_is_answered_once_and_like_each_alone(bench: Bench):
    """Whatever is asked beside it, and for how many samples (LG-05)."""
    session = trained(bench)
    questions: dict[str, Any] = {
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 4,
        "target_prompt_tokens": np.arange(3 * (NUM_TOKENS - 1)).reshape(-1, 3) % 16,
        "prompt_alt_tokens": 5,
    }
    nothing: dict[str, Any] = {
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        "target_prompt_tokens": None,
        "prompt_alt_tokens": 0,
    }
    together = asked(bench, session, **questions, num_samples=3, max_tokens=4)
    result = bench.sample(together)
    assert len(result.sequences) == 3
    for name, value in questions.items():
        alone = bench.sample(replace(together, **{**nothing, name: value}))
        for part in ("prompt_logprobs", "target_prompt_logprobs"):
            if getattr(alone, part) is not None:
                np.testing.assert_allclose(
                    getattr(result, part), getattr(alone, part), rtol=0, atol=bench.tolerance
                )
        if alone.topk_prompt is not None:
            assert topk_of(result).token_ids.tolist() == alone.topk_prompt.token_ids.tolist()
        if alone.prompt_alt is not None:
            assert alt_of(result).tokens.tolist() == alone.prompt_alt.tokens.tolist()
        assert (
            sum(
                getattr(alone, part) is not None
                for part in (
                    "prompt_logprobs",
                    "topk_prompt",
                    "target_prompt_logprobs",
                    "prompt_alt",
                )
            )
            == 1
        )
        assert tokens_of(alone) == tokens_of(result)


def test_a_prompt_of_one_token_has_nothing_to_tell(bench: Bench):
    result = bench.sample(
        call([3], max_tokens=2, prompt_logprobs=True, prompt_alt_tokens=4, topk_prompt_logprobs=2)
    )
    assert alt_of(result).tokens.shape == alt_of(result).logprobs.shape == (0, 4)
    np.testing.assert_equal(result.prompt_logprobs, [np.nan])
    assert topk_of(result).token_ids.shape == (1, 2)
    assert len(result.sequences[0].tokens) == 2


# min_p


@pytest.mark.parametrize(("temperature", "min_p"), [(1.0, 0.1), (2.0, 0.3), (0.6, 0.02)])
def test_min_p_keeps_tokens_of_so_much_of_the_likeliests_probability(
    bench: Bench, temperature, min_p
):
    """After temperature. What is kept is not always the likeliest, or nothing would be shown."""
    vocab_size = bench.generator.model.limits.vocab_size
    drawing = call(
        prompt_of(bench, 4),
        num_samples=8,
        max_tokens=20,
        temperature=temperature,
        min_p=min_p,
        topk_sample_logprobs=vocab_size,
    )
    below = []
    for sequence in bench.sample(drawing).sequences:
        assert sequence.topk is not None
        below.append((sequence.logprobs - sequence.topk.logprobs[:, 0]) / temperature)
    assert np.min(below) >= np.log(min_p) - bench.tolerance
    assert bench.engine.is_succ16 or np.min(below) < -0.1
    free = tokens_of(bench.sample(replace(drawing, min_p=0.0)))
    assert tokens_of(bench.sample(replace(drawing, min_p=1e-30))) == free
    greedy = tokens_of(bench.sample(replace(drawing, temperature=0.0)))
    assert tokens_of(bench.sample(replace(drawing, min_p=1.0))) == greedy


@pytest.mark.parametrize(
    ("temperature", "min_p", "kept"),
    [
        # The others have e^-4 = .018316 of the hit's probability; at temperature 2, e^-2 = .135335.
        (1.0, 0.0184, {4}),
        (1.0, 0.0182, set(range(16))),
        (2.0, 0.1354, {4}),
        (2.0, 0.1352, set(range(16))),
    ],
)
def test_min_p_of_known_probabilities(succ16: Bench, temperature, min_p, kept):
    drawing = call([3], num_samples=1500, max_tokens=1, temperature=temperature, min_p=min_p)
    result = succ16.sample(drawing)
    assert {int(s.tokens[0]) for s in result.sequences} == kept
    logprobs = {round(float(s.logprobs[0]), 3) for s in result.sequences}
    assert logprobs <= {round(HIT, 3), round(MISS, 3)}


def test_min_p_applies_to_what_top_k_and_top_p_leave(succ16: Bench):
    """top_k 3 keeps 4, 0 and 1; min_p above e^-4 keeps 4 alone, below it all three."""
    drawing = call([3], num_samples=400, max_tokens=1, temperature=5.0, top_k=3)
    # At temperature 5 a miss has e^-.8 = .449 of the hit's probability.
    for min_p, kept in ((0.44, {4, 0, 1}), (0.46, {4})):
        result = succ16.sample(replace(drawing, min_p=min_p))
        assert {int(s.tokens[0]) for s in result.sequences} == kept
