"""Laws that hold between results, for every generator, and between a generator and its trainer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from backend.generator.base import SampleResult
from backend.trainer.base import AdamParams
from tests.conformance.bench import Bench
from tests.conformance.data import call, forward, random_sample, run, sample, train
from together_post_training.errors import PostTrainingError, Reason


def prompt_of(bench: Bench, num_tokens: int, seed: int = 0) -> list[int]:
    vocab_size = bench.generator.model.limits.vocab_size
    return np.random.default_rng(seed).integers(0, vocab_size, num_tokens).tolist()


def trained(bench: Bench, *, seed: int = 0, rank: int = 4) -> str:
    """A session far enough from the base that its snapshot cannot be taken for it."""
    session = bench.session(seed=seed, rank=rank)
    vocab_size = bench.trainer.model.limits.vocab_size
    for i in range(3):
        one = random_sample(77 + 10 * seed + i, vocab_size, 20)
        train(bench.trainer, session, [one], adam=AdamParams(learning_rate=0.05))
    return session


def tokens_of(result: SampleResult) -> list[list[int]]:
    return [s.tokens.tolist() for s in result.sequences]


def assert_same_answer(got: SampleResult, wanted: SampleResult, tolerance: float) -> None:
    assert tokens_of(got) == tokens_of(wanted)
    for one, other in zip(got.sequences, wanted.sequences, strict=True):
        assert one.stop_reason == other.stop_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=tolerance)


# Law 15: one logprob, whoever computes it


@pytest.mark.parametrize("rank", [4, 16])
def test_sampled_logprobs_are_those_of_forward(bench: Bench, rank):
    """LG-01."""
    session = trained(bench, rank=rank)
    snapshot = bench.publish(session)
    prompt = prompt_of(bench, 6)
    hot = call(prompt, snapshot=snapshot, num_samples=3, max_tokens=24, temperature=1.5, top_k=20)
    sampled_spread = []
    for sequence in bench.sample(hot).sequences:
        whole = prompt + sequence.tokens.tolist()
        (logprobs,) = forward(bench.trainer, session, [sample(whole[:-1], whole[1:])])
        np.testing.assert_allclose(
            sequence.logprobs, logprobs[len(prompt) - 1 :], rtol=0, atol=bench.tolerance
        )
        scoring = call(whole, snapshot=snapshot, max_tokens=0, prompt_logprobs=True)
        scored = bench.sample(scoring).prompt_logprobs
        assert scored is not None
        assert np.isnan(scored[0])
        np.testing.assert_allclose(scored[1:], logprobs, rtol=0, atol=bench.tolerance)
        sampled_spread.append(logprobs.std())
    assert min(sampled_spread) > 0.3  # else a shift by one could hide in the tolerance


def test_base_logprobs_are_those_of_a_fresh_session(bench: Bench):
    whole = prompt_of(bench, 15)
    (logprobs,) = forward(bench.trainer, bench.session(), [sample(whole[:-1], whole[1:])])
    scored = bench.sample(call(whole, max_tokens=0, prompt_logprobs=True)).prompt_logprobs
    assert scored is not None
    np.testing.assert_allclose(scored[1:], logprobs, rtol=0, atol=bench.tolerance)


def test_sampling_logprobs_fed_back_give_a_ratio_of_one(bench: Bench):
    """importance_sampling with advantages 1 of its own samples: -1 for each token."""
    session = trained(bench)
    prompt = prompt_of(bench, 3)
    asked = call(prompt, snapshot=bench.publish(session), max_tokens=6)
    (sequence,) = bench.sample(asked).sequences
    whole = prompt + sequence.tokens.tolist()
    one = sample(
        whole[:-1],
        whole[1:],
        logprobs=[0.0, 0.0, *sequence.logprobs.tolist()],
        advantages=[0.0, 0.0] + [1.0] * 6,
    )
    result = run(bench.trainer, session, [one], "importance_sampling")
    assert result.metrics["loss:sum"] == pytest.approx(-6, abs=6 * bench.tolerance + 1e-6)
    assert result.metrics["ratio:mean"] == pytest.approx(1, abs=bench.tolerance + 1e-6)


def test_topk_agrees_with_the_logprobs_of_every_token(bench: Bench):
    session = trained(bench)
    snapshot = bench.publish(session)
    vocab_size = bench.trainer.model.limits.vocab_size
    prompt = prompt_of(bench, 5)
    everything = sample(prompt[:-1], [list(range(vocab_size))] * 4)
    (logprobs,) = forward(bench.trainer, session, [everything])
    asked = call(prompt, snapshot=snapshot, max_tokens=0, topk_prompt_logprobs=5)
    topk = bench.sample(asked).topk_prompt
    assert topk is not None
    assert np.all(topk.logprobs[0] == -99999)
    for row, expected in zip(range(1, 5), logprobs, strict=True):
        got_ids, got = topk.token_ids[row], topk.logprobs[row]
        np.testing.assert_allclose(got, expected[got_ids], rtol=0, atol=bench.tolerance)
        best = np.sort(expected)[::-1][:5]
        np.testing.assert_allclose(got, best, rtol=0, atol=bench.tolerance)


def test_greedy_takes_the_first_of_topk(bench: Bench):
    session = trained(bench)
    asked = call(
        prompt_of(bench, 4),
        snapshot=bench.publish(session),
        max_tokens=12,
        temperature=0.0,
        topk_sample_logprobs=3,
    )
    (sequence,) = bench.sample(asked).sequences
    assert sequence.topk is not None
    assert sequence.topk.token_ids[:, 0].tolist() == sequence.tokens.tolist()
    np.testing.assert_allclose(
        sequence.topk.logprobs[:, 0], sequence.logprobs, rtol=0, atol=bench.tolerance
    )
    assert np.all(np.diff(sequence.topk.logprobs, axis=1) <= 0)


def test_samples_follow_their_own_logprobs(bench: Bench):
    """Shares of 1500 first tokens against exp(logprob), in 4.5 standard deviations."""
    session = trained(bench)
    asked = call(
        prompt_of(bench, 4),
        snapshot=bench.publish(session),
        num_samples=1500,
        max_tokens=1,
        topk_sample_logprobs=4,
    )
    result = bench.sample(asked)
    tokens = np.concatenate([s.tokens for s in result.sequences])
    topk = result.sequences[0].topk
    assert topk is not None
    for token, logprob in zip(topk.token_ids[0], topk.logprobs[0], strict=True):
        share = float(np.exp(logprob))
        allowed = 4.5 * np.sqrt(share * (1 - share) / 1500)
        assert np.mean(tokens == token) == pytest.approx(share, abs=allowed)


# Law 14: pinned


def test_a_snapshot_answers_the_same_whatever_is_trained_later(bench: Bench):
    session = trained(bench)
    snapshot = bench.publish(session)
    asked = call(prompt_of(bench, 5), snapshot=snapshot, num_samples=2, max_tokens=10)
    scoring = call(prompt_of(bench, 9), snapshot=snapshot, max_tokens=0, prompt_logprobs=True)
    first, scored = bench.sample(asked), bench.sample(scoring).prompt_logprobs
    for seed in range(3):
        more = random_sample(seed, bench.trainer.model.limits.vocab_size, 12)
        train(bench.trainer, session, [more], adam=AdamParams(learning_rate=0.1))
    later = bench.publish(session)
    assert_same_answer(bench.sample(asked), first, bench.engine.repeat_tolerance)
    np.testing.assert_array_equal(bench.sample(scoring).prompt_logprobs, scored)
    moved = bench.sample(replace(scoring, snapshot=later)).prompt_logprobs
    assert moved is not None
    assert scored is not None
    assert np.abs(moved[1:] - scored[1:]).max() > 0.1
    bench.trainer.delete_session(session)
    assert_same_answer(bench.sample(asked), first, bench.engine.repeat_tolerance)


def test_the_adapter_handed_over_may_be_reused(bench: Bench):
    session = trained(bench)
    adapter = bench.trainer.weights(session)
    snapshot = bench.name("snapshot")
    bench.add(snapshot, adapter)
    scoring = call(prompt_of(bench, 6), snapshot=snapshot, max_tokens=0, prompt_logprobs=True)
    first = bench.sample(scoring).prompt_logprobs
    train(
        bench.trainer,
        session,
        [random_sample(3, bench.trainer.model.limits.vocab_size, 9)],
        adam=AdamParams(learning_rate=0.5),
    )
    np.testing.assert_array_equal(bench.sample(scoring).prompt_logprobs, first)


def test_unknown_and_dropped_snapshots_are_not_found(bench: Bench):
    snapshot = bench.publish(bench.session())
    asked = call([1], snapshot=snapshot, max_tokens=2)
    bench.sample(asked)
    bench.drop(snapshot)
    for name in (snapshot, "never-made"):
        with pytest.raises(PostTrainingError, match=name) as error:
            bench.sample(replace(asked, snapshot=name))
        assert error.value.reason is Reason.SNAPSHOT_NOT_FOUND


def test_a_running_sample_survives_the_drop_of_its_snapshot(bench: Bench):
    """SA-23."""
    session = trained(bench)
    snapshot, twin = bench.publish(session), bench.publish(session)
    asked = call([1, 2], snapshot=snapshot, num_samples=2, max_tokens=40)

    async def drop_while_running() -> SampleResult:
        running = asyncio.ensure_future(bench.generator.sample(asked))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        bench.generator.drop_snapshot(snapshot)
        return await running

    expected = bench.sample(replace(asked, snapshot=twin))
    assert_same_answer(bench.wait(drop_while_running()), expected, bench.tolerance)


# Laws 16 and 17: the same answer, warm or cold, alone or in company


def test_a_warm_answer_equals_a_cold_one(bench: Bench):
    """The same prompt on two snapshots and the base, twice each: no cache crosses between them."""
    prompt = prompt_of(bench, 20)
    snapshots = [None, bench.publish(trained(bench, seed=1)), bench.publish(trained(bench, seed=2))]
    scored: list[list[np.ndarray]] = []
    for snapshot in snapshots * 2:
        scoring = call(prompt, snapshot=snapshot, max_tokens=0, prompt_logprobs=True)
        asked = call(prompt, snapshot=snapshot, max_tokens=8, topk_sample_logprobs=1)
        logprobs = bench.sample(scoring).prompt_logprobs
        assert logprobs is not None
        scored.append([logprobs[1:], bench.sample(asked).sequences[0].logprobs])
    for cold, warm in zip(scored[:3], scored[3:], strict=True):
        for one, other in zip(cold, warm, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=bench.tolerance)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(scored[a][0] - scored[b][0]).max() > 0.1


def test_a_seed_fixes_the_tokens_whatever_else_is_served(bench: Bench):
    snapshots = [None, bench.publish(trained(bench, seed=1)), bench.publish(trained(bench, rank=8))]
    calls = [
        call(
            prompt_of(bench, 3 + 2 * i, seed=i),
            snapshot=snapshots[i % 3],
            num_samples=1 + i % 2,
            max_tokens=10 + 3 * i,
            seed=100 * i,
            temperature=(1.0, 0.8, 0.0)[i % 3],
            top_k=(0, 5)[i % 2],
            top_p=(1.0, 0.9, 0.95, 1.0)[i % 4],
        )
        for i in range(7)
    ]
    alone = [bench.sample(c) for c in calls]
    for got, wanted in zip(bench.sample_all(calls), alone, strict=True):
        assert isinstance(got, SampleResult)
        assert_same_answer(got, wanted, bench.tolerance)


def test_sample_i_uses_seed_plus_i(bench: Bench):
    asked = call(prompt_of(bench, 4), num_samples=4, max_tokens=12, seed=7)
    together = tokens_of(bench.sample(asked))
    single = [
        tokens_of(bench.sample(replace(asked, num_samples=1, seed=7 + i)))[0] for i in range(4)
    ]
    assert together == single
    assert len({tuple(tokens) for tokens in together}) == 4


@pytest.mark.parametrize("seed", [-5, 0, 2**63 - 1])
def test_any_integer_is_a_seed(bench: Bench, seed):
    asked = call(prompt_of(bench, 2), num_samples=2, max_tokens=5, seed=seed)
    assert tokens_of(bench.sample(asked)) == tokens_of(bench.sample(asked))


def test_longer_samples_begin_like_shorter_ones(bench: Bench):
    """A draw depends on the seed and the position, not on how many follow."""
    asked = call(prompt_of(bench, 4), max_tokens=20, seed=3)
    longer = tokens_of(bench.sample(asked))[0]
    assert tokens_of(bench.sample(replace(asked, max_tokens=9)))[0] == longer[:9]


def test_samples_of_one_call_stop_each_for_themselves(bench: Bench):
    asked = call(prompt_of(bench, 3), num_samples=6, max_tokens=20, temperature=1.3, seed=11)
    free = tokens_of(bench.sample(asked))
    stop = free[0][7]
    stopped = bench.sample(replace(asked, stop=replace(asked.stop, tokens=(stop,))))
    for tokens, sequence in zip(free, stopped.sequences, strict=True):
        has_stop = stop in tokens
        cut = tokens[: tokens.index(stop) + 1] if has_stop else tokens
        assert sequence.tokens.tolist() == cut
        assert len(sequence.logprobs) == len(cut)
        assert sequence.stop_reason == ("stop" if has_stop else "length")


def test_a_cancelled_call_leaves_the_engine_serving(bench: Bench):
    limits = bench.generator.model.limits
    long = call([1], num_samples=4, max_tokens=limits.max_seq_length - 1)
    short = call(prompt_of(bench, 3), max_tokens=5)
    expected = bench.sample(short)

    async def cancel_one() -> SampleResult:
        running = asyncio.ensure_future(bench.generator.sample(long))
        for _ in range(3):
            await asyncio.sleep(0.001)
        was_running = not running.done()
        running.cancel()
        answer = await bench.generator.sample(short)
        assert was_running
        assert running.cancelled()
        return answer

    assert_same_answer(bench.wait(cancel_one()), expected, bench.tolerance)


def test_a_closed_generator_refuses(bench: Bench):
    _, generator = bench.engine.start()
    bench.wait(generator.close())
    with pytest.raises(PostTrainingError) as error:
        bench.wait(generator.sample(call([1], max_tokens=1)))
    assert error.value.reason is Reason.UNAVAILABLE
